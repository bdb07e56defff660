"""The paper's tables with our runs, as Markdown."""

import json
import re
import statistics
from pathlib import Path

import torch
from transformers import AutoConfig

from cells import Cells, Place, markdown
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.datasets_scripts.shell_game import no_tracking_prior
from mamba3_nplr.datasets_scripts.tasks import TASKS as TASKS_BY_NAME
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.arguments import resolve
from mamba3_nplr.training.models import new_model
from paper import CONDITIONS, GROUPS, PAPER_NAMES
from records import Records, figure_of

WORDS = (("z5", "test_64"), ("s5_generators", "test_64"), ("s5_generators", "test_128"))
CURVES = (("z5", "nplr"), ("s5_generators", "nplr"), ("s5_generators", "nplr_norope"))
TASKS = ("z5", "s5_generators", "shell", "shell_curriculum", "shell_jitter")
# Of our own; their policies act.
OWN_TASKS = ("shell_hand", "shell_pixels")
OWN_SWAPS = (0, 1, 2, 4, 8, 16)
PAPER_RUNS = {(task, model) for task in TASKS for model in PAPER_NAMES}


def title(model: str) -> str:
    return f"{PAPER_NAMES.get(model) or MODELS[model].title} `{model}`"


def rows_of(cells: Cells, tasks: tuple[str, ...], table: str) -> list[str]:
    """The models that a table of the paper has, and those that we have runs of, in the order of the paper."""
    in_paper = cells.paper.tables[table]
    return [
        model
        for model, name in PAPER_NAMES.items()
        if name in in_paper or any(cells.records.of(task, model) for task in tasks)
    ]


def words_table(cells: Cells) -> str:
    head = ["model", *(f"{GROUPS[task]}, length {split.removeprefix('test_')}" for task, split in WORDS)]
    models = rows_of(cells, ("z5", "s5_generators"), "group_words_final_accuracy")
    return markdown(
        head, [[title(model), *(cells.cell(task, model, split) for task, split in WORDS)] for model in models]
    )


def curves_table(cells: Cells) -> str:
    """Mean, smallest and largest at all lengths, ours and the paper's."""
    lengths = make_task("s5_generators").test_sizes
    head = ["length"]
    for task, model in CURVES:
        name = f"{GROUPS[task]} `{model}`"
        head += [name, "paper"]
    rows = []
    for split, length in lengths.items():
        row = [f"{length:,}"]
        for task, model in CURVES:
            paper = cells.paper.curve(task, model).get(length)
            ours = cells.ours(Place(task, model, split), paper)
            figures = cells.records.figures(task, model, split)
            if len(figures) > 1:
                ours += f" [{min(figures):.2f}, {max(figures):.2f}]"
            row += [ours, f"{paper} [{paper.smallest:.2f}, {paper.largest:.2f}]" if paper else ""]
        rows.append(row)
    return markdown(head, rows)


def other_curves_table(cells: Cells) -> str | None:
    """What we have of the models whose extrapolation the paper has as a curve at most."""
    lengths = make_task("s5_generators").test_sizes
    rows = []
    for task in GROUPS:
        for model in PAPER_NAMES:
            if (task, model) not in CURVES and cells.records.of(task, model):
                figures = [cells.records.figures(task, model, split) for split in lengths]
                shown = [f"{statistics.mean(found):.2f} ({len(found)})" if found else "" for found in figures]
                rows.append([GROUPS[task], title(model), *shown])
    return markdown(["group", "model", *(f"{length:,}" for length in lengths.values())], rows) if rows else None


def sizes_table(cells: Cells) -> str:
    head = ["model", "parameters", "paper, in thousands", "state", "paper", "beside it", "on Z5", "on S5"]
    in_paper = cells.paper.tables["shell_model_sizes"]
    rows = []
    for model, name in PAPER_NAMES.items():
        parameters, state, rest = size_of("shell", model)
        thousands, paper_state = in_paper.get(name, ("", ""))
        row = [
            title(model),
            f"{parameters:,}"
            + different(thousands, round(parameters / 1000, 3 if isinstance(thousands, float) else None)),
            f"{thousands:,}" if name in in_paper else "",
            f"{state:,}" + different(paper_state, state),
            f"{paper_state:,}" if name in in_paper else "",
            f"{rest:,}" if rest else "",
        ]
        rows.append([*row, *(f"{size_of(task, model)[0]:,}" for task in GROUPS)])
    return markdown(head, rows)


def different(paper: float | str, ours: float) -> str:
    return "" if paper in ("", ours) else " ≠"


def size_of(task: str, model: str) -> tuple[int, int, int]:
    """Parameters, elements of the recurrent state, and of what else is kept between two steps."""
    run = resolve([f"--task={task}", f"--model={model}", "--preset=paper"])
    with torch.device("meta"):
        made = new_model(run.task, AutoConfig.for_model(MODELS[model].model_type, **run.fields))
    parts = [layer.mixer.state_shapes(1)._asdict() for layer in made.base_model.layers]
    state = sum(torch.Size(part["h"]).numel() for part in parts)
    whole = sum(torch.Size(shape).numel() for part in parts for shape in part.values())
    return made.num_parameters(), state, whole - state


def episodes_table(cells: Cells) -> str:
    columns = [(split, task) for split in CONDITIONS for task in ("shell", "shell_curriculum")]
    head = ["model", *cells.paper.tables["shell_overall_success"]["columns"]]
    models = rows_of(cells, ("shell", "shell_curriculum"), "shell_overall_success")
    return markdown(
        head, [[title(model), *(cells.cell(task, model, split) for split, task in columns)] for model in models]
    )


