"""
The paper's figures with our runs. They depend on the records alone, to the byte with the same matplotlib.

    python results/figures.py results/words.png results/swaps.png results/jitter.png results/z5.png
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from exact_tables import changes_of
from mamba3_nplr.datasets_scripts.shell_game import no_tracking_prior
from mamba3_nplr.datasets_scripts.tasks import make_task
from paper import CONDITIONS, GROUPS, PAPER_NAMES, Paper
from records import Records, in_words, read_records

HERE = Path(__file__).resolve().parent

# A colour and a marker for each model, in all figures. The colours are told apart by the colour-blind too, and those
# that are near each other belong to models of one family, with different markers.
LOOKS = {
    "mamba3": ("#0072B2", "o"),
    "mamba3_2": ("#56B4E9", "s"),
    "mamba3_4": ("#003F66", "D"),
    "nplr": ("#D55E00", "o"),
    "nplr_norope": ("#CC79A7", "s"),
    "deltaproduct_2": ("#66C7A8", "v"),
    "deltaproduct_4": ("#009E73", "^"),
    "gdp_2": ("#B8860B", "<"),
    "gdp_4": ("#E69F00", ">"),
    "gdn": ("#000000", "P"),
    "ids4": ("#888888", "X"),
}
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000", "#56B4E9", "#888888")
BROKEN = ("--", ":", "-.")  # lines of runs with other settings
METADATA = {"Software": None}  # else the version of matplotlib would be in the file


def draw_words(records: Records, paper: Paper, path: Path) -> None:
    """Final accuracy against length, and accuracy against position in the longest words."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    shown = {}
    for (task, group), (final, by_position) in zip(GROUPS.items(), panels.T, strict=True):
        sizes = make_task(task).test_sizes
        chance = 100 / {"z5": 5, "s5_generators": 60}[task]
        for model in PAPER_NAMES:
            curves = [
                [100 * run["results"][split]["final_accuracy"] for split in sizes] for run in records.of(task, model)
            ]
            known = {length: paper.figure(task, model, split) for split, length in sizes.items()}
            markers = {length: found.mean for length, found in known.items() if found}
            draw_model(final, model, list(sizes.values()), curves, markers)
            longest = max(sizes, key=sizes.get)
            positions = [positions_of(run, longest) for run in records.of(task, model)]
            draw_model(by_position, model, list(range(1, sizes[longest] + 1)), positions, {}, marker=False)
            if curves or markers:
                shown[model] = shown.get(model, False) or bool(curves)
        final.set_title(f"{group}: the last position of words")
        by_position.set_title(f"{group}: each position of words of {max(sizes.values()):,}, smoothed")
        final.set_xlabel("length of the words (grey: the longest in training)")
        by_position.set_xlabel("position (grey: the length of the longest words in training)")
        final.set_xscale("log", base=2)
        final.set_xticks(list(sizes.values()), [f"{size:,}" for size in sizes.values()])
        by_position.set_xscale("log", base=2)
        by_position.set_xticks([4**n for n in range(6)], [f"{4**n:,}" for n in range(6)])
        for axes in (final, by_position):
            axes.set_xticks([], minor=True)
            finish(axes, 64, chance, "accuracy (%)")
    add_legend(figure, shown, 4)
    figure.savefig(path, dpi=120, metadata=METADATA)


def positions_of(run: dict, split: str) -> list[float]:
    """Accuracy by position, each the mean of the eighth of its length around it: single ones are noisy."""
    figures = run["results"][split]["accuracy_by_position"]
    smooth = []
    for position in range(len(figures)):
        reach = (position + 1) // 16
        around = figures[max(0, position - reach) : position + reach + 1]
        smooth.append(100 * sum(around) / len(around))
    return smooth


