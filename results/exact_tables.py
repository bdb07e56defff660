"""What the preset for words has found: by group, beside other models, and with parts taken out."""

import json
import shlex
import statistics
from pathlib import Path

from cells import markdown
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.training.arguments import parse_run
from records import Records, changed_settings, figure_of, in_words
from tables import per_cent

MODEL = "nplr_exact"
WORDS, EPISODES = "final_accuracy", "success"  # what is measured of them
ENDS, FARTHEST = (64, 8_192), 100_000  # lengths at which drift is shown, and the last one that is measured
# Settings that are the same in all of these runs, or follow from the group.
OF_ALL = {"preset", "task.test_lengths", "task.test_windows", "model.vocab_size", "model.num_labels"}
OF_BUDGET = {"consistency", "model.label_smoothing"}  # those in which other models are given a choice


def changes_of(run: dict) -> dict[str, str]:
    """What a run has otherwise than the others."""
    return {name: value for name, value in changed_settings(run).items() if name not in OF_ALL}


def everything(records: Records) -> list[dict]:
    return [run for runs in records.variations.values() for run in runs]


def of_metric(records: Records, metric: str) -> list[dict]:
    return [run for run in everything(records) if run["metric"] == metric]


def plain_runs(runs: list[dict]) -> list[dict]:
    """Those of the exact model with the preset as it is, over whatever group."""
    return [run for run in runs if run["model"] == MODEL and changes_of(run).keys() <= {"task.group"}]


def lengths_of(run: dict) -> list[str]:
    return [f"{int(split.removeprefix('test_')):,}" for split in run["results"]]


def groups_table(records: Records, drifts: Path) -> str:
    """
    The exact model on words of each group, by length.

    Args:
        drifts: A folder of what `results/drift.py` has found, by the names of the runs.
    """
    groups, names = {}, []
    for run in plain_runs(of_metric(records, WORDS)):
        task, names = parse_run(shlex.split(run["command"])[2:]).task, lengths_of(run)
        groups.setdefault((task.algebra.order, task.group, len(task.letters)), []).append(run)
    rows = []
    for (order, group, letters), runs in sorted(groups.items()):
        rows.append([group.upper().replace("X", " x "), f"{order}", f"{letters}", f"{len(runs)}", *spreads(runs)])
        rows[-1].append(farthest_cell(runs, drifts))
    return markdown(["group", "elements", "letters", "seeds", *names, f"{FARTHEST:,}"], rows)


def models_table(records: Records) -> str:
    """All models on the groups that others than the exact one were trained on, with the same updates and words."""
    kinds, names = {}, []
    for run in of_metric(records, WORDS):
        if changes_of(run).keys() <= OF_BUDGET:
            settings, names = parse_run(shlex.split(run["command"])[2:]), lengths_of(run)
            smoothing, term = settings.config.label_smoothing, settings.consistency is not None
            kinds.setdefault((run["task"], list(MODELS).index(run["model"]), term, smoothing), []).append(run)
    compared = {task for task, model, *_ in kinds if list(MODELS)[model] != MODEL}
    rows = []
    for (task, model, term, smoothing), runs in sorted(kinds.items()):
        if task in compared:
            kind = [f"`{task}`", f"`{list(MODELS)[model]}`", f"{smoothing:g}", "yes" if term else "no"]
            rows.append([*kind, f"{len(runs)}", *spreads(runs)])
    return markdown(["task", "model", "label smoothing", "term", "seeds", *names], rows) if rows else ""


def parts_table(records: Records, drifts: Path) -> str:
    """
    The exact model with a part taken out, below the whole one with the same seed.

    Args:
        drifts: As above.
    """
    runs = of_metric(records, WORDS)
    without = [run for run in runs if run["model"] == MODEL and is_without_a_part(run)]
    seeds = {(run["task"], run["seed"]) for run in without}
    whole = [run for run in plain_runs(runs) if (run["task"], run["seed"]) in seeds and not changes_of(run)]
    rows, names = [], []
    for run in sorted(whole, key=lambda run: run["name"]) + sorted(without, key=lambda run: in_words(changes_of(run))):
        names = lengths_of(run)
        figures = [per_cent(figure_of(run, split)) for split in run["results"]]
        rows.append([f"`{run['task']}`", in_words(changes_of(run)) or "the whole", *figures, *drift_cells(drifts, run)])
    head = ["heads", "unexplained at 64", "at 8,192", "growth of the state", "mirrors", "decay", "a letter", "two"]
    return markdown(["task", "changed", *names, *head], rows) if rows else ""


def episodes_table(records: Records) -> str:
    """The exact model on episodes, by the number of their windows."""
    tasks = {}
    for run in plain_runs(of_metric(records, EPISODES)):
        tasks.setdefault(run["task"], []).append(run)
    sizes = {task: parse_run(shlex.split(runs[0]["command"])[2:]).task.test_sizes for task, runs in tasks.items()}
    windows = sorted({size for of_task in sizes.values() for size in of_task.values()})
    rows = []
    for task, runs in sorted(tasks.items()):
        found = dict(zip(sizes[task].values(), spreads(runs), strict=True))
        rows.append([f"`{task}`", f"{len(runs)}", *(found.get(size, "") for size in windows)])
    return markdown(["task", "seeds", *(f"{size:,}" for size in windows)], rows) if rows else ""


def long_games_table(folder: Path) -> str:
    """
    Policies in very long episodes.

    Args:
        folder: Of what `results/long_games.py` has found.
    """
    rows, head = [], []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        head = [f"{kind} {size:,}" for kind in ("fixed", "random") for size in found["windows"]]
        head += [f"wait {wait:,}" for wait in found["waits"][1:]] + [f"moved in {found['waits'][-1]:,}"]
        success = [*found["shell"], *found["shell_jitter"], *found["after_waits"][1:]]
        rows.append([f"`{path.stem}`", *(per_cent(x) for x in success), f"{found['moved'][-1]:.0e}"])
    return markdown(["policy", *head], rows) if rows else ""


def is_without_a_part(run: dict) -> bool:
    return bool(changes_of(run).keys() - {"task.group"})


def read_drift(drifts: Path, run: dict) -> dict | None:
    path = drifts / f"{run['name']}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def farthest_cell(runs: list[dict], drifts: Path) -> str:
    """How often they are right at the farthest length, and how many of them were followed so far."""
    found = [drift["right"][drift["lengths"].index(FARTHEST)] for run in runs if (drift := read_drift(drifts, run))]
    return f"{spread([100 * x for x in found])} ({len(found)})" if found else ""


def drift_cells(drifts: Path, run: dict) -> list[str]:
    drift = read_drift(drifts, run)
    if drift is None:
        return [""] * 8
    first, last = (drift["lengths"].index(length) for length in ENDS)
    return [
        f"{len(drift['heads'])}",
        *(f"{statistics.median(drift['unexplained'][place]):.0e}" for place in (first, last)),
        f"{max(drift['growth'][last]):.3g}",
        *(f"{drift[name]:.0e}" for name in ("mirrors", "decay")),
        *(f"{statistics.median(drift[name]):.0e}" for name in ("letters", "pairs")),
    ]


def spreads(runs: list[dict]) -> list[str]:
    return [spread([100 * figure_of(run, split) for run in runs]) for split in runs[0]["results"]]


def spread(figures: list[float]) -> str:
    """The mean, with the smallest and the largest where they differ."""
    mean, ends = f"{statistics.mean(figures):.2f}", (min(figures), max(figures))
    return mean if ends[0] == ends[1] else f"{mean} [{ends[0]:.2f}, {ends[1]:.2f}]"
