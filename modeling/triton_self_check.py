"""A check of the scan on the device it will run on: a new GPU or compiler may get it wrong in silence."""

import torch
import torch.nn.functional as F

from .scan_chunkwise import scan_chunkwise
from .scan_definition import ScanInputs, ScanState

# Of the RMS. Float32 kernels are within 1e-5; what is broken is beyond 1e-1.
TOLERANCE = 1e-3


def disagreement(run, device: torch.device, shapes) -> str | None:
    """How `run(inputs, initial, chunk_size)` differs from the chunkwise scan on (rows, n) of `shapes`, or None."""
    for rows, n in shapes:
        case = random_case(rows, n)
        try:
            found = outputs_and_gradients(run, case, device)
        except Exception as error:  # whatever a compiler or a driver raises, the chunkwise scan can still run
            return f"it raised {type(error).__name__} on a small example: {error}"
        expected = outputs_and_gradients(scan_chunkwise, case, device)
        for name in expected:
            scale = expected[name].square().mean().sqrt()
            deviation = (found[name] - expected[name]).abs().max() / scale
            if not deviation < TOLERANCE:  # a NaN is no agreement either
                return f"{name} is off by {deviation:.1g} of its size on a small example with state {n}"
    return None


def random_case(rows: int, n: int, length: int = 37) -> list[torch.Tensor]:
    """Inputs and an initial state, the same every time, with odd sizes; the generator of the program is left alone."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(rows, *shape, generator=generator)

    def uniform(*shape):
        return torch.rand(rows, *shape, generator=generator)

    k = F.normalize(normal(length, 1, n), dim=-1)
    vectors = [normal(length, 1, n), normal(length, 1, n), normal(length, 1, n)]
    gates = [-0.3 * uniform(length, 1), uniform(length, 1), uniform(length, 1)]
    D = torch.randn(1, generator=generator)
    return [*vectors, *gates, k, 2 * uniform(length, 1), D, normal(1, n, n), normal(1, n), normal(1, n)]


def outputs_and_gradients(run, case: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [x.to(device, copy=True).requires_grad_() for x in case]
        y, h = run(ScanInputs(*tensors[:9]), ScanState(*tensors[9:]), 16)
        grads = torch.autograd.grad((y * torch.cos(y.detach())).sum() + h.square().sum(), tensors)
    names = (*ScanInputs._fields, "h0", "B0", "u0")
    results = {"y": y, "h": h} | {f"the gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}
    return {name: x.detach() for name, x in results.items()}
