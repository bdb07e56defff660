"""What the compiled operators share: their namespace, their library, and how tensors reach it."""

import ctypes
import itertools
import subprocess
from functools import cache, cached_property
from pathlib import Path

import torch
from transformers.utils import logging

from .cpu_library import load_library
from .scan_cpu_source import SOURCE

logger = logging.get_logger(__name__)

KINDS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16"}


def free_namespace() -> str:
    """
    A namespace for the operators. The code of checkpoints may be loaded beside this package, and more than once, but
    operators cannot be registered twice under one name.
    """
    names = itertools.chain(["mamba3_nplr"], (f"mamba3_nplr_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(getattr(torch.ops, name), "scan_cpu"))


NAMESPACE = free_namespace()


def unavailable(device: torch.device) -> str | None:
    """Why compiled code cannot run on a device, or None if it can."""
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


@cache
def library() -> ctypes.CDLL:
    loaded = load_library("scan", SOURCE)
    # Threads of its own would compete with those of torch, which keep spinning for a while after each operator.
    for openmp in sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*")):
        loaded.use_pool(ctypes.CDLL(str(openmp)).GOMP_parallel)
    return loaded


INTEGER, NUMBER, TENSOR = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class CompiledFunction:
    """
    A function of the library over one struct: where the sequences lie, then `fields` in the order of the C++ source,
    INTEGER, NUMBER or TENSOR each. What is not given is 0 or null.
    """

    def __init__(self, name: str, fields: dict[str, type]):
        self.name = name
        layout = {"rows": INTEGER, "equal_length": INTEGER, "bounds": TENSOR, "order": TENSOR}
        self.struct = type("Arguments", (ctypes.Structure,), {"_fields_": list((layout | fields).items())})

    @cached_property
    def functions(self) -> dict[torch.dtype, ctypes._CFuncPtr]:
        found = {dtype: getattr(library(), f"{self.name}_{kind}", None) for dtype, kind in KINDS.items()}
        return {dtype: function for dtype, function in found.items() if function is not None}

    def __call__(
        self,
        dtype: torch.dtype,
        values: dict[str, int | float],
        tensors: dict[str, torch.Tensor | None],
    ) -> None:
        pointers = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        arguments = self.struct(**values, threads=torch.get_num_threads(), **pointers)
        self.functions[dtype](ctypes.byref(arguments))


def refuse_second_derivative(backward_operator) -> None:
    """Lets the operator of a gradient say, where that is differentiated once more, what to use instead."""

    def refuse(ctx, *gradients):
        raise RuntimeError(
            "Compiled code has no second derivative. The chunkwise scan has: give scan_backend='chunkwise' in the "
            "configuration, or backend='chunkwise' to scan()."
        )

    backward_operator.register_autograd(refuse)


def contiguous(names, tensors) -> dict[str, torch.Tensor | None]:
    return {name: None if x is None else x.contiguous() for name, x in zip(names, tensors, strict=True)}
