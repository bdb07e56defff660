"""Runs the C++ source under the sanitizers of the compiler."""

import subprocess
from pathlib import Path

from mamba3_nplr.modeling import cpu_library
from mamba3_nplr.modeling.scan_cpu_source import SOURCE

SANITIZERS = ("address,undefined", "thread")


def run_sanitized(main: str, sanitizer: str, folder: Path) -> None:
    """Compiles the source of the package with a program that ends by printing "clean", and runs it."""
    source, program = folder / "fuzz.cpp", folder / "fuzz"
    source.write_text(SOURCE + main)
    # Functions that are inlined by force take minutes to compile with all the checks in them.
    flags = ["-O1", "-g", "-march=native", "-std=c++17", "-pthread", f"-fsanitize={sanitizer}", "-DFORCE_INLINE="]
    subprocess.run([*cpu_library.words_of(cpu_library.compiler()), *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr
