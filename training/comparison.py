"""
Several models on one task, side by side: a table and a picture.

    python -m mamba3_nplr.training.comparison COMPARISON.json PICTURE.png

draws what `train_hf.py compare` has found.
"""

import argparse
import itertools
import json
import math
import shlex
import textwrap
from pathlib import Path

from ..configuration.presets import MODELS
from ..datasets_scripts.show import figure_class
from ..datasets_scripts.task import Task
from .arguments import resolve


def comparison_table(task: Task, summaries: dict[str, dict]) -> str:
    """
    The main metric of each model on each test set, in per cent, as Markdown.

    Args:
        summaries: By the names of the models: what their runs found, or why there is nothing.
    """
    sizes = task.test_sizes
    lines = [f"| model | parameters | {' | '.join(f'{task.size_name} {size:,}' for size in sizes.values())} |"]
    lines.append("| --- " * (2 + len(sizes)) + "|")
    for model, summary in summaries.items():
        if "results" not in summary:
            reason = textwrap.shorten(summary["failed"].replace("|", "\\|"), 80, placeholder=" ...")
            lines.append(f"| {model} | {reason} |{' |' * len(sizes)}")
            continue
        figures = [summary["results"][split][summary["metric"]] for split in sizes]
        lines.append(f"| {model} | {summary['parameters']:,} | {' | '.join(percent(x) for x in figures)} |")
    levels = chance_levels(task, summaries)
    if levels:
        lines.append(f"| chance | | {' | '.join(percent(x) for x in levels)} |")
    return "\n".join(lines)


def chance_levels(task: Task, summaries: dict[str, dict]) -> list[float]:
    for summary in summaries.values():
        if "results" in summary:
            return [summary["results"][split]["chance"] for split in task.test_sizes]
    return []


def percent(figure: float) -> str:
    return f"{100 * figure:.1f}"


def draw_comparison(task: Task, summaries: dict[str, dict], path: Path) -> None:
    """The main metric of each model against the size of the test set."""
    splits, sizes = list(task.test_sizes), list(task.test_sizes.values())
    height = 3.8 + 0.22 * math.ceil((len(summaries) + 1) / 2)  # of the lines and, below them, the legend
    figure = figure_class()(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    for (model, summary), marker in zip(summaries.items(), itertools.cycle("osD^vP*"), strict=False):
        if "results" in summary:
            figures = [100 * summary["results"][split][summary["metric"]] for split in splits]
            label = f"{MODELS[model].title} ({model})" if model in MODELS else model
            axes.plot(sizes, figures, marker=marker, linewidth=2, label=label)
    axes.plot(sizes, [100 * x for x in chance_levels(task, summaries)], "k--", linewidth=1, label="chance")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-4, 104)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    describe_axes(axes, task)
    # Not among the lines: whichever corner these leave free, another comparison fills.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def describe_axes(axes, task: Task) -> None:
    trained = task.trained_size
    axes.set_title(task.question, fontsize=13)
    axes.set_xlabel(f"{task.size_name} of the test {task.texts.sequences} (grey: {trained:,}, the longest in training)")
    axes.set_ylabel(f"{task.main_metric.replace('_', ' ')} (%)")
    axes.axvline(trained, color="0.8", zorder=0)


def task_of(summaries: dict[str, dict]) -> Task:
    """The task that all of these runs were tested on, by the command of one of them."""
    if not isinstance(summaries, dict) or not all(isinstance(summary, dict) for summary in summaries.values()):
        raise ValueError("The file does not hold what train_hf.py compare writes.")
    for summary in summaries.values():
        if "command" in summary:
            return resolve(shlex.split(summary["command"])[2:]).task
    raise ValueError("None of the runs has finished: there is nothing to draw.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.training.comparison",
        description="Draws what train_hf.py compare has found.",
    )
    parser.add_argument("found", metavar="COMPARISON.json", type=Path, help="as train_hf.py compare writes it")
    parser.add_argument("out", metavar="PICTURE.png", type=Path, help="picture to write")
    given = parser.parse_args(arguments)
    try:
        summaries = json.loads(given.found.read_text(encoding="utf-8"))
        draw_comparison(task_of(summaries), summaries, given.out)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print(f"Wrote {given.out}")


if __name__ == "__main__":
    main()
