"""
The losses of the runs of a task in results/runs, drawn over the updates.

    python results/curves.py z5 results/z5.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from table import read_runs


def draw(task: str, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for (name, settings), models in read_runs().items():
        for model, runs in models.items() if name == task else ():
            for run in runs:
                label = f"{model}, {settings}" if settings else model
                axes.plot(run["logged_updates"], run["logged_losses"], label=f"{label}, seed {run['seed']}")
    axes.set(xlabel="updates", ylabel="loss", yscale="log", title=f"{task}: loss in training")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the losses of the runs of a task.")
    parser.add_argument("task")
    parser.add_argument("out", type=Path, metavar="PICTURE")
    given = parser.parse_args()
    draw(given.task, given.out)


if __name__ == "__main__":
    main()
