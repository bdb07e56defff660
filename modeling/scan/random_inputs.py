"""Random coefficients for the scan, such as mixers make: for the check of a device, tests and benchmarks."""

import torch
import torch.nn.functional as F

from .definition import ScanInputs, ScanState


def random_inputs(
    batch: int,
    length: int,
    heads: int,
    n: int,
    channels: int,
    form: str = "contractive",
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> ScanInputs:
    """
    Coefficients on the device of `generator`, the same in every dtype but for rounding. `form` is "additive",
    "contractive", "rank0" (no reflection) or "delta" (the delta rule). With "additive" the state may grow without end.
    """

    def normal(*shape):
        return draw(torch.randn, shape, generator)

    def uniform(*shape):
        return draw(torch.rand, shape, generator)

    step = (batch, length, heads)
    k = F.normalize(normal(*step, n), dim=-1)
    beta, log_decay, trapezoid, dt = 2 * uniform(*step), -0.3 * uniform(*step), uniform(*step), uniform(*step)
    reflection = beta * log_decay.exp() if form in ("contractive", "delta") else beta
    inputs = ScanInputs(
        u=normal(*step, channels),
        B=k if form == "delta" else normal(*step, n),
        C=normal(*step, n),
        log_decay=log_decay,
        write=beta if form == "delta" else trapezoid * dt,
        carry=None if form == "delta" else (1 - trapezoid) * dt,
        k=None if form == "rank0" else k,
        reflection=None if form == "rank0" else reflection,
        D=normal(heads),
    )
    return ScanInputs(*(None if x is None else x.to(dtype) for x in inputs))


def random_state(inputs: ScanInputs, rows: int | None = None, generator: torch.Generator | None = None) -> ScanState:
    """A state before `inputs`, of their dtype, for so many sequences; one for each row if None."""
    batch, _, heads, channels = inputs.u.shape
    rows, n = batch if rows is None else rows, inputs.B.shape[3]
    shapes = (rows, heads, n, channels), (rows, heads, n), (rows, heads, channels)
    return ScanState(*(draw(torch.randn, shape, generator).to(inputs.u.dtype) for shape in shapes))


def draw(kind, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    device = None if generator is None else generator.device
    return kind(*shape, dtype=torch.float64, device=device, generator=generator)
