"""What all benchmarks share: the first line they print, and the file with what they found, how and on what."""

import argparse
import functools
import os
import shlex
import sys
from pathlib import Path

import torch

from mamba3_nplr.training.record import environment, write_json

ROOT = Path(__file__).resolve().parents[1]


def add_out(parser: argparse.ArgumentParser) -> None:
    name = Path(parser.prog).stem
    parser.add_argument("--out", type=Path, help=f"JSON file to write, such as results/{name}.json")


def heading(**settings: object) -> str:
    """What was measured on and, by name, with which settings."""
    found = measured_on()
    words = [found["processor"] or found["machine"], f"{found['cores']} cores", f"{found['threads']} threads"]
    words += [f"torch {found['torch']}", *(f"{name} {value}" for name, value in settings.items())]
    return ", ".join(words) + "\n"


def write_results(path: Path | None, results: dict) -> None:
    """Writes what a benchmark has found, with the command and what it ran on; whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"command": command(), "environment": measured_on(), **results})


def command() -> str:
    """The command of this process, with its program as seen from the root of the repository."""
    program = Path(sys.argv[0]).resolve()
    name = str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name
    return shlex.join(["python", name, *sys.argv[1:]])


@functools.cache  # files may change while a benchmark runs: it ran with those of its start
def measured_on() -> dict[str, str | int | None]:
    """Versions, revision and processor."""
    return environment() | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
    }
