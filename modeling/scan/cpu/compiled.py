"""
What the compiled operators share: their library, and how tensors reach it.

    python -m mamba3_nplr.modeling.scan.cpu.compiled

compiles ahead what would be compiled on first use, for all precisions.
"""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from transformers.utils import logging

from .library import load_library
from .source import SOURCE

logger = logging.get_logger(__name__)

# What the projections make and take, in torch and in C++; there is a library for each.
ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16"}
# Of the library, with what the compiler is told: the scan with the Mamba-3 mixers, and the delta family.
PARTS = {"scan": (), "delta": ("-DDELTA_FAMILY",)}


def unavailable(device: torch.device) -> str | None:
    """Why compiled code cannot run on a device, or None if it can."""
    if device.type != "cpu":
        return f"it runs on a CPU, and the tensors are on {device.type}"
    return build_error()


@torch.compiler.assume_constant_result
def build_error() -> str | None:
    """
    Why there is no library for float32, or None; builds it if need be. Those for other dtypes are built when they
    are needed. A graph takes the answer without tracing it.
    """
    return try_library()


@cache
def try_library() -> str | None:
    try:
        library(torch.float32)
        return None
    except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
        reason = explain(error)
    logger.warning(f"The compiled scan is not available; models fall back to the slower chunkwise scan: {reason}.")
    return reason


def explain(error: Exception) -> str:
    """Why there is no library: what the compiler says; or no compiler, no place to keep the library, no home."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else str(error))
        return f"its compilation failed: {said.strip()}"
    return str(error)


@cache
def library(dtype: torch.dtype, part: str = "scan") -> ctypes.CDLL:
    element = ELEMENTS[dtype]
    loaded = load_library(f"{part}_{element.lower()}", SOURCE, (f"-DELEMENT={element}", *PARTS[part]))
    # Threads of its own would compete with those of torch, which keep spinning for a while after each operator.
    for openmp in sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*")):
        loaded.use_pool(ctypes.CDLL(str(openmp)).GOMP_parallel)
    return loaded


INTEGER, NUMBER, TENSOR = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class CompiledFunction:
    """
    A function of a part of the library over one struct: where the sequences lie, then `fields` in the order of the C++
    source, INTEGER, NUMBER or TENSOR each. What is not given is 0 or null. It trusts all of them: see
    `operator_arguments`.
    """

    def __init__(self, name: str, fields: dict[str, type], part: str = "scan"):
        self.name, self.part = name, part
        layout = {"rows": INTEGER, "equal_length": INTEGER, "bounds": TENSOR, "order": TENSOR}
        self.struct = type("Arguments", (ctypes.Structure,), {"_fields_": list((layout | fields).items())})
        self.functions = {}

    def function(self, dtype: torch.dtype) -> ctypes._CFuncPtr:
        """The function for tensors of this dtype."""
        if dtype not in self.functions:
            try:
                self.functions[dtype] = getattr(library(dtype, self.part), self.name)
            except (subprocess.CalledProcessError, OSError) as error:
                advice = "scan_backend='chunkwise' needs no compiler"
                raise RuntimeError(
                    f"The compiled scan for {dtype} is not available: {explain(error)}; {advice}."
                ) from error
            self.functions[dtype].errcheck = self.check_result
        return self.functions[dtype]

    def check_result(self, failed: int, function, arguments: tuple) -> None:
        """Of every call. The library returns 0, or 1 where there was not enough memory."""
        if failed:
            given = arguments[0]._obj
            names = ("rows", "heads", "state", "channels", "tokens", "size")
            shown = ", ".join(f"{name}={getattr(given, name)}" for name in names if hasattr(given, name))
            raise MemoryError(f"{self.name} ran out of memory for {shown} on {given.threads} threads.")

    def __call__(
        self,
        dtype: torch.dtype,
        values: dict[str, int | float],
        tensors: dict[str, torch.Tensor | None],
    ) -> None:
        pointers = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        arguments = self.struct(**values, threads=torch.get_num_threads(), **pointers)
        self.function(dtype)(ctypes.byref(arguments))


def main() -> None:
    with ThreadPoolExecutor() as pool:  # each waits for its compiler
        tries = {(part, dtype): pool.submit(library, dtype, part) for part in PARTS for dtype in ELEMENTS}
    for (part, dtype), attempt in tries.items():
        error = attempt.exception()
        print(f"{part}, {dtype}: {'ready' if error is None else explain(error)}")


if __name__ == "__main__":
    main()
