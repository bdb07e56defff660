"""
Instructions counted by callgrind. Valgrind knows no AVX-512, so that in it the library is built for AVX2, with vectors
of 32 bytes; on other machines than x86-64 nothing is counted.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

VECTOR_BYTES = 32


def why_no_count() -> str | None:
    if platform.machine() != "x86_64":
        return f"the machine is {platform.machine()}"
    return None if shutil.which("valgrind") else "there is no valgrind"


def count(program: list[str], folder: Path) -> str:
    """
    What callgrind writes of a Python program between `start_counting` and `stop_counting`; what is compiled for it is
    kept in the folder.
    """
    compiler, counts = folder / "compiler", folder / "counts"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -march=x86-64-v3\n')
    compiler.chmod(0o755)
    variables = {"CXX": str(compiler), "MAMBA3_NPLR_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program]
    callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"]
    # Once without, so that nothing is compiled in it.
    for words in (command, callgrind + command):
        subprocess.run(words, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)
    return counts.read_text()


def calls_in(text: str) -> Counter:
    """How often each function was called."""
    names, calls, called = {}, Counter(), None
    for line in text.splitlines():
        function = re.match(r"c?fn=(\(\d+\))(?: (.*))?", line)
        if function:
            names.setdefault(function[1], function[2])
            called = names[function[1]]
        elif line.startswith("calls="):
            calls[re.sub(r"'\d+$", "", called)] += int(line.removeprefix("calls=").split()[0])
    return calls


def all_instructions(text: str) -> int:
    return int(re.search(r"^totals: (\d+)", text, re.MULTILINE)[1])


def instructions_in(library: str, text: str) -> int:
    """Those in files whose names begin so."""
    names, counted, total, of_call = {}, False, 0, False
    for line in text.splitlines():
        file = re.match(r"ob=(\(\d+\))(?: (.*))?", line)
        if file:
            names.setdefault(file[1], file[2])
            counted = Path(names[file[1]]).name.startswith(library)
        elif re.match(r"[+*\d-]\S* \d+$", line):
            # After a call comes what was counted in the function that was called.
            total += 0 if of_call or not counted else int(line.split()[1])
        file = re.match(r"cob=(\(\d+\)) (.*)", line)
        if file:
            names.setdefault(file[1], file[2])
        of_call = line.startswith("calls=")
    return total


def start_counting() -> None:
    tell_callgrind("--instr=on")


def stop_counting() -> None:
    tell_callgrind("--instr=off")


def tell_callgrind(command: str) -> None:
    """Without callgrind nobody listens."""
    if shutil.which("callgrind_control"):
        subprocess.run(["callgrind_control", command, str(os.getpid())], check=False, capture_output=True)
