"""Compiles C++ source on first use into a shared library, kept in a cache that several processes may share."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

# No -ffast-math: linked into a shared library it would change the floating-point mode of the whole process.
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
]


def compiler() -> str | None:
    """The system's C++ compiler, or None. The variable CXX chooses another."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def cache_folder() -> Path:
    """MAMBA3_NPLR_CACHE, or a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mamba3_nplr"
    return Path(os.environ.get("MAMBA3_NPLR_CACHE", default))


@cache
def load_library(name: str, source: str, definitions: tuple[str, ...] = ()) -> ctypes.CDLL:
    """
    The compiled source; raises OSError or subprocess.CalledProcessError if it cannot be had. `definitions` are flags
    for the compiler, such as -DNAME=VALUE.
    """
    path = cache_folder() / f"{name}-{library_key(source, definitions)}.so"
    if not path.exists():
        build(source, path, definitions)
    return ctypes.CDLL(str(path))


def library_key(source: str, definitions: tuple[str, ...] = ()) -> str:
    """Tells apart libraries from other source, by another compiler, or for another processor."""
    # The macros that -march=native predefines name the instructions of this processor.
    macros = [compiler_or_error(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    version = subprocess.run([macros[0], "--version"], capture_output=True, text=True, check=True).stdout
    processor = subprocess.run(macros, capture_output=True, text=True, check=True).stdout
    text = "\0".join([source, version, processor, " ".join([*FLAGS, *definitions])])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def compiler_or_error() -> str:
    found = compiler()
    if found is None:
        raise OSError("no C++ compiler was found (c++, g++, clang++, or the one that CXX names)")
    if sys.platform == "win32":
        raise OSError("Windows compilers are not supported")
    return found


def build(source: str, path: Path, definitions: tuple[str, ...] = ()) -> None:
    """Compiles in a folder of its own and renames: `path` is whole or not there, however many processes build it."""
    # Before, and not after: on a busy machine someone may wait for minutes and wonder.
    logger.warning(
        f"Compiling {path.stem.partition('-')[0]} for this processor, which takes some seconds, once: models then run "
        f"several times faster. It is kept as {path}."
    )
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
        code, made = Path(folder) / "source.cpp", Path(folder) / "library.so"
        code.write_text(source, encoding="utf-8")
        command = [compiler_or_error(), *FLAGS, *definitions, str(code), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        os.replace(made, path)
    logger.info(f"Compiled {path} in {time.perf_counter() - start:.1f} s.")
