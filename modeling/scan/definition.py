r"""
The recurrence that every model of this package but IDS4 runs, written as its equations. All other implementations are
tested against this one.

    h_t = d_t (h_{t-1} + c_t B_{t-1} u_{t-1}') - r_t k_t (k_t' h_{t-1}) + w_t B_t u_t'
    y_t = C_t' h_t + D u_t

| symbol | name here    | shape                            | meaning                                                   |
|--------|--------------|----------------------------------|-----------------------------------------------------------|
| u_t    | `u`          | (batch, length, heads, channels) | value written into the state                              |
| B_t    | `B`          | (batch, length, heads, state)    | direction along which u_t is written                      |
| C_t    | `C`          | (batch, length, heads, state)    | direction along which the state is read                   |
| log d_t| `log_decay`  | (batch, length, heads)           | logarithm of the decay                                    |
| w_t    | `write`      | (batch, length, heads)           | weight of this step's input                               |
| c_t    | `carry`      | (batch, length, heads)           | weight of the previous step's input, before the decay     |
| k_t    | `k`          | (batch, length, heads, state)    | direction of the reflection                               |
| r_t    | `reflection` | (batch, length, heads)           | strength of the reflection                                |
| D      | `D`          | (heads,)                         | skip connection                                           |
| h_t    | `h`          | (batch, heads, state, channels)  | state                                                     |

Mamba-3 with a reflection has w = lam dt, c = (1 - lam) dt and r = beta (additive) or d beta (contractive). Gated
DeltaNet has B = k, w = beta, r = d beta and no carry; DeltaNet is its case d = 1; DeltaProduct runs several such steps
a token and reads the last.
"""

from typing import NamedTuple

import torch


class ScanInputs(NamedTuple):
    """Coefficients of a scan; `carry`, `k` with `reflection`, and `D` are None where a model has no such term."""

    u: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    log_decay: torch.Tensor
    write: torch.Tensor
    carry: torch.Tensor | None = None
    k: torch.Tensor | None = None
    reflection: torch.Tensor | None = None
    D: torch.Tensor | None = None


VECTORS = ("u", "B", "C", "k")  # which backends may read in half precision; the others are gates


class ScanState(NamedTuple):
    """What a scan hands to its continuation: the state, and the last step's input for the carry."""

    h: torch.Tensor  # (batch, heads, state, channels)
    B: torch.Tensor  # (batch, heads, state)
    u: torch.Tensor  # (batch, heads, channels)


def scan_definition(inputs: ScanInputs, initial: ScanState, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence step by step; returns y (batch, length, heads, channels) and the last h."""
    state, outputs = initial, []
    for step in steps(inputs):
        state = ScanState(next_h(state, step), step.B, step.u)
        outputs.append(read(step.C, state.h))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(inputs.u)
    return add_skip(y, inputs), state.h


def next_h(before: ScanState, step: ScanInputs) -> torch.Tensor:
    """h_t from the state before a step and the coefficients of the step, which have no axis of length."""
    decay = per_head(step.log_decay.exp())
    h = decay * before.h + per_head(step.write) * outer(step.B, step.u)
    if step.carry is not None:
        h = h + decay * per_head(step.carry) * outer(before.B, before.u)
    if step.k is not None:
        h = h - per_head(step.reflection) * outer(step.k, read(step.k, before.h))
    return h


def add_skip(y: torch.Tensor, inputs: ScanInputs) -> torch.Tensor:
    return y if inputs.D is None else y + inputs.D[:, None] * inputs.u


def steps(inputs: ScanInputs):
    """Yields the coefficients of one step after another, with None for those left out."""
    # unbind, not indexing: the backward of x[:, t] in a loop is quadratic in length
    length = inputs.u.shape[1]
    columns = [[None] * length if x is None else x.unbind(1) for x in inputs[:-1]]
    return (ScanInputs(*step) for step in zip(*columns, strict=True))


def per_head(scalar: torch.Tensor) -> torch.Tensor:
    return scalar[..., None, None]  # (batch, heads) -> (batch, heads, 1, 1)


def outer(direction: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return direction[..., :, None] * value[..., None, :]  # (batch, heads, state, channels)


def read(direction: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (direction[..., None, :] @ h).squeeze(-2)  # (batch, heads, channels)
