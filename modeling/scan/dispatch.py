"""The one entry point to the scan, and the registry of its implementations."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .chunkwise import scan_chunkwise
from .cpu.compiled import unavailable as cpu_unavailable
from .cpu.operator import scan_cpu
from .definition import VECTORS, ScanInputs, ScanState, scan_definition
from .loop import length_is_open, scan_loop
from .operator_arguments import SCAN_TOKENS, check_shape
from .sequences import TokenOrder, token_order
from .torch_transforms import is_transforming
from .triton.operator import fits as triton_fits
from .triton.operator import scan_triton
from .triton.operator import unavailable as triton_unavailable
from .without_autocast import without_autocast

Run = Callable[[ScanInputs, ScanState, TokenOrder, int], tuple[torch.Tensor, torch.Tensor]]
RunRows = Callable[[ScanInputs, ScanState, int], tuple[torch.Tensor, torch.Tensor]]


def in_rows(run: RunRows) -> Run:
    """A `Backend.run` from one that knows rows only, each of them a sequence: it lays the others out as such."""

    def run_sequences(inputs, initial, sequences, chunk_size):
        # Neither a loop over steps nor one over chunks can be traced with the number of its turns left open.
        chosen = scan_loop if length_is_open(inputs.u) else run
        rows = sequences.rows(*inputs.u.shape[:2])
        if rows is None:
            return chosen(inputs, initial, chunk_size)
        # Zeros past the end of a row are the identity step: decay exp(0) = 1, and neither input nor reflection.
        gathered = ScanInputs(*(None if x is None else rows.gather(x) for x in inputs[:-1]), D=inputs.D)
        y, h = chosen(gathered, initial, chunk_size)
        return rows.scatter(y), h

    return run_sequences


class Backend(NamedTuple):
    """
    An implementation of the scan: `run(inputs, initial, sequences, chunk_size)` returns y and the last h of each
    sequence, as `scan_definition` does for rows.
    """

    run: Run
    # "auto" takes the one of the highest rank that can run. Below 1, the rank of the chunkwise scan, that is never.
    rank: int = 0
    # Why it cannot run on a device, or None if it can.
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    # u, B, C and k of these dtypes reach it as they are; else all coefficients and states are float32, or float64.
    half: tuple[torch.dtype, ...] = ()
    # Whether it can run these inputs; those that it cannot fall back to the chunkwise scan.
    fits: Callable[[ScanInputs], bool] = lambda inputs: True
    # Whether it runs by operators of torch alone, for which torch has all rules of torch.func and of forward-mode
    # differentiation. Where those are at work, others fall back to the chunkwise scan.
    by_torch: bool = False


BACKENDS: dict[str, Backend] = {
    "reference": Backend(in_rows(scan_definition), by_torch=True),
    "chunkwise": Backend(in_rows(scan_chunkwise), rank=1, by_torch=True),
    "cpu": Backend(scan_cpu, rank=3, unavailable=cpu_unavailable, half=(torch.bfloat16,)),
    "triton": Backend(
        scan_triton,
        rank=2,
        unavailable=triton_unavailable,
        half=(torch.bfloat16, torch.float16),
        fits=triton_fits,
    ),
}


def select_backend(name: str, device: torch.device) -> str:
    """The name of the backend to run on `device`: `name`, which must be one that can, or the fastest for `"auto"`."""
    check_backend_name(name)
    if name == "auto":
        return fastest_backend(device)
    reason = BACKENDS[name].unavailable(device)
    if reason is not None:
        usable = [other for other, backend in BACKENDS.items() if backend.unavailable(device) is None]
        raise ValueError(f"scan_backend={name!r} cannot run: {reason}. These can: {', '.join(usable)}.")
    return name


def fastest_backend(device: torch.device) -> str:
    """The one of the highest rank that can run. Models ask at every step, so that sorting would take too long."""
    fastest, rank = None, -1
    for name, backend in BACKENDS.items():
        if backend.rank > rank and backend.unavailable(device) is None:
            fastest, rank = name, backend.rank
    return fastest


def choose_backend(name: str, device: torch.device) -> str:
    """
    `select_backend`, but the chunkwise scan in place of compiled code where torch.func or forward-mode differentiation
    is at work: all derivatives and batches of it are right, being those of torch's own operators.
    """
    found = select_backend(name, device)
    return found if BACKENDS[found].by_torch or not is_transforming() else "chunkwise"


def check_backend_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"scan_backend={name!r} is unknown. It must be auto, or one of {', '.join(BACKENDS)}.")


def scan_vector_dtype(name: str, projected: torch.Tensor) -> torch.dtype:
    """The dtype for the vectors of a scan that are made from `projected`: its own, if the backend reads it as it is."""
    if projected.dtype in BACKENDS[choose_backend(name, projected.device)].half:
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
    single steps.

    Args:
        initial_state: State after the tokens before these; zero if None. One row for each sequence.
        mask (batch, length): True at tokens. A padded position, wherever it stands, changes nothing and reads as 0.
        cu_seqlens (sequences + 1,): Bounds of sequences packed into a batch of one; the states then have one row for
            each sequence. A sequence may be empty.
        chunk_size: Steps that the chunkwise scan computes together. It changes nothing but the rounding.
        backend: A name in `BACKENDS`, or `"auto"`.

    Returns:
        y, of the shape and dtype of u, and the state after the last token of each sequence. All arithmetic and the
        state are float32, or float64 if any coefficient is. Everything is differentiable, the states included.
    """
    inputs = ScanInputs(u, B, C, log_decay, write, carry, k, reflection, D)
    check_inputs(inputs)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} is not allowed; it must be a whole number of 1 or more.")
    chosen = BACKENDS[choose_backend(backend, u.device)]
    chosen = chosen if chosen.fits(inputs) else BACKENDS["chunkwise"]
    # Autocast would turn the float32 matrix products below into half precision.
    with without_autocast(u.device):
        inputs = prepare_inputs(inputs, chosen.half)
        sequences = token_order(mask, cu_seqlens, *u.shape[:2])
        initial = prepare_state(initial_state, inputs, sequences)
        y, h = chosen.run(inputs, initial, sequences, chunk_size)
        last = (sequences.last(inputs.B, initial.B), sequences.last(inputs.u, initial.u))
        return y.to(u.dtype), ScanState(h, *(x.to(h.dtype) for x in last))


def prepare_inputs(inputs: ScanInputs, half: tuple[torch.dtype, ...]) -> ScanInputs:
    """All in float32, or float64 if any of them is; vectors that share one dtype of `half` stay as they are."""
    dtype = torch.float32
    for x in inputs:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    vectors = {x.dtype for name, x in inputs._asdict().items() if x is not None and name in VECTORS}
    stay = VECTORS if dtype == torch.float32 and len(vectors) == 1 and vectors.issubset(half) else ()
    return ScanInputs(
        *(x if x is None or name in stay else x.to(dtype) for name, x in zip(ScanInputs._fields, inputs, strict=True))
    )


def prepare_state(state: ScanState | None, inputs: ScanInputs, sequences: TokenOrder) -> ScanState:
    (batch, _, heads, channels), n = inputs.u.shape, inputs.B.shape[-1]
    rows = batch if sequences.bounds is None else sequences.bounds.shape[0]
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