def draw_swaps(records: Records, paper: Paper, path: Path) -> None:
    """Success by number of swaps, in standard and in extended episodes, after direct training."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    shown, task = {}, make_task("shell")
    for axes, (split, condition) in zip(figure.subplots(1, 2, sharey=True), CONDITIONS.items(), strict=True):
        counts = list(range(task.test_sizes[split] + 1))
        for model in PAPER_NAMES:
            curves = [
                [100 * run["results"][split]["success_by_swaps"][str(count)] for count in counts]
                for run in records.of("shell", model)
            ]
            known = {count: paper.figure("shell", model, split, count) for count in counts}
            markers = {count: found.mean for count, found in known.items() if found}
            draw_model(axes, model, counts, curves, markers, marker=False)
            if curves or markers:
                shown[model] = shown.get(model, False) or bool(curves)
        priors = [100 * no_tracking_prior(count) for count in counts]
        axes.plot(counts, priors, "k--", linewidth=1.2)
        axes.set_title(f"{condition} episodes, {task.test_sizes[split]} windows")
        axes.set_xlabel("swaps" + (" (grey: the most in training)" if counts[-1] > task.max_swaps else ""))
        axes.set_xticks(counts[::4])
        finish(axes, task.max_swaps, 20, "success (%)")
    add_legend(figure, shown, 4, (Line2D([], [], color="k", linestyle="--", linewidth=1.2, label="no tracking"),))
    figure.savefig(path, dpi=120, metadata=METADATA)


def draw_jitter(records: Records, paper: Paper, path: Path) -> None:
    """Success with random timing against the number of swaps."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes, shown, sizes = figure.subplots(), {}, make_task("shell_jitter").test_sizes
    for model in PAPER_NAMES:
        curves = [
            [100 * run["results"][split]["success"] for split in sizes] for run in records.of("shell_jitter", model)
        ]
        known = {swaps: paper.figure("shell_jitter", model, split) for split, swaps in sizes.items()}
        markers = {swaps: found.mean for swaps, found in known.items() if found and found.mean is not None}
        draw_model(axes, model, list(sizes.values()), curves, markers)
        if curves or markers:
            shown[model] = bool(curves)
    axes.set_title("Random timing: success against the number of swaps")
    axes.set_xlabel("swaps (grey: the most in training)")
    axes.set_xticks(list(sizes.values()))
    finish(axes, 16, 20, "success (%)")
    add_legend(figure, shown, 3)
    figure.savefig(path, dpi=120, metadata=METADATA)


def draw_losses(records: Records, paper: Paper, path: Path) -> None:
    """Loss in training on the task that the file is named after; broken lines are runs with other settings."""
    task, figure = path.stem, Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    kinds = {(model, ""): runs for (name, model), runs in sorted(records.runs.items()) if name == task}
    kinds |= {
        (model, changes): runs for (name, model, changes), runs in sorted(records.variations.items()) if name == task
    }
    settings = list(dict.fromkeys(changes for _, changes in kinds if changes))
    for (model, changes), runs in kinds.items():
        if model not in LOOKS:
            continue
        style = BROKEN[settings.index(changes) % len(BROKEN)] if changes else "-"
        label = f"{PAPER_NAMES[model]}{f', {changes}' if changes else ''}"
        for run in runs:
            look = {"color": LOOKS[model][0], "linestyle": style, "linewidth": 1.2, "alpha": 0.8}
            axes.plot(run["logged_updates"], run["logged_losses"], label=label, **look)
            label = None  # one line of the legend for all seeds
    axes.set(xlabel="updates", ylabel="loss", yscale="log", title=f"{GROUPS[task]}: loss in training, each run")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    if kinds:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120, metadata=METADATA)


