"""
Runs the tests as on other processors: matrix products, sums and elementary functions round differently there.

    make test-paths          # all tests on whole processors, then those of numbers with each library's setting alone
    make test-paths-quick    # whole processors, the tests of numbers

The libraries choose their code when they are loaded, so each setting is a process of its own. What a processor cannot
run is skipped, with the reason.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from helpers.suite_runs import run_suite, table


class Setting(NamedTuple):
    name: str
    threads: int = 1
    variables: dict[str, str] = {}
    march: str | None = None  # what our own code is compiled for; None for this processor


SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}

PROCESSORS = [
    Setting("a processor with SSE4.2", 1, SSE, "x86-64-v2"),
    Setting("a processor with AVX2", 2, AVX2, "x86-64-v3"),
    Setting("a processor with AVX512", 4, AVX512),
]
# What they are made of, to tell which of it makes a difference.
ALONE = [
    Setting("matrix products for any processor", 1, {"MKL_CBWR": "COMPATIBLE"}),
    *(
        Setting(f"{name}={value}", 1, {name: value})
        for processor in (SSE, AVX2, AVX512)
        for name, value in processor.items()
    ),
    *(Setting(f"{threads} threads", threads) for threads in (1, 2, 4)),
]

# Where results of one call are compared with those of another. The rest of the suite compares files, names and
# messages, or runs kernels in Triton's interpreter, which computes with NumPy.
NUMBERS = [
    "tests/modeling/scan/test_causality.py",
    "tests/modeling/scan/test_scan.py",
    "tests/modeling/scan/cpu/test_scan_cpu.py",
    "tests/modeling/mixers",
    "tests/modeling/hub/test_checkpoints.py",
    "tests/modeling/test_collation.py",
    "tests/modeling/test_families.py",
    "tests/modeling/test_frame.py",
    "tests/modeling/test_heads.py",
    "tests/modeling/test_model.py",
    "tests/modeling/test_pipelines.py",
    "tests/training/test_evaluation.py",
]
# Half of their time: training, long sequences against the definition, compilers and checks of operators.
NUMBERS += ["-k", "not (learn or 2048 or compiler or at_once or compile or well_behaved)"]

# MKL takes MKL_ENABLE_INSTRUCTIONS into account on processors of Intel only. With this in its place it does on others.
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }"

# A number that changes with the rounding of what the models are made of.
ROUNDING = """
import hashlib, torch
from torch.nn import functional as F
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.float64):
    x, w = torch.randn(64, 100, dtype=dtype), torch.randn(40, 100, dtype=dtype)
    convolved = F.conv1d(x[None], w[:, :4].repeat(2, 1)[:64, None], groups=64)
    for y in (x @ w.T, x[:1] @ w.T, x.exp(), x.sum(1), x.softmax(1), F.layer_norm(x, (100,)), convolved):
        digest.update(y.numpy().tobytes())
print(digest.hexdigest())
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the tests of numbers only, without the longest")
    parser.add_argument("pytest", nargs="*", metavar="TESTS", help="files or names of tests instead of the usual ones")
    given = parser.parse_args()
    whole = given.pytest or (NUMBERS if given.quick else ["tests"])
    alone = ALONE[:1] if given.quick else ALONE
    plan = [(setting, whole) for setting in PROCESSORS] + [(setting, given.pytest or NUMBERS) for setting in alone]
    # What is set here already would be taken for this processor's own.
    for name in {name for setting in (*PROCESSORS, *ALONE) for name in setting.variables}:
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        usual = rounding(environment(Setting("usual"), Path(folder)))
        rows = []
        for number, (setting, tests) in enumerate(plan, 1):
            print(f"[{number}/{len(plan)}] {setting.name}, threads: {setting.threads}", flush=True)
            rows.append((setting, *run(setting, Path(folder), tests, usual)))
            print(f"    {rows[-1][-1]}", flush=True)
    cells = ([setting.name, str(setting.threads), rounds, result] for setting, _, rounds, result in rows)
    print(table(["setting", "threads", "rounds", "tests"], cells))
    sys.exit(any(failed for _, failed, _, _ in rows))


def run(setting: Setting, folder: Path, tests: list[str], usual: str) -> tuple[bool, str, str]:
    """Whether it failed, how it rounds, and what came out."""
    reason = why_not(setting)
    if reason:
        return False, "", f"skipped: {reason}"
    variables = environment(setting, folder)
    other = "as usual" if rounding(variables) == usual else "differently"
    # Their threads do not fight for the cores: those that wait sleep (GOMP_SPINCOUNT, below).
    failed, summary = run_suite(sys.executable, ["-n", "2", *tests], variables)
    return failed, other, summary


def why_not(setting: Setting) -> str | None:
    import torch

    if setting.variables and platform.machine() != "x86_64":
        return f"this processor is {platform.machine()}, not x86_64"
    levels = ["DEFAULT", "AVX2", "AVX512"]
    values = " ".join(setting.variables.values()).upper()
    needed = next((level for level in reversed(levels) if level in values), levels[0])
    here = torch.backends.cpu.get_cpu_capability()
    if here in levels and levels.index(here) < levels.index(needed):
        return f"this processor has no {needed}"
    return None


def environment(setting: Setting, folder: Path) -> dict[str, str]:
    from mamba3_nplr.modeling.scan.cpu.library import compiler, words_of

    # Threads that spin while they wait for each other would take forever beside other work.
    found = os.environ | {"OMP_NUM_THREADS": str(setting.threads), "GOMP_SPINCOUNT": "1000"} | setting.variables
    if compiler() and "MKL_ENABLE_INSTRUCTIONS" in setting.variables:
        library = folder / "intel.so"
        command = [*words_of(compiler()), "-x", "c", "-", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run(command, input=INTEL, text=True, check=True)
        found["LD_PRELOAD"] = str(library)
    if compiler() and setting.march:
        wrapper = folder / f"compiler-{setting.march}"
        wrapper.write_text(f'#!/bin/sh\nexec {compiler()} "$@" -march={setting.march}\n')
        wrapper.chmod(0o755)
        found["CXX"] = str(wrapper)
    return found


def rounding(variables: dict[str, str]) -> str:
    command = [sys.executable, "-c", ROUNDING]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
