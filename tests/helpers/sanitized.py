"""Runs the C++ source under the sanitizers of the compiler: in a program of its own, or as the library in Python."""

import os
import subprocess
from pathlib import Path

from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.source import SOURCE

SANITIZERS = ("address,undefined", "thread")
# Functions that are inlined by force take minutes to compile with all the checks in them.
QUICK = ["-O1", "-g", "-DFORCE_INLINE="]


def run_sanitized(main: str, sanitizer: str, folder: Path) -> None:
    """Compiles the source of the package with a program that ends by printing "clean", and runs it."""
    source, program = folder / "fuzz.cpp", folder / "fuzz"
    source.write_text(SOURCE + main)
    flags = [*QUICK, "-march=native", "-std=c++17", "-pthread", f"-fsanitize={sanitizer}"]
    subprocess.run([*cpu_library.words_of(cpu_library.compiler()), *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr


def sanitized_environment(folder: Path) -> dict[str, str]:
    """Variables for a Python whose compiled code ends the process at the first wrong access or undefined step."""
    compiler, wrapper = cpu_library.compiler(), folder / "compiler"
    # Without any optimisation, since there are three libraries to compile.
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", *QUICK, "-O0"]
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {" ".join(flags)}\n')
    wrapper.chmod(0o755)
    # Python is built without sanitizers, so that theirs must come first; and exceptions, which they watch.
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libstdc++.so")]
    first = [subprocess.run([compiler, name], capture_output=True, text=True, check=True).stdout for name in names]
    return os.environ | {
        "CXX": str(wrapper),
        "MAMBA3_NPLR_CACHE": str(folder / "cache"),
        "LD_PRELOAD": " ".join(first).replace("\n", ""),
        # Python does not free all at its end, and memory that is refused is no fault.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