def draw_drift(records: Records, paper: Paper, path: Path) -> None:
    """
    What is unexplained of what heads read, by length: a color for each group, and a line for each seed; broken ones
    with a part changed.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    runs = [run for runs in read_records(HERE / "exact").variations.values() for run in runs]
    colors, labels = {}, set()
    axes.set(xscale="log", yscale="log", xlabel="length of the words", ylabel="unexplained part, median over heads")
    for run in sorted(runs, key=lambda run: run["name"]):
        found = HERE / "drift" / f"{run['name']}.json"
        if not found.exists():
            continue
        drift, changes = json.loads(found.read_text(encoding="utf-8")), changes_of(run)
        group = changes.pop("task.group", run["task"])
        label = ", ".join([group, in_words(changes)] if changes else [group])
        look = {"color": colors.setdefault(group, COLORS[len(colors) % len(COLORS)]), "marker": "o", "markersize": 3}
        parts = [statistics.median(x) for x in drift["unexplained"]]
        shown = None if label in labels else label  # one line of the legend for all seeds
        axes.plot(drift["lengths"], parts, "--" if changes else "-", label=shown, **look)
        axes.set_xticks(drift["lengths"], [f"{length:,}" for length in drift["lengths"]], rotation=30)
        axes.set_xticks([], minor=True)
        labels.add(label)
    if labels:
        figure.legend(loc="outside right center", frameon=False)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata=METADATA)


def draw_model(axes, model: str, xs: list, curves: list[list[float]], paper: dict, marker: bool = True) -> None:
    """Thin lines for single runs, a thick one for their mean, hollow markers for the paper's means."""
    color, shape = LOOKS[model]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(xs, curve, color=color, linewidth=0.7, alpha=0.6)
    if curves:
        mean = [statistics.mean(figures) for figures in zip(*curves, strict=True)]
        # Above the single runs; ours, the paper's own model, above the others.
        order = 4 if model.startswith("nplr") else 3
        axes.plot(xs, mean, color=color, linewidth=2.2, marker=shape if marker else None, markersize=5, zorder=order)
    axes.plot(list(paper), list(paper.values()), linestyle="none", zorder=5, **hollow(model))


def finish(axes, trained: int, chance: float, name: str) -> None:
    axes.axvline(trained, color="0.8", zorder=0)
    axes.axhline(chance, color="0.4", linestyle=":", linewidth=1, zorder=0)
    axes.set_ylim(-4, 104)
    axes.set_ylabel(name)
    axes.tick_params(labelleft=True)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure, shown: dict[str, bool], columns: int, more: tuple[Line2D, ...] = ()) -> None:
    """
    Args:
        shown: Whether there are runs of ours, by model; of the others there are the paper's means alone.
        more: Further lines to name.
    """
    lines = []
    for model in filter(shown.get, PAPER_NAMES):
        lines.append(
            Line2D([], [], color=LOOKS[model][0], marker=LOOKS[model][1], linewidth=2.2, label=PAPER_NAMES[model])
        )
    for model in PAPER_NAMES:
        if shown.get(model) is False:
            lines.append(Line2D([], [], linestyle="none", label=f"{PAPER_NAMES[model]}, paper", **hollow(model)))
    lines += [*more, Line2D([], [], color="0.4", linestyle=":", linewidth=1, label="chance")]
    lines.append(Line2D([], [], color="0.3", linewidth=0.7, label="thin: single runs"))
    look = hollow("nplr") | {"markeredgecolor": "0.3"}
    lines.append(Line2D([], [], linestyle="none", label="hollow: the paper's means", **look))
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def hollow(model: str) -> dict:
    """How the paper's figures of a model look."""
    color, shape = LOOKS[model]
    return {
        "marker": shape,
        "markerfacecolor": "none",
        "markeredgecolor": color,
        "markersize": 9,
        "markeredgewidth": 1.2,
    }


DRAWINGS = {"words": draw_words, "swaps": draw_swaps, "jitter": draw_jitter, "z5": draw_losses, "drift": draw_drift}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws the runs in results/runs beside the paper's figures.")
    parser.add_argument("pictures", nargs="+", type=Path, help=f"files whose names are of {', '.join(DRAWINGS)}")
    given = parser.parse_args(arguments)
    records, paper = read_records(HERE / "runs"), Paper(HERE / "paper.json")
    for path in given.pictures:
        if path.stem not in DRAWINGS:
            parser.error(f"pictures={path} is not allowed: its name must be one of {', '.join(DRAWINGS)}.")
        with matplotlib.style.context("default", after_reset=True):  # whatever a matplotlibrc says
            DRAWINGS[path.stem](records, paper, path)


if __name__ == "__main__":
    main()