def swaps_table(cells: Cells, split: str) -> str:
    """Success for some numbers of swaps after direct training, and of the best guess without tracking."""
    table = f"shell_{CONDITIONS[split]}_by_swaps"
    in_paper = cells.paper.tables[table]
    counts = [int(name.removeprefix("K=")) for name in in_paper["columns"] if name.startswith("K=")]
    priors = zip(counts, in_paper["No-tracking prior"], strict=False)
    rows = [
        ["no tracking, computed", *(f"{100 * no_tracking_prior(count):.2f} / {paper:.2f}" for count, paper in priors)]
    ]
    for model in rows_of(cells, ("shell",), table):
        rows.append([title(model), *(cells.cell("shell", model, split, count) for count in counts)])
    return markdown(["model", *(f"K = {count}" for count in counts)], rows)


def jitter_table(cells: Cells) -> str:
    sizes = make_task("shell_jitter").test_sizes
    rows = []
    for model in rows_of(cells, ("shell_jitter",), "shell_jitter_success"):
        rows.append([title(model), *(cells.cell("shell_jitter", model, split) for split in sizes)])
    return markdown(["model", *(f"{swaps} swaps" for swaps in sizes.values())], rows)


def variations_tables(records: Records) -> list[str]:
    """Runs that the paper does not have, a table for each task, each kind below the paper's runs of the same model."""
    others = {
        (task, model, "not in the paper"): runs
        for (task, model), runs in records.runs.items()
        if (task, model) not in PAPER_RUNS
    }
    others |= records.variations
    tables = []
    for task in (name for name in TASKS_BY_NAME if name not in OWN_TASKS):
        kinds = {key: runs for key, runs in others.items() if key[0] == task}
        for _, model, _ in list(kinds):
            if (task, model) in PAPER_RUNS and records.of(task, model):
                kinds[task, model, "as in the paper"] = records.of(task, model)
        splits = list(dict.fromkeys(split for runs in kinds.values() for run in runs for split in run["results"]))
        order = sorted(kinds, key=lambda key: (list(MODELS).index(key[1]), key[2] != "as in the paper", key[2]))
        rows = [
            [f"`{model}`", changes, str(run["seed"]), f"{run['updates']:,}", *run_cells(run, splits)]
            for _, model, changes in order
            for run in kinds[task, model, changes]
        ]
        if rows:
            names = [split.removeprefix("test_") for split in splits]
            tables.append(f"`{task}`:\n\n" + markdown(["model", "settings", "seed", "updates", *names], rows))
    return tables


def acting_table(records: Records, rollouts: Path) -> str:
    """
    Policies of our own tasks, on recorded episodes and where they act, by number of swaps.

    Args:
        rollouts: A folder of what `train_hf.py evaluate --rollouts` has found, by the names of the runs.
    """
    everything = [run for runs in (*records.runs.values(), *records.variations.values()) for run in runs]
    rows = [
        ["", "no tracking, computed", "", *(f"{100 * no_tracking_prior(count):.2f}" for count in OWN_SWAPS), "", ""]
    ]
    for run in sorted(everything, key=lambda run: run["name"]):
        found, path = {"recorded": run}, rollouts / f"{run['name']}.json"
        if path.exists():
            found["its own"] = json.loads(path.read_text(encoding="utf-8"))
        for episodes, results in found.items() if run["task"] in OWN_TASKS else ():
            figures = [figure_of(results, "test_standard", count) for count in OWN_SWAPS]
            figures += [figure_of(results, split) for split in CONDITIONS]
            rows.append([f"`{run['task']}`", f"`{run['model']}`", episodes, *map(per_cent, figures)])
    head = ["task", "model", "episodes", *(f"K = {count}" for count in OWN_SWAPS), *CONDITIONS.values()]
    return markdown(head, rows)


def run_cells(run: dict, splits: list[str]) -> list[str]:
    return [per_cent(figure_of(run, split)) for split in splits]


def per_cent(figure: float | None) -> str:
    return "" if figure is None else f"{100 * figure:.2f}"


def coverage_table(cells: Cells, listed: list[str]) -> tuple[str, float]:
    """
    Which seeds there are, and what each of the others would take.

    Args:
        listed: Names of the runs of results/runs.txt.

    Returns:
        The table, and the minutes of one core that all open runs would take.
    """
    plain = [re.fullmatch(r"(\w+)-(\w+)-seed(\d+)", name) for name in listed]
    wanted = {}
    for found in filter(None, plain):
        wanted.setdefault((found[1], found[2]), []).append(int(found[3]))
    rows, minutes = [], 0.0
    for model in PAPER_NAMES:
        row = [title(model)]
        for task in TASKS:
            done = [run["seed"] for run in cells.records.of(task, model)]
            open_seeds = [seed for seed in wanted.get((task, model), []) if seed not in done]
            minutes += len(open_seeds) * cells.costs.get(f"{task}-{model}", 0.0)
            parts = [f"{len(done)} of {len(done) + len(open_seeds)}"] if done or open_seeds else []
            row.append(", ".join([*parts, *([f"{cells.cost(task, model)} each"] if open_seeds else [])]))
        rows.append(row)
    return markdown(["model", *(f"`{task}`" for task in TASKS)], rows), minutes
