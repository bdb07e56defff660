"""
Draws a row of a task, or prints it.

    python -m mamba3_nplr.datasets_scripts.show TASK [--split SPLIT] [--index I] [--out PICTURE.png]
"""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .task import Task
from .tasks import TASKS, make_task

NO_MATPLOTLIB = "Pictures need matplotlib: pip install 'mamba3_nplr[plot]'."


def describe(task: Task, split: str, index: int) -> str:
    """One row of a task as text."""
    return task.describe_row(one_row(task, split, index))


def draw(task: Task, split: str, index: int, out: Path | BinaryIO) -> None:
    """One row of a task as a picture, in the format that the name of the file says; PNG where it has none."""
    Figure = figure_class()
    row = one_row(task, split, index)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    task.draw_row(figure.add_subplot(), row)
    kind = None if isinstance(out, Path) else "png"
    figure.savefig(out, format=kind, dpi=120, metadata={"Software": None})


def can_draw() -> bool:
    """Whether there is matplotlib, an extra."""
    return importlib.util.find_spec("matplotlib") is not None


def figure_class():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NO_MATPLOTLIB) from error
    return Figure


def one_row(task: Task, split: str, index: int) -> dict[str, np.ndarray]:
    """A row without padding."""
    if index < 0:
        raise ValueError(f"index={index} is not allowed: it must be at least 0.")
    rows = task.rows(split, index, index + 1)
    row = {name: array[0] for name, array in rows.items()}
    return row | {name: row[name][: length[0]] for name, length in task.lengths(rows).items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.datasets_scripts.show", description="Draws or prints one row of a task."
    )
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument("--split", default="validation", help="train, validation or a test set (default: %(default)s)")
    parser.add_argument("--index", type=int, default=0, help="which row (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="picture to write, such as episode.png; without it, text is printed")
    given = parser.parse_args(arguments)
    try:
        task = make_task(given.task)
        if given.out is None:
            print(describe(task, given.split, given.index))
        else:
            draw(task, given.split, given.index, given.out)
            print(f"Wrote {given.out}")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as `head` has. Python would flush once more when it exits, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
