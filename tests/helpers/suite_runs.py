"""Runs of the suite in processes of their own, and tables of what came out."""

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from helpers.places import ROOT


def run_suite(python: str | Path, arguments: list[str], variables: dict[str, str] | None = None) -> tuple[bool, str]:
    """
    Whether it failed, and pytest's last line with the time it took; all that pytest said is printed if it failed.

    Args:
        python: the interpreter.
        arguments: of pytest.
        variables: the whole environment of the process; None for this one's.
    """
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    lines = done.stdout.split("\n")
    summary = next((line for line in reversed(lines) if " passed" in line or " failed" in line), "no tests ran")
    summary = summary.strip("= ").partition(" in ")[0]
    return bool(done.returncode), f"{summary} in {time.perf_counter() - start:.0f} s"


def table(titles: list[str], rows: Iterable[list[str]]) -> str:
    """A table as Markdown writes it."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [titles, ["---"] * len(titles), *rows])
