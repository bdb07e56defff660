"""A check of the scan on the device it will run on: a new GPU or compiler may get it wrong in silence."""

import itertools

import torch

from ..chunkwise import scan_chunkwise
from ..definition import VECTORS, ScanInputs, ScanState
from ..random_inputs import random_inputs, random_state
from ..sequences import TokenOrder

# Of the RMS. Float32 kernels are within 1e-5, bfloat16 ones within 3e-2; what is broken is beyond 1e-1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


def disagreement(run, device: torch.device, shapes) -> str | None:
    """How `Backend.run` differs from the chunkwise scan on (rows, n) of `shapes`, or None."""
    for (rows, n), dtype in itertools.product(shapes, TOLERANCE):
        case = random_case(rows, n)
        try:
            found = outputs_and_gradients(run, case, device, dtype)
        except Exception as error:  # whatever a compiler or a driver raises, the chunkwise scan can still run
            return f"it raised {type(error).__name__} on a small example: {error}"
        expected = outputs_and_gradients(chunkwise, case, device, dtype)
        for name in expected:
            scale = expected[name].square().mean().sqrt()
            deviation = (found[name] - expected[name]).abs().max() / scale
            if not deviation < TOLERANCE[dtype]:  # a NaN is no agreement either
                return f"{name} is off by {deviation:.1g} of its size on a small {dtype} example with state {n}"
    return None


def chunkwise(inputs: ScanInputs, initial: ScanState, sequences: TokenOrder, chunk_size: int):
    return scan_chunkwise(ScanInputs(*(x.float() for x in inputs)), initial, chunk_size)


def random_case(rows: int, n: int, length: int = 37) -> list[torch.Tensor]:
    """Inputs and an initial state, the same every time, with odd sizes; the generator of the program is left alone."""
    generator = torch.Generator().manual_seed(0)
    inputs = random_inputs(rows, length, 1, n, n, "additive", torch.float32, generator)
    return [*inputs, *random_state(inputs, generator=generator)]


def outputs_and_gradients(
    run, case: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """By name and in float32, with the vectors of the case rounded to `dtype`."""
    names = (*ScanInputs._fields, "h0", "B0", "u0")
    with torch.inference_mode(False), torch.enable_grad():
        dtypes = [dtype if name in VECTORS else torch.float32 for name in names]
        tensors = [x.to(device, one, copy=True).requires_grad_() for x, one in zip(case, dtypes, strict=True)]
        y, h = run(ScanInputs(*tensors[:9]), ScanState(*tensors[9:]), TokenOrder(), 16)
        weights = torch.cos(torch.arange(y.numel(), device=device)).view_as(y)
        grads = torch.autograd.grad((y.float() * weights).sum() + h.square().sum(), tensors)
    results = {"y": y, "h": h} | {f"the gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}
    return {name: x.detach().float() for name, x in results.items()}
