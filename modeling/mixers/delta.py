r"""
The mixer of the delta family. For each head, with n_h delta steps a token, i = 1 ... n_h:

    q_t     = normalise(silu(conv(W_q x)_t)) / sqrt(key size)
    k_{t,i} = normalise(silu(conv(W_ki x)_t))           v_{t,i} = silu(conv(W_vi x)_t)
    beta_{t,i} = beta_max sigmoid(W_bi x_t)             alpha_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias))

    h_{t,0} = alpha_t h_{t-1,n_h}
    h_{t,i} = (I - beta_{t,i} k_{t,i} k_{t,i}') h_{t,i-1} + beta_{t,i} k_{t,i} v_{t,i}'
    out     = W_o (RMSNorm_head(h_{t,n_h}' q_t) * silu(W_g x_t))

DeltaNet has n_h = 1 and no decay (alpha = 1), Gated DeltaNet n_h = 1, DeltaProduct no decay; Gated DeltaProduct is the
whole. Convolution and output gate are options. The delta steps are steps of the one scan, one after another along its
length: decay alpha_t at the first of a token and 1 at the others, read at the last.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..scan.definition import ScanState
from ..scan.dispatch import choose_backend, scan, scan_vector_dtype
from ..scan.sequences import sequence_rows, token_order
from .delta_backends import DELTA_BACKENDS
from .delta_cpu import COLUMNS, DeltaWeights
from .fused_step import has_global_hooks, has_plain_parameters, known_to_compiled_code, submodule
from .inputs import check_mixer_inputs
from .joined_projections import project
from .letters import is_unseen, take_tokens
from .linear_maps import apply_linear
from .short_convolution import short_convolution

KEY_EPSILON = 1e-6  # added to the square of the length of queries and keys, which it divides


class DeltaState(NamedTuple):
    """Everything a mixer needs of the tokens it has seen, one row for each sequence."""

    h: torch.Tensor  # (batch, heads, key size, value size)
    tokens: torch.Tensor  # (batch, conv_size - 1, channels) queries, keys and values of the last tokens; or size 0


@known_to_compiled_code
class DeltaMixer(nn.Module):
    """
    One mixer of the delta family. Names and layout of its parameters are those of the layers of flash-linear-attention,
    rows of `k_proj`, `v_proj` and `b_proj` by delta step, head, channel.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, steps, hidden = config.num_heads, config.num_householder, config.hidden_size
        keys, values = heads * config.head_key_dim, heads * config.head_value_dim
        self.split_sizes = [keys, steps * keys, steps * values]
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, steps * keys, bias=False)
        self.v_proj = nn.Linear(hidden, steps * values, bias=False)
        self.b_proj = nn.Linear(hidden, steps * heads, bias=False)
        if config.use_decay:
            self.a_proj = nn.Linear(hidden, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
        if config.conv_size:
            # Modules only to hold the weights under their usual names.
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                nn.Conv1d(size, size, config.conv_size, groups=size, bias=False) for size in self.split_sizes
            )
        if config.use_output_gate:
            self.g_proj = nn.Linear(hidden, values, bias=False)
        self.o_norm = nn.RMSNorm(config.head_value_dim, eps=config.norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.projections = {"q_proj": keys, "k_proj": steps * keys, "v_proj": steps * values}
        if config.use_output_gate:
            self.projections["g_proj"] = values
        self.projections["b_proj"] = steps * heads
        if config.use_decay:
            self.projections["a_proj"] = heads

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: DeltaState | None = None,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, DeltaState]:
        """
        Maps (batch, length, hidden_size) to the same shape, and the state before these tokens (None at the start of a
        sequence) to the state after them. Whole sequences, pieces and single steps take this same path. `mask` and
        `cu_seqlens` are those of `scan`; a padded position reads as 0. With an `index` (batch, length), `hidden_states`
        (letters, hidden_size) are those of letters, and token i is letter index[i].
        """
        mask = check_mixer_inputs(self, hidden_states, state, mask, cu_seqlens, index)
        batch, length = (hidden_states if index is None else index).shape[:2]
        rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
        state = self.initial_state(hidden_states, rows) if state is None else DeltaState(*state)
        compiled = DELTA_BACKENDS.get(choose_backend(self.config.scan_backend, hidden_states.device))
        projected = project(self, list(self.projections), hidden_states, COLUMNS)
        if compiled is None or not self.has_bare_norm():
            y, state = self.mix(take_tokens(projected, index), state, mask, cu_seqlens)
        else:
            sequences = token_order(mask, cu_seqlens, batch, length)
            y, state = compiled(projected, self.weights(), state, sequences, index, **self.options())
        return apply_linear(self.o_proj, y.to(hidden_states.dtype)), DeltaState(*state)

    def may_take_letters(self) -> bool:
        """Whether nobody looks at what the maps of single tokens make of each of them."""
        return all(is_unseen(submodule(self, name), nn.Linear) for name in self.projections)

    def has_bare_norm(self) -> bool:
        """Whether compiled code, which calls no modules, may stand for the output norm."""
        norm, shape = submodule(self, "o_norm"), (self.config.head_value_dim,)
        if has_global_hooks() or not is_unseen(norm, nn.RMSNorm):
            return False
        return has_plain_parameters(norm) and norm.normalized_shape == shape

    def weights(self) -> DeltaWeights:
        """The parameters that are not projections, for backends that take them in one piece."""
        A_log, dt_bias = (self.A_log, self.dt_bias) if self.config.use_decay else (None, None)
        conv_weight = self.conv_weight() if self.config.conv_size else None
        return DeltaWeights(conv_weight, A_log, dt_bias, self.o_norm.weight)

    def options(self) -> dict[str, bool | float]:
        """What else such backends take."""
        return {
            "gated": self.config.use_output_gate,
            "beta_max": float(self.config.beta_max),
            "key_epsilon": KEY_EPSILON,
            "epsilon": self.o_norm.eps,
        }

    def conv_weight(self) -> torch.Tensor:
        """(channels, width) of the convolution of queries, keys and values."""
        return torch.cat([conv.weight.squeeze(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def mix(self, projected, state, mask, cu_seqlens) -> tuple[torch.Tensor, DeltaState]:
        """From the projections of the input to what the output projection takes, (batch, length, heads * values)."""
        parts = projected[..., : sum(self.projections.values())].split(list(self.projections.values()), dim=-1)
        parts = dict(zip(self.projections, parts, strict=True))
        q, k, v, tokens = self.queries_keys_values(projected[..., : sum(self.split_sizes)], state, mask, cu_seqlens)
        beta, log_decay = self.gates(parts["b_proj"], parts.get("a_proj"))
        length, steps = beta.shape[1:3]
        y, scanned = scan(
            v.flatten(1, 2),
            k.flatten(1, 2),
            # Only the last step of a token is read.
            F.pad(q[:, :, None], (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2),
            log_decay.flatten(1, 2),
            beta.flatten(1, 2),
            k=k.flatten(1, 2),
            reflection=(beta * log_decay.exp()).flatten(1, 2),
            initial_state=self.scan_state(state),
            mask=None if mask is None else mask.repeat_interleave(steps, dim=1),
            cu_seqlens=None if cu_seqlens is None else steps * cu_seqlens.long(),
            chunk_size=self.config.chunk_size,
            backend=self.config.scan_backend,
        )
        y = y.unflatten(1, (length, steps))[:, :, -1].to(beta.dtype)  # (batch, length, heads, value size)
        if self.has_bare_norm():  # whose weight may be of half precision
            y = F.rms_norm(y, y.shape[-1:], self.o_norm.weight.to(y.dtype), self.o_norm.eps)
        else:
            y = self.o_norm(y)
        y = y.flatten(-2)
        if self.config.use_output_gate:
            y = y * F.silu(parts["g_proj"].to(y.dtype))
        return y, DeltaState(scanned.h, tokens)

    def queries_keys_values(self, x, state, mask, cu_seqlens):
        """
        From their projections, q (batch, length, heads, key size), k and v (batch, length, steps, heads, key or value
        size), in the dtype the scan reads; and the last tokens for the next convolution.
        """
        vector_dtype = scan_vector_dtype(self.config.scan_backend, x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        tokens = state.tokens
        if self.config.conv_size:
            rows = sequence_rows(mask, cu_seqlens, *x.shape[:2])
            x, tokens = short_convolution(x, self.conv_weight().to(x.dtype), tokens.to(x.dtype), rows)
        q, k, v = F.silu(x).split(self.split_sizes, dim=-1)
        heads, steps = self.config.num_heads, self.config.num_householder
        q = normalise(q.unflatten(-1, (heads, -1))) * self.config.head_key_dim**-0.5
        k = normalise(k.unflatten(-1, (steps, heads, -1)))
        v = v.unflatten(-1, (steps, heads, -1))
        return q.to(vector_dtype), k.to(vector_dtype), v.to(vector_dtype), tokens

    def gates(self, b: torch.Tensor, a: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        From their projections, the strength of every delta step and the logarithm of its decay: (batch, length, steps,
        heads) both.
        """
        beta = b.to(torch.promote_types(b.dtype, torch.float32)).unflatten(-1, (-1, self.config.num_heads))
        beta = self.config.beta_max * beta.sigmoid()
        if a is None:
            return beta, torch.zeros_like(beta)
        log_decay = -self.A_log.to(beta.dtype).exp() * F.softplus(a.to(beta.dtype) + self.dt_bias)
        return beta, F.pad(log_decay[:, :, None], (0, 0, 0, beta.shape[2] - 1))

    def initial_state(self, hidden_states: torch.Tensor, rows: int | None = None) -> DeltaState:
        """The state before the first token of each sequence; without `rows`, each row of hidden_states is one."""
        shapes = self.state_shapes(hidden_states.shape[0] if rows is None else rows)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        return DeltaState(*(hidden_states.new_zeros(shape, dtype=dtype) for shape in shapes))

    def state_shapes(self, rows: int) -> DeltaState:
        """The shape of each part of a state with `rows` sequences."""
        config = self.config
        return DeltaState(
            h=(rows, config.num_heads, config.head_key_dim, config.head_value_dim),
            tokens=(rows, max(config.conv_size - 1, 0), sum(self.split_sizes)),
        )

    def scan_state(self, state: DeltaState) -> ScanState:
        # Nothing is carried, so the scan never reads the last token.
        rows, heads, keys, values = state.h.shape
        return ScanState(state.h, state.h.new_zeros(rows, heads, keys), state.h.new_zeros(rows, heads, values))


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length one, shorter where x is near 0."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPSILON)
