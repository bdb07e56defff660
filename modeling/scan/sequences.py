"""Sequences with padding anywhere, or packed one after another, as rows whose tokens come first."""

from itertools import pairwise
from typing import NamedTuple

import torch

from .torch_transforms import is_transforming


class SequenceRows(NamedTuple):
    """
    How the tokens of a (batch, length) array lie in (rows, width): each row holds one sequence from its first slot on.
    Sequences so laid out meet the same chunks as they would alone, so that padding does not even change the rounding.
    """

    token: torch.Tensor  # (rows, width) index into the flattened tokens
    slot: torch.Tensor  # (batch, length) index into the flattened slots
    lengths: torch.Tensor  # (rows,)
    mask: torch.Tensor | None  # (batch, length), true at tokens; None if all are

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, ...) -> (rows, width, ...), zero in the slots past a row's end."""
        x = x.flatten(0, 1)[self.token]
        return torch.where(expand_like(self.filled, x), x, 0.0)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width, ...) -> (batch, length, ...), zero at padding."""
        x = x.flatten(0, 1)[self.slot]
        return x if self.mask is None else torch.where(expand_like(self.mask, x), x, 0.0)

    @property
    def filled(self) -> torch.Tensor:
        return torch.arange(self.token.shape[1], device=self.token.device) < self.lengths[:, None]


class TokenOrder(NamedTuple):
    """Which tokens of a flattened (batch, length) array make up each sequence; without bounds, each row is one."""

    bounds: torch.Tensor | None = None  # (sequences, 2) where a sequence starts and ends in `order`
    order: torch.Tensor | None = None  # (batch * length,) numbers of tokens; None if they stand in their order

    def last(self, x: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        """The entry of x (batch, length, ...) at each sequence's last token, and that of `empty` where it has none."""
        if x.shape[0] * x.shape[1] == 0:
            return empty
        if self.bounds is None:
            return x[:, -1]
        start, end = self.bounds.unbind(1)
        at = (end - 1).clamp(min=0)
        at = at if self.order is None else self.order[at]
        return torch.where(expand_like(end > start, empty), x.flatten(0, 1)[at], empty)

    def rows(self, batch: int, length: int) -> SequenceRows | None:
        """The sequences of a (batch, length) array laid out as rows; None if its rows are the sequences."""
        if self.bounds is None:
            return None
        return packed_rows(self.bounds, length) if self.order is None else masked_rows(*self, batch, length)


def expand_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape, *(1,) * (other.dim() - x.dim()))


def masked_rows(bounds: torch.Tensor, order: torch.Tensor, batch: int, length: int) -> SequenceRows:
    """One row for each row of a batch; `order` has its tokens before its padding."""
    lengths, order = bounds.diff(dim=1).squeeze(1), order.view(batch, length)
    place = torch.argsort(order, dim=1)
    row = torch.arange(batch, device=order.device)[:, None]
    width = length
    # The longest sequence would do; a graph or an accelerator, which cannot look, takes the whole length.
    if order.is_cpu and order.numel() and not torch.compiler.is_compiling():
        width = max(int(lengths.max()), 1)
    slot = place.clamp(max=width - 1) + row * width
    return SequenceRows(order[:, :width], slot, lengths, place < lengths[:, None])


def packed_rows(bounds: torch.Tensor, length: int) -> SequenceRows:
    """One row for each of the sequences that fill a batch of one, one after another."""
    starts, lengths = bounds[:, 0], bounds.diff(dim=1).squeeze(1)
    width = int(lengths.max())
    token = starts[:, None] + torch.arange(width, device=bounds.device)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths, output_size=length)
    slot = row * width + torch.arange(length, device=bounds.device) - starts[row]
    return SequenceRows(token.clamp(max=max(length - 1, 0)), slot[None], lengths, None)


def sequence_rows(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, batch: int, length: int
) -> SequenceRows | None:
    """Checks `mask` or `cu_seqlens` against (batch, length) and lays out the sequences; None without either."""
    return token_order(mask, cu_seqlens, batch, length).rows(batch, length)


def token_order(mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, batch: int, length: int) -> TokenOrder:
    """Checks `mask` or `cu_seqlens` against (batch, length) and says where the sequences lie."""
    mask = check_sequences(mask, cu_seqlens, batch, length)
    if mask is not None:
        starts = length * torch.arange(batch, device=mask.device)
        order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True) + starts[:, None]
        return TokenOrder(torch.stack([starts, starts + mask.sum(1)], dim=1), order.flatten())
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()
        return TokenOrder(torch.stack([cu_seqlens[:-1], cu_seqlens[1:]], dim=1))
    return TokenOrder()


def check_sequences(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor | None:
    """Raises an error that names what does not fit (batch, length), or is not a mask; returns the mask as booleans."""
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens were both given; packed sequences hold no padding, so pass only one.")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
    if mask is None:
        return None
    mask = boolean_mask(mask, "mask")
    if mask.shape != (batch, length):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be (batch, length) = {(batch, length)}.")
    return mask


def boolean_mask(mask: torch.Tensor, name: str) -> torch.Tensor:
    """A mask of booleans, or of numbers that are 0 at padding and 1 at tokens, as booleans."""
    if not torch.is_tensor(mask) or mask.is_complex():
        kind = mask.dtype if torch.is_tensor(mask) else type(mask).__name__
        raise ValueError(f"{name} is of {kind}; it must be a tensor of booleans, or of 0 and 1.")
    if mask.dtype == torch.bool:
        return mask
    result = mask != 0
    if can_look_into(mask) and (mask != result).any():
        other = mask[mask != result][0].item()
        raise ValueError(f"{name} holds {other}; it must be of booleans, or of 0 at padding and 1 at tokens.")
    return result


def can_look_into(x: torch.Tensor) -> bool:
    """Whether values may be inspected: it would stall an accelerator, and cannot be traced into a graph or batched."""
    return x.is_cpu and x.numel() > 0 and not torch.compiler.is_compiling() and not is_transforming()


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, length: int) -> None:
    if not torch.is_tensor(cu_seqlens):
        raise ValueError(f"cu_seqlens is a {type(cu_seqlens).__name__}; it must be a tensor.")
    whole = cu_seqlens.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not whole:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; it must be a 1-dimensional "
            "integer tensor with the start of each sequence and, last, the total length."
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1 that holds all sequences; the batch is {batch}.")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in pairwise(bounds)):
        shown = str(bounds if len(bounds) <= 12 else [*bounds[:10], "...", bounds[-1]])
        raise ValueError(f"cu_seqlens={shown}; it must rise from 0 to the packed length {length}.")
