"""The one entry point to the scan, and the registry of its implementations."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..mixers.mamba3_cpu import mixer_cpu, step_cpu
from .chunkwise import scan_chunkwise
from .cpu.compiled import unavailable
from .cpu.operator import scan_cpu
from .definition import ScanInputs, ScanState, scan_definition
from .loop import length_is_open, scan_loop
from .operator_arguments import SCAN_TOKENS, check_shape
from .sequences import TokenOrder, sequence_rows, token_order
from .torch_transforms import is_transforming
from .triton.operator import fits as triton_fits
from .triton.operator import scan_triton
from .triton.operator import unavailable as triton_unavailable
from .without_autocast import without_autocast


class Backend(NamedTuple):
    """
    An implementation of the scan: `run(inputs, initial, chunk_size)` returns y and the last h, as `scan_definition`
    does. `unavailable(device)` says why it cannot run on a device, or None if it can. A backend may also have
    `run_sequences(inputs, initial, order)`, for sequences that are padded or packed, `mix`, the whole of a Mamba-3
    mixer between its projections, and `step`, all of it for single tokens; without them the sequences are laid out as
    rows, and the mixer runs in torch. u, B, C and k reach it as they are in the dtypes of `half`, and else in float32,
    as all other coefficients and the states do, or in float64. Inputs that do not fit it (`fits`) run as the chunkwise
    scan.
    """

    run: Callable[[ScanInputs, ScanState, int], tuple[torch.Tensor, torch.Tensor]] | None = None
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    run_sequences: Callable[[ScanInputs, ScanState, TokenOrder], tuple[torch.Tensor, torch.Tensor]] | None = None
    mix: Callable | None = None
    step: Callable | None = None
    half: tuple[torch.dtype, ...] = ()
    fits: Callable[[ScanInputs], bool] = lambda inputs: True


BACKENDS: dict[str, Backend] = {
    "reference": Backend(scan_definition),
    "chunkwise": Backend(scan_chunkwise),
    "cpu": Backend(
        unavailable=unavailable, run_sequences=scan_cpu, mix=mixer_cpu, step=step_cpu, half=(torch.bfloat16,)
    ),
    "triton": Backend(
        unavailable=triton_unavailable,
        run_sequences=scan_triton,
        half=(torch.bfloat16, torch.float16),
        fits=triton_fits,
    ),
}


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend called `name`, or for `"auto"` the fastest one that runs on `device`."""
    check_backend_name(name)
    if name == "auto":
        return BACKENDS[fastest_backend(device)]
    reason = BACKENDS[name].unavailable(device)
    if reason is not None:
        usable = [other for other, backend in BACKENDS.items() if backend.unavailable(device) is None]
        raise ValueError(f"scan_backend={name!r} cannot run: {reason}. These can: {', '.join(usable)}.")
    return BACKENDS[name]


def choose_backend(name: str, device: torch.device) -> Backend:
    """
    `select_backend`, but the chunkwise scan in place of compiled code where torch.func or forward-mode differentiation
    is at work: all derivatives and batches of it are right, being those of torch's own operators.
    """
    found = select_backend(name, device)
    return BACKENDS["chunkwise"] if found.run is None and is_transforming() else found


def fastest_backend(device: torch.device) -> str:
    """Compiled code where there is any, else the chunkwise scan."""
    return next((name for name in ("cpu", "triton") if BACKENDS[name].unavailable(device) is None), "chunkwise")


def check_backend_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"scan_backend={name!r} is unknown. It must be auto, or one of {', '.join(BACKENDS)}.")


def scan_vector_dtype(name: str, projected: torch.Tensor) -> torch.dtype:
    """The dtype for the vectors of a scan that are made from `projected`: its own, if the backend reads it as it is."""
    if projected.dtype in choose_backend(name, projected.device).half:
        return projected.dtype
    return torch.promote_types(projected.dtype, torch.float32)


