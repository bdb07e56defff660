"""Small random coefficients for the scan, runs of it with gradients, and the measure of agreement."""

import torch

from mamba3_nplr.modeling.scan.definition import ScanInputs, ScanState
from mamba3_nplr.modeling.scan.dispatch import scan
from mamba3_nplr.modeling.scan.random_inputs import random_inputs, random_state

FORMS = ("additive", "contractive", "rank0", "delta")


def scan_inputs(batch=2, length=11, heads=3, n=6, channels=4, form="contractive", dtype=torch.float64) -> ScanInputs:
    return random_inputs(batch, length, heads, n, channels, form, dtype)


def scan_state(inputs: ScanInputs, rows: int | None = None) -> ScanState:
    return random_state(inputs, rows)


def hard_inputs(length: int) -> ScanInputs:
    """Identical directions, reflection 2 and decay 1: the worst case for the triangular solve, in float32."""
    inputs = scan_inputs(length=length, heads=2, n=16, channels=16, form="additive", dtype=torch.float32)
    return inputs._replace(
        k=inputs.k[:, :1].expand_as(inputs.k).contiguous(),
        reflection=torch.full_like(inputs.reflection, 2.0),
        log_decay=torch.zeros_like(inputs.log_decay),
        write=0.1 * inputs.write,
        carry=0.1 * inputs.carry,
    )


def with_grad(tensors):
    """Copies that require gradients; None stays None."""
    return type(tensors)(*(None if x is None else x.detach().clone().requires_grad_() for x in tensors))


def run(inputs, state=None, backend="chunkwise", **kwargs):
    coefficients = inputs._asdict()
    positional = [coefficients.pop(name) for name in ("u", "B", "C", "log_decay", "write")]
    return scan(*positional, **coefficients, initial_state=state, backend=backend, **kwargs)


def run_with_gradients(inputs, state, backend, **kwargs):
    """Outputs, and the gradients of a random function of them in every input and in the initial state."""
    inputs, state = with_grad(inputs), with_grad(state)
    y, final = run(inputs, state, backend, **kwargs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, *final)]
    leaves = [x for x in (*inputs, *state) if x is not None]
    total = sum((weight * x).sum() for weight, x in zip(weights, (y, *final), strict=True))
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    names = [
        name
        for name, x in zip((*ScanInputs._fields, "h0", "B0", "u0"), (*inputs, *state), strict=True)
        if x is not None
    ]
    results = {"y": y.detach()} | {f"final_{name}": x.detach() for name, x in final._asdict().items()}
    zero = torch.zeros(())
    return results | {f"grad_{name}": zero if g is None else g for name, g in zip(names, grads, strict=True)}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest deviation as a fraction of the RMS of what was expected."""
    deviation = (found.double() - expected.double()).abs().max()
    return (deviation / expected.double().square().mean().sqrt().clamp(min=1e-300)).item()
