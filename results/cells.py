"""The cells of the tables: a figure of ours beside the paper's, or what a run would cost."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mamba3_nplr.datasets_scripts.tasks import make_task
from paper import Paper, mark
from records import Records


class Place(NamedTuple):
    """Which figure a cell has: a model on a test set of a task, or on one number of swaps of it."""

    task: str
    model: str
    split: str
    swaps: int | None = None


@dataclass
class Cells:
    """
    Args:
        records: Our runs.
        paper: The paper's figures.
        costs: Of a run by task and model, in minutes of one core.
        marks: Of the cells so far that have a figure of ours and one of the paper.
        empty: Those so far that the paper has and we do not.
    """

    records: Records
    paper: Paper
    costs: dict[str, float]
    marks: dict[Place, str] = field(default_factory=dict)
    empty: set[Place] = field(default_factory=set)

    def cell(self, *place) -> str:
        """Ours with the number of seeds and a mark, or the cost of a run; and the paper's figure where it has one."""
        place = Place(*place)
        paper = self.paper.figure(*place)
        return " / ".join([self.ours(place, paper), *([str(paper)] if paper else [])])

    def ours(self, place: Place, paper) -> str:
        """The first part of a cell, which is counted among those that were compared."""
        figures = self.records.figures(*place)
        if not figures:
            if paper:
                self.empty.add(place)
            return self.cost(place.task, place.model)
        found = mark(figures, paper, tested(place))
        if paper:
            self.marks[place] = found
        return " ".join(filter(None, [f"{statistics.mean(figures):.2f} ({len(figures)})", found]))

    def cost(self, task: str, model: str) -> str:
        minutes = self.costs.get(f"{task}-{model}")
        return "*not measured*" if minutes is None else f"*{minutes:.0f} min*"


def read_costs(path: Path) -> dict[str, float]:
    """Minutes of one core that a run takes, by task and model."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return {name: run["updates"] * run["milliseconds_an_update"] / 60_000 for name, run in runs.items()}


def tested(place: Place) -> float:
    """Words or episodes that a figure is from; of a number of swaps, as many as there are on average."""
    task = make_task(place.task)
    return task.test_size if place.swaps is None else task.test_size / (task.test_sizes[place.split] + 1)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
