"""
Keeps the trained models of the best and the worst seed of each task, small: weights and configuration, with a card,
settings and results, without the code, which the package has.

    python results/kept.py [--trained runs] [--checkpoints checkpoints]

A model is then in `checkpoints/TASK-MODEL-seedSEED`, from where it loads as any other. Those of the paper's main models
and of the exact ones are kept, and removed when another seed turns out better or worse. What is not in the folders of
trainings stays as it is.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from exact_tables import changes_of, everything, plain_runs
from mamba3_nplr.modeling.hub.atomic_files import write_atomically
from mamba3_nplr.modeling.hub.contents import write_contents
from mamba3_nplr.training import record
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.checkpoints import is_whole
from mamba3_nplr.training.model_card import model_card
from mamba3_nplr.training.record import mean_figure
from records import Records, read_records

HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE.parent / "checkpoints"
MODELS = ("mamba3", "nplr", "nplr_norope", "nplr_exact", "nplr_exact_norope")
SPECIAL = (("shell_pixels", "total_steps 9000, start_swaps 1, max_steps 9000"),)
# Those that are trained by presets of their own, as they are on the page; other groups are for the tables.
EXACT_TASKS = ("s5_generators", "z5", "shell", "shell_jitter")
WEIGHTS, CONFIGURATION = "model.safetensors", "config.json"
OF_CODE = ("auto_map", "custom_pipelines")  # in a configuration: where its code lies


def ends(runs: list[dict]) -> dict[str, str]:
    """The names of the best and of the worst run, the first of equals, and which of them they are."""
    if len(runs) == 1:
        return {runs[0]["name"]: "the only seed"}
    best, worst = max(runs, key=mean_figure)["name"], min(runs, key=mean_figure)["name"]
    which = f"of {len(runs)} seeds"
    return {best: f"best {which}", worst: f"worst {which}"} if best != worst else {best: f"one {which}, all alike"}


def paper_seeds(records: Records) -> list[list[dict]]:
    """Runs that differ by their seeds, of the models that are kept; some of them with settings of their own."""
    kept = [runs for (_, model), runs in sorted(records.runs.items()) if model in MODELS]
    return kept + [
        runs for (task, _, changes), runs in sorted(records.variations.items()) if (task, changes) in SPECIAL
    ]


def exact_seeds(records: Records) -> list[list[dict]]:
    """The same of the runs with presets of their own."""
    plain = [run for run in plain_runs(everything(records)) if not changes_of(run)]
    kinds = [[run for run in plain if run["task"] == task] for task in EXACT_TASKS]
    return [runs for runs in kinds if runs]


def kept_runs(groups: Iterable[list[dict]]) -> dict[str, tuple[dict, str]]:
    """Those to keep by their names, and which of their seeds they are."""
    found = {}
    for runs in groups:
        which = ends(runs)
        found |= {run["name"]: (run, which[run["name"]]) for run in runs if run["name"] in which}
    return found


def all_kept(place: Path) -> dict[str, tuple[dict, str]]:
    """Those of the records in a folder like this one."""
    exact = exact_seeds(read_records(place / "exact"))
    return dict(sorted(kept_runs([*paper_seeds(read_records(place / "runs")), *exact]).items()))


def keep(groups: list[list[dict]], trained: Path, checkpoints: Path) -> None:
    wanted = kept_runs(groups)
    for run in (run for runs in groups for run in runs):
        target = checkpoints / run["name"]
        if run["name"] not in wanted:
            shutil.rmtree(target, ignore_errors=True)
            continue
        if is_training_of(run, trained / run["name"]):
            copy_model(trained / run["name"], target)
        if (target / WEIGHTS).exists():
            describe(run, target)


def is_training_of(run: dict, folder: Path) -> bool:
    """Whether a folder is whole, and that of this record: the same seed may have been trained by other code."""
    if not folder.is_dir() or not is_whole(folder):
        return False
    return json.loads((folder / record.RESULTS).read_text(encoding="utf-8")) | {"name": run["name"]} == run


def copy_model(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    configuration = json.loads((source / CONFIGURATION).read_text(encoding="utf-8"))
    text = json.dumps({name: x for name, x in configuration.items() if name not in OF_CODE}, indent=2) + "\n"
    weights = (source / WEIGHTS).read_bytes()
    write_atomically(target / WEIGHTS, lambda part: part.write_bytes(weights))
    write_atomically(target / CONFIGURATION, lambda part: part.write_text(text, encoding="utf-8"))


def describe(run: dict, target: Path) -> None:
    """Writes the results, settings and card of a record beside its model, as training does."""
    results = {name: x for name, x in run.items() if name != "name"}
    settings = parse_run(shlex.split(run["command"])[2:])
    made = {name: results[name] for name in ("command", "mathematics", "environment") if name in results}
    record.write_json(target / record.RESULTS, results)
    record.write_json(target / record.RUN, {"arguments": settings.arguments} | made)
    card = model_card(settings, results, f"checkpoints/{run['name']}", carries_code=False)
    write_atomically(target / record.CARD_FILE, lambda part: part.write_text(card, encoding="utf-8"))
    # By which `publish` knows that they are what was evaluated.
    write_contents(target, [WEIGHTS, CONFIGURATION, record.RESULTS, record.RUN, record.CARD_FILE])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Keeps the models of the best and the worst seeds.")
    parser.add_argument("--trained", type=Path, default=Path("runs"), help="(default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="(default: checkpoints)")
    given = parser.parse_args(arguments)
    keep(paper_seeds(read_records(HERE / "runs")), given.trained / "paper", given.checkpoints)
    keep(exact_seeds(read_records(HERE / "exact")), given.trained / "exact", given.checkpoints)


if __name__ == "__main__":
    main()
