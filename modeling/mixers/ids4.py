r"""
The mixer of IDS4 (input-dependent S4), with its residual connection and norm:

    A_t = gelu(sum_i x_t[i] A[i])       P_t = A_1 A_2 ... A_t
    z_t = x_t + C (P_t w + b) + c + D x_t + d
    out = LayerNorm(z_t)

P_t comes as 2^e_t p_t (see `matrix_products`), and where e_t > 0 the norm is taken of 2^-e_t z_t: that is the same if
the number added to the variance is scaled too, and it stays finite however large the product is.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..scan.sequences import SequenceRows, sequence_rows
from ..scan.without_autocast import without_autocast
from .fused_step import known_to_compiled_code, submodule
from .inputs import check_mixer_inputs
from .letters import Letters, is_unseen, take_tokens
from .matrix_products import ScaledProduct, identity_products, running_products


class IDS4State(NamedTuple):
    """The product of the matrices of all tokens so far, 2^exponent h, one row for each sequence."""

    h: torch.Tensor  # (batch, s, s)
    exponent: torch.Tensor  # (batch, 1)


@known_to_compiled_code
class IDS4Mixer(nn.Module):
    """One IDS4 mixer; its parameters have the names of the public code."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.state_size
        self.A = nn.Parameter(torch.empty(hidden, size, size))
        self.proj = nn.Linear(size, 1)
        self.C = nn.Linear(size, hidden)
        self.D = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=config.norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: IDS4State | None = None,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        keep_state: bool = True,
    ) -> tuple[torch.Tensor, IDS4State | None]:
        """
        Maps (batch, length, hidden_size) to the same shape, and the state before these tokens (None at the start of a
        sequence) to the state after them, which costs more than all else: without `keep_state` there is none. `mask`
        and `cu_seqlens` are those of `scan`. With an `index` (batch, length), `hidden_states` (letters, hidden_size)
        are those of letters, and token i is letter index[i].
        """
        mask = check_mixer_inputs(self, hidden_states, state, mask, cu_seqlens, index)
        batch, length = (hidden_states if index is None else index).shape[:2]
        skip = take_tokens(hidden_states + self.D(hidden_states), index)
        # Autocast would run the products in half precision.
        with without_autocast(hidden_states.device):
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            rows = sequence_rows(mask, cu_seqlens, batch, length)
            if state is None:
                state = self.initial_state(hidden_states, batch if rows is None else len(rows.lengths))
            y, exponents, product = running_products(
                product_inputs(hidden_states.to(dtype), index, rows),
                self.A.to(dtype),
                self.proj.weight[0].to(dtype),
                ScaledProduct(*(part.to(dtype) for part in state)),
                None if rows is None else rows.lengths,
                chunk_elements=self.config.chunk_elements,
                keep_last=keep_state,
            )
            read = torch.cat([y, exponents[..., None]], dim=-1)
            y, exponents = (read if rows is None else rows.scatter(read)).split([y.shape[-1], 1], dim=-1)
            output = self.combine(y, exponents, skip.to(dtype))
        return output.to(hidden_states.dtype), IDS4State(*product) if keep_state else None

    def may_take_letters(self) -> bool:
        """Whether nobody looks at what the map of single tokens makes of each of them."""
        return is_unseen(submodule(self, "D"), nn.Linear)

    def combine(self, y: torch.Tensor, exponents: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """LayerNorm(C (2^e y + b) + c + skip), e (batch, length, 1) being the exponents."""
        common = exponents.clamp(min=0.0)
        small = torch.exp2(-common)
        read = torch.exp2(exponents - common) * y + small * self.proj.bias.to(y.dtype)
        z = F.linear(read, self.C.weight.to(y.dtype)) + small * (skip + self.C.bias)
        z = z - z.mean(-1, keepdim=True)
        eps = (self.norm.eps * small.square()).clamp(min=torch.finfo(y.dtype).tiny)
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
        return z * self.norm.weight + self.norm.bias

    def initial_state(self, hidden_states: torch.Tensor, rows: int | None = None) -> IDS4State:
        """The identity for each sequence; without `rows`, each row of hidden_states is one."""
        like = hidden_states.new_zeros((), dtype=torch.promote_types(hidden_states.dtype, torch.float32))
        rows = hidden_states.shape[0] if rows is None else rows
        return IDS4State(*identity_products(rows, self.config.state_size, like))

    def state_shapes(self, rows: int) -> IDS4State:
        """The shape of each part of a state with `rows` sequences."""
        size = self.config.state_size
        return IDS4State(h=(rows, size, size), exponent=(rows, 1))


def product_inputs(x: torch.Tensor, index: torch.Tensor | None, rows: SequenceRows | None) -> torch.Tensor | Letters:
    """The inputs of the products, or the letters that they are, one row for each sequence."""
    if index is None:
        return x if rows is None else rows.gather(x)
    return Letters(x, index if rows is None else index.flatten()[rows.token])
