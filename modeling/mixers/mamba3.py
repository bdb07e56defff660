r"""
The Mamba-3 mixer with an input-dependent reflection.

    a_t     = max(softplus(W_a x_t), a_min)         dt_t  = softplus(W_dt x_t + b_dt)         d_t = exp(-a_t dt_t)
    lam_t   = sigmoid(W_lam x_t)                    omega_t = pi tanh(W_omega x_t)
    Theta_t = sum_{j<=t} dt_j omega_j               Q_t   = rotation of adjacent pairs by Theta_t
    B_t     = Q_t (RMSNorm(W_B x_t) + B_bias)       C_t   = Q_t (RMSNorm(W_C x_t) + C_bias)
    k_t     = Q_t (W_k x_t / |W_k x_t|)             beta_t = 2 sigmoid(w_beta x_t + b_beta)

and with gate_form="exact"

    a_t     = relu(softplus(W_a x_t + b_a) - 0.05)  beta_t = clamp(2.2 sigmoid(w_beta x_t + b_beta) - 0.1, 0, 2)
    omega_t = pi sign(t) relu(|t| - 0.1) / 0.9      t = tanh(W_omega x_t), with the gradient pi / 0.9 at rest too

    h_t = d_t h_{t-1} - beta_t k_t (k_t' h_{t-1}) + lam_t dt_t B_t u_t' + (1 - lam_t) dt_t d_t B_{t-1} u_{t-1}'
    y_t = C_t' h_t + D u_t
    out = W_out (y_t * silu(z_t))                   with output_norm, RMSNorm_head(y_t) in place of y_t

With rope_per_head each head has a W_omega of its own, which else all share.
In place of both input terms injection="delta" writes beta_t k_t u_t', and "overwrite" beta_t (2 - beta_t) k_t u_t'.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..scan.definition import ScanState
from ..scan.dispatch import choose_backend, scan, scan_vector_dtype, select_backend
from ..scan.sequences import sequence_rows, token_order
from .fused_step import (
    are_bare_norms,
    bare_weight,
    is_bare,
    known_method,
    known_to_compiled_code,
    may_step,
    parameter,
    submodule,
)
from .inputs import check_mixer_inputs
from .letters import take_tokens
from .linear_maps import apply_linear
from .mamba3_backends import MIXER_BACKENDS
from .mamba3_cpu import BlockFrame, MixerMatrices, MixerSizes, MixerWeights, PolicyBlock, step_cpu
from .mamba3_numbers import NUMBERS


class Mamba3State(NamedTuple):
    """Everything a mixer needs of the tokens it has seen, one row for each sequence."""

    h: torch.Tensor  # (batch, heads, state, channels)
    B: torch.Tensor  # (batch, heads, state) of the last token; otherwise than with a trapezoid, size 0
    u: torch.Tensor  # (batch, heads, channels) of the last token; otherwise than with a trapezoid, size 0
    phase: torch.Tensor  # (batch, heads, pairs) Theta, between -pi and pi; without RoPE, size 0


@known_to_compiled_code
class RMSNorm(nn.Module):
    """Root-mean-square normalisation of consecutive groups of the last axis, with one weight for each element."""

    def __init__(self, size: int, group_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.group_size = group_size
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups * scale).flatten(-2) * self.weight


@known_to_compiled_code
class Mamba3Mixer(nn.Module):
    """One Mamba-3 mixer; its parameter names are those of the official module, whose weights load as they are."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, n, channels = config.num_heads, config.state_size, config.head_dim
        inner = heads * channels
        self.pairs = config.num_rope_pairs if config.use_rope else 0
        # Rows of z, x, B, C, dt, A, trap, angle. The layout is the same with every option, so that weights carry over.
        angles = config.num_rope_pairs * (heads if config.rope_per_head else 1)
        self.split_sizes = [inner, inner, n, n, heads, heads, heads, angles]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.split_sizes), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        # What an option leaves out is None.
        self.A_bias = self.B_norm = self.B_bias = self.k_proj = self.beta_proj = self.norm = None
        if config.gate_form == "exact":
            self.A_bias = nn.Parameter(torch.empty(heads))
        if config.injection == "trapezoid":
            self.B_norm = RMSNorm(n, n, config.norm_eps)
            self.B_bias = nn.Parameter(torch.empty(heads, 1, n))
        self.C_norm = RMSNorm(n, n, config.norm_eps)
        self.C_bias = nn.Parameter(torch.empty(heads, 1, n))
        if config.reflection_rank:
            self.k_proj = nn.Linear(config.hidden_size, heads * n, bias=False)
            self.beta_proj = nn.Linear(config.hidden_size, heads)
        if config.initial_state == "learned":
            self.h0 = nn.Parameter(torch.empty(heads, n, channels))
        self.D = nn.Parameter(torch.empty(heads))
        if config.output_norm:
            self.norm = RMSNorm(inner, channels, config.norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        # For compiled mixers; to look them up in the configuration takes as long as a step.
        self.options = {
            "contractive": config.reflection_form == "contractive",
            "overwrites": config.injection == "overwrite",
            "heavy_tail": config.decay_activation == "heavy_tail",
            "a_min": config.a_min,
            "epsilon": self.C_norm.eps,
        }
        self.sizes = MixerSizes(
            config.hidden_size,
            heads,
            n,
            channels,
            self.pairs,
            angles,
            carries=config.injection == "trapezoid",
            reflects=bool(config.reflection_rank),
            exact_gates=config.gate_form == "exact",
            output_norm=config.output_norm,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: Mamba3State | None = None,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Mamba3State]:
        """
        Maps (batch, length, hidden_size) to the same shape, and the state before these tokens (None at the start of a
        sequence) to the state after them, for whole sequences, pieces and single steps. `mask` and `cu_seqlens` are
        those of `scan`; a padded position reads as 0. With an `index` (batch, length), `hidden_states` (letters,
        hidden_size) are those of letters, and token i is letter index[i].
        """
        if may_step(hidden_states, mask, cu_seqlens):
            stepped = self.step(hidden_states, state, BlockFrame())
            if stepped is not None:
                return stepped
        mask = check_mixer_inputs(self, hidden_states, state, mask, cu_seqlens, index)
        batch, length = (hidden_states if index is None else index).shape[:2]
        rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
        state = self.initial_state(hidden_states, rows) if state is None else Mamba3State(*state)
        compiled = MIXER_BACKENDS.get(choose_backend(self.config.scan_backend, hidden_states.device))
        projected, k, beta = apply_linear(self.in_proj, hidden_states), None, None
        if self.k_proj is not None:
            k, beta = apply_linear(self.k_proj, hidden_states), self.beta_proj(hidden_states)
        if compiled is None or not self.has_bare_norms():
            projected, k, beta = (take_tokens(x, index) for x in (projected, k, beta))
            y, state = self.mix(projected, k, beta, state, mask, cu_seqlens)
        else:
            sequences = token_order(mask, cu_seqlens, batch, length)
            y, state = compiled.mix(projected, k, beta, self.weights(), state, sequences, index, **self.options)
        return apply_linear(self.out_proj, y.to(hidden_states.dtype)), Mamba3State(*state)

    @known_method
    def step(
        self, hidden_states: torch.Tensor, state: Mamba3State | None, frame: BlockFrame
    ) -> tuple[torch.Tensor, Mamba3State] | None:
        """
        What `forward` does with tokens that `may_step` allows, and the frame of a block around it, in one compiled
        call; None where that is not certain to be the same.
        """
        compiled = MIXER_BACKENDS.get(select_backend(self.config.scan_backend, hidden_states.device))
        if compiled is None or type(self) is not Mamba3Mixer or not self.has_bare_norms():
            return None
        state = self.initial_state(hidden_states) if state is None else state
        matrices, weights = self.bare_matrices(), self.bare_weights()
        stepped = compiled.step(hidden_states, self.sizes, matrices, weights, state, frame, **self.options)
        return None if stepped is None else (stepped[0], Mamba3State(*stepped[1]))

    def policy_block(self, dtype: torch.dtype, rows: int, frame: BlockFrame) -> PolicyBlock | None:
        """What `step` is to the step of a whole policy; None where that is not certain to be the same."""
        compiled = MIXER_BACKENDS.get(select_backend(self.config.scan_backend, torch.device("cpu")))
        # Whoever puts another `step` in its place means all steps.
        if compiled is None or compiled.step is not step_cpu or not self.has_bare_norms():
            return None
        matrices, weights = self.bare_matrices(), self.bare_weights()
        return compiled.policy_block(dtype, rows, self.sizes, matrices, weights, frame, **self.options)

    def may_take_letters(self) -> bool:
        """Whether nobody looks at what the maps of single tokens make of each of them."""
        names = ("in_proj", "k_proj", "beta_proj") if self.sizes.reflects else ("in_proj",)
        return all(is_bare(submodule(self, name), nn.Linear) for name in names)

    def has_bare_norms(self) -> bool:
        """Whether compiled code, which calls no modules, may stand for the norms."""
        n, channels = self.sizes.state, self.sizes.channels
        norms = [(submodule(self, "C_norm"), n)]
        if self.sizes.carries:
            norms.append((submodule(self, "B_norm"), n))
        if self.sizes.output_norm:
            norms.append((submodule(self, "norm"), channels))
        return are_bare_norms(norms, RMSNorm, self.options["epsilon"])

    def bare_matrices(self) -> MixerMatrices:
        """The projections whose modules do no more than to multiply; None in the place of others."""
        beta_proj, beta = submodule(self, "beta_proj"), (None, None)
        if is_bare(beta_proj, nn.Linear):
            beta = (parameter(beta_proj, "weight"), parameter(beta_proj, "bias"))
        in_proj, k_proj, out_proj = (bare_weight(submodule(self, name)) for name in ("in_proj", "k_proj", "out_proj"))
        return MixerMatrices(in_proj, k_proj, *beta, out_proj)

    def bare_weights(self) -> MixerWeights:
        """What `weights` are where they are parameters; None in the place of others."""
        dt_bias, A_bias, B_bias, C_bias, D = (
            parameter(self, name) for name in ("dt_bias", "A_bias", "B_bias", "C_bias", "D")
        )
        B_weight, C_weight, norm_weight = (
            None if norm is None else parameter(norm, "weight")
            for norm in (submodule(self, name) for name in ("B_norm", "C_norm", "norm"))
        )
        return MixerWeights(dt_bias, A_bias, B_weight, B_bias, C_weight, C_bias, D, norm_weight)

    def weights(self) -> MixerWeights:
        """The parameters that are not projections, for backends that take them in one piece."""
        return MixerWeights(
            self.dt_bias,
            self.A_bias,
            None if self.B_norm is None else self.B_norm.weight,
            self.B_bias,
            self.C_norm.weight,
            self.C_bias,
            self.D,
            None if self.norm is None else self.norm.weight,
        )

    def mix(self, projected, k, beta, state, mask, cu_seqlens) -> tuple[torch.Tensor, Mamba3State]:
        """From the projections of the input to what the output projection takes, (batch, length, inner)."""
        vector_dtype = scan_vector_dtype(self.config.scan_backend, projected)
        z, u, *rest = projected.split(self.split_sizes, dim=-1)
        # Gates, norms and phases are float32 at least: they are exponents and sums over the whole sequence.
        z, B, C, dt, A, trap, angle = (x.to(at_least_float32(x)) for x in (z, *rest))
        u = u.unflatten(-1, (-1, self.config.head_dim))  # (batch, length, heads, channels)

        dt = F.softplus(dt + self.dt_bias)
        log_decay = -self.decay_rate(A) * dt
        cosine_sine, phase = self.rotation(dt, angle, state, mask, cu_seqlens)
        C = rotate(self.C_norm(C)[..., None, :] + self.C_bias.squeeze(1), cosine_sine)
        k, beta, reflection = self.reflection(k, beta, log_decay, cosine_sine)
        if self.config.injection == "trapezoid":
            B = rotate(self.B_norm(B)[..., None, :] + self.B_bias.squeeze(1), cosine_sine)
            trapezoid = trap.sigmoid()
            write, carry = trapezoid * dt, (1 - trapezoid) * dt
        else:
            overwrites = self.config.injection == "overwrite"
            B, write, carry = k, beta * (NUMBERS.beta_max - beta) if overwrites else beta, None

        y, scanned = scan(
            u.to(vector_dtype),
            B.to(vector_dtype),
            C.to(vector_dtype),
            log_decay,
            write,
            carry=carry,
            k=None if k is None else k.to(vector_dtype),
            reflection=reflection,
            D=self.D,
            initial_state=self.scan_state(state),
            mask=mask,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size,
            backend=self.config.scan_backend,
        )
        y = y.flatten(-2).to(z.dtype)
        if self.config.output_norm:
            y = self.norm(y)
        return y * F.silu(z), self.next_state(scanned, phase)

    def decay_rate(self, A: torch.Tensor) -> torch.Tensor:
        activation = heavy_tail if self.config.decay_activation == "heavy_tail" else F.softplus
        if self.config.gate_form == "exact":
            return F.relu(activation(A + self.A_bias) - NUMBERS.rate_shift)
        return activation(A).clamp(min=self.config.a_min)

    def angular_speed(self, angle: torch.Tensor) -> torch.Tensor:
        speed = torch.tanh(angle)
        if self.config.gate_form == "exact":
            # A plane that a token leaves at rest has a gradient all the same: else it could never begin to turn.
            shrunk = speed + (F.softshrink(speed, NUMBERS.angle_shift) - speed).detach()
            speed = shrunk / (1 - NUMBERS.angle_shift)
        return math.pi * speed

    def rotation(self, dt, angle, state, mask, cu_seqlens):
        """Cosine and sine of Theta, (batch, length, heads, pairs) each, and the phase after the last tokens."""
        if not self.pairs:
            return None, state.phase
        speed = self.angular_speed(angle)
        speed = speed.unflatten(-1, (-1, self.pairs))  # (batch, length, heads or 1, pairs)
        increment = dt[..., None] * speed
        theta, phase = accumulate_phase(increment, state.phase, mask, cu_seqlens)
        return (theta.cos(), theta.sin()), phase

    def reflection(self, k, beta, log_decay, cosine_sine):
        """Direction k, gate beta and strength of the reflection from their projections; all None without one."""
        if k is None:
            return None, None, None
        k = k.to(at_least_float32(k)).unflatten(-1, (-1, self.config.state_size))
        k = rotate(F.normalize(k, dim=-1, eps=NUMBERS.shortest_k), cosine_sine)
        beta = beta.to(at_least_float32(beta)).sigmoid()
        if self.config.gate_form == "exact":
            beta = (NUMBERS.beta_stretch * beta - NUMBERS.beta_shift).clamp(0.0, NUMBERS.beta_max)
        else:
            beta = NUMBERS.beta_max * beta
        return k, beta, beta * log_decay.exp() if self.config.reflection_form == "contractive" else beta

    def initial_state(self, hidden_states: torch.Tensor, rows: int | None = None) -> Mamba3State:
        """The state before the first token of each sequence; without `rows`, each row of hidden_states is one."""
        dtype = at_least_float32(hidden_states)
        shapes = self.state_shapes(hidden_states.shape[0] if rows is None else rows)
        state = Mamba3State(*(hidden_states.new_zeros(shape, dtype=dtype) for shape in shapes))
        if self.config.initial_state == "learned":
            state = state._replace(h=self.h0.to(dtype).expand(shapes.h))
        return state

    def state_shapes(self, rows: int) -> Mamba3State:
        """The shape of each part of a state with `rows` sequences."""
        heads, n, channels = self.config.num_heads, self.config.state_size, self.config.head_dim
        carries = self.config.injection == "trapezoid"
        return Mamba3State(
            h=(rows, heads, n, channels),
            B=(rows, heads, n if carries else 0),
            u=(rows, heads, channels if carries else 0),
            phase=(rows, heads, self.pairs),
        )

    def scan_state(self, state: Mamba3State) -> ScanState:
        if self.config.injection == "trapezoid":
            return ScanState(state.h, state.B, state.u)
        # Nothing is carried, so the scan never reads the last token.
        rows, heads, n, channels = state.h.shape
        return ScanState(state.h, state.h.new_zeros(rows, heads, n), state.h.new_zeros(rows, heads, channels))

    def next_state(self, scanned: ScanState, phase: torch.Tensor) -> Mamba3State:
        if self.config.injection == "trapezoid":
            return Mamba3State(*scanned, phase)
        return Mamba3State(scanned.h, scanned.B[..., :0], scanned.u[..., :0], phase)


def at_least_float32(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def heavy_tail(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) + 1.0 / (1.0 + F.relu(-x))


def accumulate_phase(increment, start, mask, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Theta at every token, (batch, length, heads, pairs), from its increments and the phase before the first token,
    (rows, heads, pairs); and the phase after the last token of each row.
    """
    rows = sequence_rows(mask, cu_seqlens, *increment.shape[:2])
    if rows is not None:
        increment = rows.gather(increment)
    # Sums of thousands of angles keep all digits only in float64; MPS has none.
    exact = increment.dtype if increment.device.type == "mps" else torch.float64
    theta = start[:, None].to(exact) + increment.to(exact).cumsum(1)
    theta = (theta - 2 * math.pi * torch.round(theta / (2 * math.pi))).to(increment.dtype)
    # Past the end of a row the increments are 0, so its last slot holds the phase of its last token.
    last = theta[:, -1] if theta.shape[1] else start
    return (theta if rows is None else rows.scatter(theta)), last


def rotate(x: torch.Tensor, cosine_sine: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Rotates the first adjacent pairs (0, 1), (2, 3), ... of the last axis; the coordinates past them stay."""
    if cosine_sine is None:
        return x
    cosine, sine = cosine_sine
    turned = 2 * cosine.shape[-1]
    even, odd = x[..., :turned].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)
    return torch.cat([pairs, x[..., turned:]], dim=-1)
