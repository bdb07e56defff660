"""What the models accept: checks, and the conventions of transformers for padding and packing made uniform."""

from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import TransformersKwargs

from .scan.sequences import boolean_mask, can_look_into, check_cu_seqlens

# Keywords that transformers passes to any model, and that have no meaning here or are handled by its decorators.
TOLERATED_KEYWORDS = frozenset(TransformersKwargs.__annotations__) | {
    "cache_position",
    "debug_io",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}
COMPLEX = (np.complex64, np.complex128)


class Sequences(NamedTuple):
    """Where sequences lie in a (batch, length) array: at most one of the two is given."""

    mask: torch.Tensor | None  # (batch, length), true at tokens
    cu_seqlens: torch.Tensor | None  # (sequences + 1,), for a batch of one


def find_sequences(
    batch: int,
    length: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Sequences:
    """
    Args:
        attention_mask (batch, at least length): As in transformers, 0 at padding. With a cache it may also cover the
            tokens before these, which are then ignored.
        position_ids (batch or 1, length): Only read for packing: in a batch of one, each 0 starts a sequence.
        cu_seqlens (sequences + 1,): Bounds of packed sequences.

    Packing decides shapes by values: torch.compile breaks its graph there, and cannot with fullgraph=True.
    """
    mask = None if attention_mask is None else trim_mask(attention_mask, batch, length)
    if position_ids is not None:
        check_positions(position_ids, batch, length)
    # On the meta device there are no positions to read: each row is then one sequence.
    if cu_seqlens is None and position_ids is not None and not position_ids.is_meta:
        cu_seqlens = packed_bounds(position_ids, batch, length, mask)
    if cu_seqlens is not None:
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                "attention_mask hides positions while cu_seqlens (or position_ids that start again) packs sequences; "
                "packed sequences hold no padding, so pass only one of them."
            )
        check_cu_seqlens(cu_seqlens, batch, length)
        return Sequences(None, cu_seqlens)
    # Looking into a tensor would stall an accelerator or break a graph; on a CPU it saves the work of masking.
    if mask is not None and can_look_into(mask) and bool(mask.all()):
        mask = None
    return Sequences(mask, None)


def trim_mask(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The part of the mask that covers these tokens, as booleans."""
    attention_mask = boolean_mask(attention_mask, "attention_mask")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, length) = {(batch, length)}, "
            "or longer by the tokens before these."
        )
    return attention_mask[:, attention_mask.shape[1] - length :]


def check_positions(position_ids: torch.Tensor, batch: int, length: int) -> None:
    if tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}; they must be (batch, length) = {(batch, length)} or "
            f"{(1, length)}."
        )


def take_packing(cu_seqlens: torch.Tensor | None, keywords: dict) -> torch.Tensor | None:
    """`cu_seqlens`, or else the bounds under the name that the padding-free collators of transformers give them."""
    bounds = keywords.pop("cu_seq_lens_q", None)
    return bounds if cu_seqlens is None else cu_seqlens


def packed_bounds(
    position_ids: torch.Tensor, batch: int, length: int, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """The bounds of packed sequences if positions start again after another token, else None."""
    valid = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask
    # The first token of a left-padded row has position 0 too, but no token before it.
    starts_again = (position_ids == 0) & valid & (valid.cumsum(1) > 1)
    if not bool(starts_again.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids start again inside a row: packing needs a batch of 1, the batch is {batch}.")
    starts = starts_again[0].nonzero().flatten()
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), length)])


def check_tokens(input_ids: torch.Tensor, vocab_size: int) -> None:
    if not can_look_into(input_ids):
        return
    low, high = input_ids.aminmax()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids hold {int(low if low < 0 else high)}; with vocab_size={vocab_size} they must be 0 to "
            f"{vocab_size - 1}."
        )


def check_observations(observations: torch.Tensor, size: int, mask: torch.Tensor | None) -> None:
    if observations.dim() != 3 or observations.shape[-1] != size:
        raise ValueError(
            f"observations have shape {tuple(observations.shape)}; they must be (batch, time, observation_size={size})."
        )
    if not observations.is_floating_point() or not can_look_into(observations):
        return
    finite = observations.isfinite().all(-1)
    finite = finite if mask is None else finite | ~mask
    if not finite.all():
        row, frame = (~finite).nonzero()[0].tolist()
        raise ValueError(f"observations hold a number that is not finite, first in row {row}, frame {frame}.")


def as_numbers(name: str, values, **options) -> torch.Tensor:
    """What torch.as_tensor makes of lists, arrays and tensors; the error for anything else says `name`."""
    is_complex = values.is_complex() if torch.is_tensor(values) else getattr(values, "dtype", None) in COMPLEX
    try:
        # To convert complex numbers to a real dtype would only warn.
        tensor = torch.as_tensor(values, **{} if is_complex else options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers; given: {type(values).__name__}. {error}") from error
    if tensor.is_complex():
        raise ValueError(f"{name} must be real numbers; given: complex ones.")
    return tensor


def check_embeddings(inputs_embeds: torch.Tensor, size: int) -> None:
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != size or not inputs_embeds.is_floating_point():
        raise ValueError(
            f"inputs_embeds have shape {tuple(inputs_embeds.shape)} and dtype {inputs_embeds.dtype}; they must be "
            f"(batch, length, hidden_size={size}) of a floating dtype."
        )


def refuse_unknown_keywords(keywords: dict) -> None:
    unknown = sorted(set(keywords) - TOLERATED_KEYWORDS)
    if unknown:
        raise TypeError(f"forward() got an unexpected keyword argument {unknown[0]!r}.")
