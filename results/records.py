"""The records of runs in results/runs: which of them count, and what they found."""

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.record import MATHEMATICS

NAMES = ("task", "model", "preset", "seed")  # of a command; all else in it is a change of what these stand for


@dataclass
class Records:
    """
    Args:
        runs: Those as the paper has them, by task and model, in the order of their seeds.
        variations: Those with other settings, by task, model and what was changed.
        left_out: Names of those that were made by other mathematics.
    """

    runs: dict[tuple[str, str], list[dict]] = field(default_factory=lambda: defaultdict(list))
    variations: dict[tuple[str, str, str], list[dict]] = field(default_factory=lambda: defaultdict(list))
    left_out: list[str] = field(default_factory=list)

    def of(self, task: str, model: str) -> list[dict]:
        return self.runs.get((task, model), [])

    def figures(self, task: str, model: str, split: str, swaps: int | None = None) -> list[float]:
        """The main metric on a test set, or for one number of swaps of it, in per cent, of each run that has it."""
        found = (figure_of(run, split, swaps) for run in self.of(task, model))
        return [100 * figure for figure in found if figure is not None]


def figure_of(run: dict, split: str, swaps: int | None = None) -> float | None:
    results = run["results"].get(split, {})
    return results.get(run["metric"]) if swaps is None else results.get("success_by_swaps", {}).get(str(swaps))


def read_records(folder: Path) -> Records:
    records = Records()
    found = [json.loads(path.read_text(encoding="utf-8")) | {"name": path.stem} for path in folder.glob("*.json")]
    for run in sorted(found, key=lambda run: (run["seed"], run["name"])):
        if run.get("mathematics", 1) != MATHEMATICS:  # those without a number are of the first
            records.left_out.append(run["name"])
        elif changes := changed_settings(run):
            records.variations[run["task"], run["model"], in_words(changes)].append(run)
        else:
            records.runs[run["task"], run["model"]].append(run)
    return records


def changed_settings(run: dict) -> dict[str, str]:
    """What the command of a run has otherwise than the paper's run of its task and model, by its options."""
    words = shlex.split(run["command"])[2:]
    given = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    changed = {name: value for name, value in given.items() if name not in NAMES}
    default = make_task(run["task"])
    for name in [name for name in changed if name.startswith("task.")]:
        if str(getattr(default, name.removeprefix("task."), None)) == changed[name]:
            del changed[name]  # it was not the default once
    if given.get("preset", "paper") != "paper":
        changed["preset"] = given["preset"]
    return changed


def in_words(changes: dict[str, str]) -> str:
    return ", ".join(f"{name.partition('.')[2] or name} {value}" for name, value in changes.items())
