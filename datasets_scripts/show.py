"""
Draws an episode or a word of a task, or prints it.

    python -m mamba3_nplr.datasets_scripts.show TASK [--split SPLIT] [--index I] [--out PICTURE.png]
"""

import argparse
import importlib.util
import os
import signal
import sys
from colorsys import hsv_to_rgb
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .shell_game import CUE, CUPS, RESPONSE_FRAMES, REVEAL_FRAMES, SLOTS, ShellGame, X, Y
from .task import Task
from .tasks import TASKS, make_task
from .words import GroupWords

NO_MATPLOTLIB = "Pictures need matplotlib: pip install 'mamba3_nplr[plot]'."
LONGEST_WITH_NUMBERS = 80  # letters of a word whose picture has room for a number in each field


def describe(task: Task, split: str, index: int) -> str:
    """One row of a task as text."""
    row = one_row(task, split, index)
    return describe_word(task, row) if isinstance(task, GroupWords) else describe_episode(row)


def draw(task: Task, split: str, index: int, out: Path | BinaryIO) -> None:
    """One row of a task as a picture, in the format that the name of the file says; PNG where it has none."""
    Figure = figure_class()
    row = one_row(task, split, index)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.add_subplot()
    draw_word(axes, task, row) if isinstance(task, GroupWords) else draw_episode(axes, row)
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
    if index < 0:
        raise ValueError(f"index={index} is not allowed: it must be at least 0.")
    row = {name: array[0] for name, array in task.rows(split, index, index + 1).items()}
    if isinstance(task, ShellGame):
        frames = row["num_frames"]
        row |= {name: row[name][:frames] for name in ("observations", "labels")}
    return row


def describe_word(task: GroupWords, row: dict[str, np.ndarray]) -> str:
    lines = [f"{'step':>5}  {'token':>5}  {'letter':<{2 * CUPS}}  product of the prefix (label)"]
    for step, (token, label) in enumerate(zip(row["input_ids"], row["labels"], strict=True), start=1):
        letter = task.label_names[task.letters[token]]
        lines.append(f"{step:>5}  {token:>5}  {letter:<{2 * CUPS}}  {task.label_names[label]} ({label})")
    return "\n".join(lines)


def describe_episode(row: dict[str, np.ndarray]) -> str:
    observations, swaps = row["observations"], row["swaps"]
    start = int(observations[0, 2 * CUPS : CUE].argmax())
    lines = [
        f"{len(observations)} frames, {len(swaps)} windows, {row['num_swaps']} swaps",
        f"frames 0 to {REVEAL_FRAMES - 1}: the ball is revealed in slot {start}",
    ]
    slot = start
    for window, pair in enumerate(swaps):
        if pair >= 0:
            slot = {pair: pair + 1, pair + 1: pair}.get(slot, slot)
            lines.append(f"window {window:>3}: slots {pair} and {pair + 1} swap, the ball is in slot {slot}")
    lines.append(f"frames {len(observations) - RESPONSE_FRAMES} to {len(observations) - 1}: reach for slot {slot}")
    return "\n".join(lines)


def draw_word(axes, task: GroupWords, row: dict[str, np.ndarray]) -> None:
    """Which point is at which place after each letter, by color; with numbers and letters where they can be read."""
    places = task.algebra.elements[np.concatenate([[0], row["labels"]])]  # (length + 1, degree): where each point is
    points, degree = np.argsort(places, axis=1).T, places.shape[1]
    colors = point_colors(degree)
    axes.imshow(points, aspect="auto", origin="lower", interpolation="nearest", cmap=colors, vmin=0, vmax=degree - 1)
    for point in range(degree):
        axes.plot([], [], "s", color=colors(point), label=f"point {point}")
    if points.shape[1] <= LONGEST_WITH_NUMBERS:
        for (place, step), point in np.ndenumerate(points):
            axes.text(step, place, point, ha="center", va="center", fontsize=7)
        letters = axes.secondary_xaxis("top")
        letters.set_xticks(range(1, points.shape[1]), [task.model_names["token_names"][x] for x in row["input_ids"]])
        letters.tick_params(labelsize=6, length=0)
        letters.set_xlabel("letter read", fontsize=8)
    axes.set(
        xlabel="number of letters read",
        ylabel="place",
        title=f"Word over {task.group.upper()}: the point at each place",
    )
    axes.set_yticks(range(degree))
    axes.legend(loc="upper center", ncols=min(degree, 10), fontsize=8, bbox_to_anchor=(0.5, -0.18), frameon=False)


def point_colors(degree: int):
    """A light color for each point, so that numbers can be read on them."""
    from matplotlib.colors import ListedColormap

    return ListedColormap([hsv_to_rgb(point / degree, 0.4, 1.0) for point in range(degree)])


def draw_episode(axes, row: dict[str, np.ndarray]) -> None:
    observations, actions = row["observations"], row["labels"]
    frames = np.arange(len(observations))
    axes.axvspan(-0.5, REVEAL_FRAMES - 0.5, color="gold", alpha=0.35, label="reveal")
    axes.axvspan(len(frames) - RESPONSE_FRAMES - 0.5, len(frames) - 0.5, color="green", alpha=0.25, label="reach")
    cups, heights = observations[:, X:Y], observations[:, Y : Y + CUPS]
    axes.plot(frames, cups, color="0.6", linewidth=1.0)
    lifted = np.where(heights > 0, cups, np.nan)
    axes.plot(frames, lifted, color="0.25", linewidth=3.0, label=["lifted cup"] + [None] * (CUPS - 1))
    axes.plot(frames, ball_path(row), color="red", linestyle="--", linewidth=1.4, label="slot of the ball")
    axes.plot(frames, actions[:, 0], color="tab:blue", linewidth=0.8, alpha=0.7, label="demonstrated reach")
    axes.set(
        xlabel="frame", ylabel="slot", title=f"Shell game: {row['num_swaps']} swaps in {len(row['swaps'])} windows"
    )
    axes.set_yticks(SLOTS, range(CUPS))
    axes.margins(x=0.01)
    axes.legend(loc="upper center", ncols=5, fontsize=8, bbox_to_anchor=(0.5, -0.18))


def ball_path(row: dict[str, np.ndarray]) -> np.ndarray:
    """The ball's slot in every frame, as a position; it changes when a swap is complete."""
    heights = row["observations"][:, Y : Y + CUPS].max(1)
    # A swap is complete in the first frame after one with a lifted cup.
    done = np.cumsum((heights[:-1] > 0) & (heights[1:] == 0))
    slots = [int(row["observations"][0, 2 * CUPS : CUE].argmax())]
    for pair in row["swaps"][row["swaps"] >= 0]:
        slots.append({pair: pair + 1, pair + 1: pair}.get(slots[-1], slots[-1]))
    return SLOTS[np.array(slots)[np.concatenate([[0], done])]]


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
