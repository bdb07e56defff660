"""The paper's figures by our names, and whether a figure of ours lies in their range."""

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

# What the paper calls a model, in the order of its tables.
PAPER_NAMES = {
    "mamba3": "Mamba-3 (1 block)",
    "mamba3_2": "Mamba-3 (2 blocks)",
    "mamba3_4": "Mamba-3 (4 blocks)",
    "nplr": "Mamba-3 + NPLR",
    "nplr_norope": "Mamba-3 + NPLR without RoPE",
    "deltaproduct_2": "DeltaProduct (n_h=2)",
    "deltaproduct_4": "DeltaProduct (n_h=4)",
    "gdp_2": "GDP (n_h=2)",
    "gdp_4": "GDP (n_h=4)",
    "gdn": "Gated DeltaNet (beta<2)",
    "ids4": "IDS4",
}
GROUPS = {"z5": "Z5", "s5_generators": "S5"}
TRAININGS = {"shell": "direct", "shell_curriculum": "curriculum"}
CONDITIONS = {"test_standard": "standard", "test_extended": "extended"}
ABOVE, BELOW = "▲", "▼"


class PaperFigure(NamedTuple):
    """
    In per cent.

    Args:
        mean: Over the paper's runs; None where it only says more than what.
        smallest, largest: Of the runs, where the paper has them.
        above: What the mean is said to exceed.
    """

    mean: float | None = None
    smallest: float | None = None
    largest: float | None = None
    above: float | None = None

    def __str__(self):
        return f"> {self.above:g}" if self.mean is None else f"{self.mean:.2f}"


class Paper:
    """
    Args:
        path: File with the figures, by the paper's own names of models and columns.
    """

    def __init__(self, path: Path):
        self.tables = json.loads(path.read_text(encoding="utf-8"))

    def figure(self, task: str, model: str, split: str, swaps: int | None = None) -> PaperFigure | None:
        """The paper's figure for a model on a test set, or for one number of swaps of it, where it has one."""
        name = PAPER_NAMES.get(model)
        if swaps is not None:
            # The paper has them for direct training only.
            table = f"shell_{CONDITIONS[split]}_by_swaps"
            return self.in_table(table, name, f"K={swaps}") if task == "shell" else None
        if task in GROUPS:
            group, length = GROUPS[task], int(split.removeprefix("test_"))
            found = self.in_table("group_words_final_accuracy", name, f"{group} L={length}")
            return self.of_curve(group, name, length, found)
        if task in TRAININGS:
            return self.in_table("shell_overall_success", name, f"{CONDITIONS[split]} {TRAININGS[task]}")
        return self.of_jitter(name, int(split.removeprefix("test_"))) if task == "shell_jitter" else None

    def in_table(self, table: str, name: str, column: str) -> PaperFigure | None:
        content = self.tables[table]
        if name not in content or column not in content["columns"]:
            return None
        mean = content[name][content["columns"].index(column)]
        ranges = self.tables["ranges_in_the_text"].get(column, {}) if "by_swaps" not in table else {}
        return PaperFigure(mean, *ranges.get(name, ()))

    def of_curve(self, group: str, name: str, length: int, found: PaperFigure | None) -> PaperFigure | None:
        """From the table of extrapolation, which also has the range; the mean of another table stays."""
        for title, rows in self.tables["length_extrapolation_final_accuracy"].items():
            if title.startswith(f"{group} {name} ("):
                for _, mean, smallest, largest in (row for row in rows if row[0] == length):
                    return PaperFigure(found.mean if found else mean, smallest, largest)
        return found

    def curve(self, task: str, model: str) -> dict[int, PaperFigure]:
        """The table of extrapolation, by length."""
        for title, rows in self.tables["length_extrapolation_final_accuracy"].items():
            if title.startswith(f"{GROUPS[task]} {PAPER_NAMES[model]} ("):
                return {length: PaperFigure(*figures) for length, *figures in rows}
        return {}

    def of_jitter(self, name: str, swaps: int) -> PaperFigure | None:
        known = self.tables["shell_jitter_success"].get(name, {})
        if swaps <= known.get("perfect_through", 0):
            return PaperFigure(100.0, 100.0, 100.0)
        if f"K={swaps}" in known:
            return PaperFigure(known[f"K={swaps}"])
        return PaperFigure(above=95.0) if swaps <= known.get("above_95_through", 0) else None


def tolerance(ours: float, paper: float, tested: float) -> float:
    """
    How far two figures in per cent may lie apart by the choice of the test words alone, 19 times in 20: both are tested
    on so many, each on its own. One right and one wrong answer are added, or a figure of 100 would have no error.
    """
    right = (ours + paper) / 100 * tested
    share = (right + 1) / (2 * tested + 2)
    return 100 * 1.96 * math.sqrt(share * (1 - share) * 2 / tested)


def mark(ours: list[float], paper: PaperFigure | None, tested: float) -> str:
    """
    A mark where the mean of our seeds lies outside the paper's range, else nothing. It is in brackets where luck may be
    the reason: that of the seed, where the paper has no range of seeds and we have one, or several of which some reach
    the range; or that of the test words, where they alone may take ours so far from the paper's smallest or largest.

    Args:
        tested: Words or episodes that a figure is from.
    """
    if paper is None:
        return ""
    mean = round(statistics.mean(ours), 2)
    low, high = paper_range(mean, paper, tested)
    if low <= mean <= high:
        return ""
    arrow, end = (ABOVE, high) if mean > high else (BELOW, low)
    if paper.smallest is not None:
        is_luck = abs(mean - end) <= tolerance(mean, end, tested)
    else:
        is_luck = len(ours) == 1 or min(ours) <= end <= max(ours)
    return f"({arrow})" if is_luck else arrow


def paper_range(mean: float, paper: PaperFigure, tested: float) -> tuple[float, float]:
    """The smallest and largest of the paper's runs, or around its mean what test words may make of it."""
    if paper.smallest is not None:
        return paper.smallest, paper.largest
    if paper.mean is None:
        return paper.above, 100.0
    spread = tolerance(mean, paper.mean, tested)
    return paper.mean - spread, paper.mean + spread
