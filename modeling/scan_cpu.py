"""The scan on a processor by compiled code, as a torch operator with its gradient. `scan_cpu.cpp` does the work."""

import ctypes
import itertools
import subprocess
from functools import cache

import torch
from transformers.utils import logging

from .cpu_library import load_library
from .scan_cpu_source import SOURCE
from .scan_definition import ScanInputs, ScanState

logger = logging.get_logger(__name__)

SIZES = ("rows", "length", "heads", "state", "channels", "threads")
INPUTS = ("u", "B", "C", "log_decay", "write", "carry", "k", "reflection", "h0", "B0", "u0")
# Steps between two kept states, as in the C++ source.
SEGMENT = 16
OUTPUTS = ("y", "h", "kept", "grad_y", "grad_h", *(f"grad_{name}" for name in INPUTS))


def free_namespace() -> str:
    """
    A namespace for the operators. The code of checkpoints may be loaded beside this package, and more than once, but
    operators cannot be registered twice under one name.
    """
    names = itertools.chain(["mamba3_nplr"], (f"mamba3_nplr_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(getattr(torch.ops, name), "scan_cpu"))


NAMESPACE = free_namespace()


class Arguments(ctypes.Structure):
    """The struct `Scan` of the C++ source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_void_p) for name in (*INPUTS, *OUTPUTS)),
    ]


def unavailable(device: torch.device) -> str | None:
    """Why the compiled scan cannot run on a device, or None if it can."""
    if device.type != "cpu":
        return f"it runs on a CPU, and the tensors are on {device.type}"
    return build_error()


@torch.compiler.assume_constant_result
def build_error() -> str | None:
    """Why the library cannot be had, or None; builds it if need be. A graph takes the answer without tracing it."""
    return try_library()


@cache
def try_library() -> str | None:
    try:
        library()
        return None
    except subprocess.CalledProcessError as error:
        reason = f"its compilation failed: {error.stderr.strip().splitlines()[-1] if error.stderr else error}"
    except (OSError, RuntimeError) as error:  # no compiler, no place to keep the library, no home
        reason = str(error)
    logger.warning(f"The compiled scan is not to be had, and the slower chunkwise scan takes its place: {reason}.")
    return reason


def library() -> ctypes.CDLL:
    return load_library("scan", SOURCE)


def call(direction: str, tensors: dict[str, torch.Tensor | None]) -> None:
    """Runs the compiled function over contiguous tensors of one dtype."""
    u, B = tensors["u"], tensors["B"]
    rows, length, heads, channels = u.shape
    sizes = (rows, length, heads, B.shape[-1], channels, torch.get_num_threads())
    pointers = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    arguments = Arguments(**dict(zip(SIZES, sizes, strict=True)), **pointers)
    kind = "double" if u.dtype == torch.float64 else "float"
    getattr(library(), f"scan_{direction}_{kind}")(ctypes.byref(arguments))


@torch.library.custom_op(f"{NAMESPACE}::scan_cpu", mutates_args=(), device_types="cpu")
def scan_operator(
    u: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    carry: torch.Tensor | None,
    k: torch.Tensor | None,
    reflection: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the last h, and h at the start of each segment, which the gradient needs."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, h0, B0, u0)
    tensors = contiguous(INPUTS, inputs)
    y, h, kept = make_outputs(*inputs)
    call("forward", tensors | {"y": y, "h": h, "kept": kept})
    return y, h, kept


@scan_operator.register_fake
def make_outputs(u, B, C, log_decay, write, carry, k, reflection, h0, B0, u0):
    rows, length, heads, channels = u.shape
    segments = (length + SEGMENT - 1) // SEGMENT
    kept = u.new_empty(rows, heads, segments, B.shape[-1], channels)
    return u.new_empty(u.shape), h0.new_empty(h0.shape), kept


@torch.library.custom_op(f"{NAMESPACE}::scan_cpu_backward", mutates_args=(), device_types="cpu")
def scan_backward_operator(
    grad_y: torch.Tensor,
    grad_h: torch.Tensor,
    kept: torch.Tensor,
    u: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    carry: torch.Tensor | None,
    k: torch.Tensor | None,
    reflection: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of all inputs that are there, in their order."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, h0, B0, u0)
    tensors = contiguous(INPUTS, inputs) | contiguous(("grad_y", "grad_h", "kept"), (grad_y, grad_h, kept))
    grads = make_gradients(grad_y, grad_h, kept, *inputs)
    given = [name for name, x in zip(INPUTS, inputs, strict=True) if x is not None]
    call("backward", tensors | {f"grad_{name}": grad for name, grad in zip(given, grads, strict=True)})
    return grads


@scan_backward_operator.register_fake
def make_gradients(grad_y, grad_h, kept, *inputs):
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def contiguous(names, tensors) -> dict[str, torch.Tensor | None]:
    return {name: None if x is None else x.contiguous() for name, x in zip(names, tensors, strict=True)}


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])


def backward(ctx, grad_y, grad_h, grad_kept):
    *inputs, kept = ctx.saved_tensors
    grads = iter(scan_backward_operator(grad_y, grad_h, kept, *inputs))
    return tuple(None if x is None else next(grads) for x in inputs)


scan_operator.register_autograd(backward, setup_context=keep_for_backward)


def scan_cpu(inputs: ScanInputs, initial: ScanState, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `scan_definition`; chunks play no part."""
    y, h, _ = scan_operator(*inputs[:-1], *initial)
    if inputs.D is not None:
        y = y + inputs.D[:, None] * inputs.u
    return y, h
