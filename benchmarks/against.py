"""
The working tree and a revision of the repository measured against each other: a process for each, both with the
benchmark of the working tree, which take turns, so that a noisy machine slows them alike.

A benchmark offers its cases by `serve` where it is asked for that, and measures them with `measure_against`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from record import ROOT

Case = tuple[str, ...]


def add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="REVISION", help="measure the working tree against this revision of git")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


def serve(make: Callable[..., Callable[[], float]]) -> None:
    """
    Measures the cases that the standard input names, one for each line, and prints the seconds of each.

    Args:
        make: Makes of the words of a case a function that runs it once and returns its seconds.
    """
    answers, made = os.dup(1), {}
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        case = tuple(json.loads(line))
        if case not in made:
            made[case] = make(*case)
            made[case]()  # warms up
        os.write(answers, f"{made[case]()}\n".encode())


def measure_against(revision: str, cases: list[Case], repeats: int) -> dict:
    """Measures cases in the working tree and in a revision, prints a table, and returns what is to be written."""
    number, results = revision_of(revision), {}
    print(f"| case | working tree (ms) | {revision} (ms) | ratio |\n| --- | --- | --- | --- |", flush=True)
    with ExitStack() as stack:
        folders = {"tree": ROOT, "revision": stack.enter_context(checked_out(number))}
        workers = {side: stack.enter_context(worker(folder)) for side, folder in folders.items()}
        for case in cases:
            row = results[" ".join(case)] = measure_case(workers, case, repeats)
            times = f"{row['tree_ms']:.1f} | {row['revision_ms']:.1f} | {row['ratio']:.3f}"
            print(f"| {' '.join(case)} | {times} |", flush=True)
    return {"settings": {"repeats": repeats, "against": number}, "results": results}


def measure_case(workers: dict[str, subprocess.Popen], case: Case, repeats: int) -> dict[str, float]:
    """Milliseconds of both, and the median of the ratios of the turns."""
    times = {side: [] for side in workers}
    for turn in range(repeats):
        for side in list(workers)[:: 1 if turn % 2 else -1]:
            times[side].append(ask(workers[side], case))
    ratios = [tree / revision for tree, revision in zip(*times.values(), strict=True)]
    milliseconds = {f"{side}_ms": 1000 * statistics.median(found) for side, found in times.items()}
    return milliseconds | {"ratio": statistics.median(ratios)}


def ask(process: subprocess.Popen, case: Case) -> float:
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"{' '.join(case)} could not be measured: see above.")
    return float(answer)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision, for as long as the block runs."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "revision")
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


@contextmanager
def worker(root: Path) -> Iterator[subprocess.Popen]:
    """This benchmark as a process that measures cases with the package of another folder."""
    with tempfile.TemporaryDirectory() as packages:
        link_package(root, Path(packages))
        paths = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.stdin.close()
            process.kill()
            process.wait()


def link_package(root: Path, packages: Path) -> None:
    """Puts the package together as an installation does, from the folders that pyproject.toml names."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for name, folder in sorted(settings["package-dir"].items()):
        target = packages / name.replace(".", "/")
        target.mkdir(exist_ok=True)
        for path in (root / folder).iterdir():
            (target / path.name).symlink_to(path)


def revision_of(name: str) -> str:
    """The whole number of a revision, such as of HEAD~3."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        sys.exit(f"against={name!r} is not a revision of this repository.")
    return found
