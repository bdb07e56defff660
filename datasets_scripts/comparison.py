"""Several models on one task, side by side: a table and a picture."""

from pathlib import Path

from .evaluation import split_sizes
from .show import figure_class
from .task import Task


def comparison_table(task: Task, summaries: dict[str, dict]) -> str:
    """
    The main metric of each model on each test set, in per cent, as Markdown.

    Args:
        summaries: By the names of the models: what their runs found, or why there is nothing.
    """
    sizes = split_sizes(task)
    name = "length" if hasattr(task, "test_lengths") else "windows"
    lines = [f"| model | parameters | {' | '.join(f'{name} {size:,}' for size in sizes.values())} |"]
    lines.append("| --- " * (2 + len(sizes)) + "|")
    for model, summary in summaries.items():
        if "results" not in summary:
            lines.append(f"| {model} | {summary['failed']} |{' |' * len(sizes)}")
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
            return [summary["results"][split]["chance"] for split in split_sizes(task)]
    return []


def percent(figure: float) -> str:
    return f"{100 * figure:.1f}"


def draw_comparison(task: Task, summaries: dict[str, dict], path: Path) -> None:
    """Accuracy or success of each model against the size of the test set."""
    sizes = split_sizes(task)
    words = hasattr(task, "test_lengths")
    figure = figure_class()(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for model, summary in summaries.items():
        if "results" in summary:
            figures = [100 * summary["results"][split][summary["metric"]] for split in sizes]
            axes.plot(list(sizes.values()), figures, marker="o", label=model)
    axes.plot(list(sizes.values()), [100 * x for x in chance_levels(task, summaries)], "k:", label="chance")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes.values()), [f"{size:,}" for size in sizes.values()])
    axes.axvline(task.length if words else task.windows, color="0.8", zorder=0)
    axes.set_xlabel(f"{'length of the word' if words else 'windows'} (grey: the longest in training)")
    axes.set_ylabel("final accuracy (%)" if words else "success (%)")
    axes.set_ylim(-3, 103)
    axes.legend()
    figure.savefig(path, dpi=150)