def scan(
    u: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    *,
    carry: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    reflection: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    initial_state: ScanState | None = None,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, ScanState]:
    """
    Runs the recurrence of `scan_definition` (which explains the coefficients) over whole sequences, pieces of them or
    single steps; there is no other path.

    Args:
        initial_state: State after the tokens before these; zero if None. One row for each sequence.
        mask (batch, length): True at tokens. A padded position, wherever it stands, changes nothing and reads as 0.
        cu_seqlens (sequences + 1,): Bounds of sequences packed into a batch of one; the states then have one row for
            each sequence. A sequence may be empty.
        chunk_size: Steps computed together by backends that work in chunks. It changes no result.
        backend: A name in `BACKENDS`, or `"auto"`.

    Returns:
        y, of the shape and dtype of u, and the state after the last token of each sequence. All arithmetic and the
        state are float32, or float64 if any coefficient is. Everything is differentiable, the states included.
    """
    inputs = ScanInputs(u, B, C, log_decay, write, carry, k, reflection, D)
    check_inputs(inputs)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} is not allowed; it must be a whole number of 1 or more.")
    found = choose_backend(backend, u.device)
    found = found if found.fits(inputs) else BACKENDS["chunkwise"]
    # Autocast would turn the float32 matrix products below into half precision.
    with without_autocast(u.device):
        inputs = prepare_inputs(inputs, found.half)
        order = token_order(mask, cu_seqlens, *u.shape[:2])
        initial = prepare_state(initial_state, inputs, order)
        if found.run_sequences is not None:
            y, h = found.run_sequences(inputs, initial, order)
        else:
            run = scan_loop if length_is_open(u) else found.run
            y, h = run_as_rows(run, inputs, initial, mask, cu_seqlens, chunk_size)
        last = (order.last(inputs.B, initial.B), order.last(inputs.u, initial.u))
        return y.to(u.dtype), ScanState(h, *(x.to(h.dtype) for x in last))


def run_as_rows(run, inputs, initial, mask, cu_seqlens, chunk_size) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays out sequences as rows for a backend that knows no others."""
    rows = sequence_rows(mask, cu_seqlens, *inputs.u.shape[:2])
    if rows is None:
        return run(inputs, initial, chunk_size)
    # Zeros past the end of a row are the identity step: decay exp(0) = 1, and neither input nor reflection.
    gathered = ScanInputs(*(None if x is None else rows.gather(x) for x in inputs[:-1]), D=inputs.D)
    y, h = run(gathered, initial, chunk_size)
    return rows.scatter(y), h


def prepare_inputs(inputs: ScanInputs, half: tuple[torch.dtype, ...]) -> ScanInputs:
    """All in float32, or float64 if any of them is; vectors that share one dtype of `half` stay as they are."""
    dtype = torch.float32
    for x in inputs:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    vectors = {x.dtype for x in (inputs.u, inputs.B, inputs.C, inputs.k) if x is not None}
    stay = ("u", "B", "C", "k") if dtype == torch.float32 and len(vectors) == 1 and vectors.issubset(half) else ()
    return ScanInputs(
        *(x if x is None or name in stay else x.to(dtype) for name, x in zip(ScanInputs._fields, inputs, strict=True))
    )


def prepare_state(state: ScanState | None, inputs: ScanInputs, order: TokenOrder) -> ScanState:
    (batch, _, heads, channels), n = inputs.u.shape, inputs.B.shape[-1]
    rows = batch if order.bounds is None else order.bounds.shape[0]
    shapes = ScanState(h=(rows, heads, n, channels), B=(rows, heads, n), u=(rows, heads, channels))
    dtype = inputs.log_decay.dtype
    if state is None:
        return ScanState(*(inputs.u.new_zeros(shape, dtype=dtype) for shape in shapes))
    if len(state) != len(shapes):
        raise ValueError(f"initial_state has {len(state)} parts; they must be those of ScanState{ScanState._fields}.")
    for name, x, shape in zip(ScanState._fields, state, shapes, strict=True):
        check_tensor(f"initial_state.{name}", x, inputs.u.device)
        if x.shape != shape:
            raise ValueError(f"initial_state.{name} has shape {tuple(x.shape)}; these inputs need {shape}.")
    return ScanState(*(x.to(dtype) for x in state))


def check_inputs(inputs: ScanInputs) -> None:
    """Raises an error that names the first coefficient that does not fit those before it."""
    if (inputs.k is None) != (inputs.reflection is None):
        raise ValueError("k and reflection belong together; only one of them was given.")
    sizes = {}
    for name, x in inputs._asdict().items():
        if x is not None:
            check_tensor(name, x, inputs.u.device)
            check_shape(name, x, SCAN_TOKENS[name].shape, sizes)


def check_tensor(name: str, x: torch.Tensor, device: torch.device) -> None:
    if not x.is_floating_point() or x.layout != torch.strided or x.device != device:
        raise ValueError(
            f"{name} has dtype {x.dtype} and layout {x.layout} on {x.device}; it must have a floating dtype and the "
            f"layout torch.strided on {device}."
        )
