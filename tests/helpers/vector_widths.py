"""Tests with compiled code for vectors of another width, as on other processors."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from mamba3_nplr.modeling.scan.cpu import library as cpu_library


def run_with_vectors_of(width: int, tests: list[str], folder: Path) -> None:
    """The compiler splits or joins vectors of `width` bytes; `folder` gets the libraries."""
    wrapper = folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {cpu_library.compiler()} -DVECTOR_BYTES={width} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"CXX": str(wrapper), "MAMBA3_NPLR_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list((folder / "cache").glob("*.so"))) >= 2  # for float32 and float64
