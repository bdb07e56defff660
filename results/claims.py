"""What the paper says in words, and whether our runs say the same."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from operator import ge, le

from paper import Paper
from records import Records

# In per cent. Some room is left for errors and for luck: the sampling error of a test set is up to 4.
PERFECT, MOST, CHANCE_OF_S5, CHANCE_OF_CUPS = 99.0, 95.0, 100 / 60 + 2, 20.0 + 8


@dataclass(frozen=True)
class Claim:
    """
    Args:
        text: What the paper finds.
        task, models, splits: Which figures show it.
        compare, limit: What each of them must be; with two models and no limit, the first is compared with the second.
        of_means: Whether the paper says it of means over seeds, and not of each.
    """

    text: str
    task: str
    models: tuple[str, ...]
    splits: tuple[str, ...]
    compare: Callable[[float, float], bool]
    limit: float | None = None
    of_means: bool = True

    def figures(self, records: Records) -> dict[tuple[str, str], list[float]]:
        return {
            (model, split): records.figures(self.task, model, split) for model in self.models for split in self.splits
        }

    def holds(self, records: Records) -> bool | None:
        """Whether it holds, or None if a run is missing that it needs."""
        found = self.figures(records)
        if self.of_means:
            found = {place: [statistics.mean(figures)] if figures else [] for place, figures in found.items()}
        if self.limit is None:
            pairs = [[found[model, split] for model in self.models] for split in self.splits]
            known = [self.compare(*first, *second) for first, second in pairs if first and second]
            return all(known) if len(known) == len(pairs) else None
        if not all(self.compare(figure, self.limit) for figures in found.values() for figure in figures):
            return False  # whatever the missing ones will say
        return True if all(found.values()) else None

    def settings_with_which_it_holds(self, records: Records) -> dict[str, Records]:
        """Other settings of the same task and models by what is changed, where they were run with as many seeds."""
        others = {}
        for (task, model, changes), runs in records.variations.items():
            if task == self.task and model in self.models and len(runs) >= len(records.of(task, model)):
                others.setdefault(changes, Records()).runs[task, model] = runs
        return {changes: found for changes, found in others.items() if self.holds(found)}

    def evidence(self, records: Records, paper: Paper) -> str:
        """Our figures, the means over seeds, the paper's where it has them, and how many seeds there are."""
        found = {place: figures for place, figures in self.figures(records).items() if figures}
        means = [mean_and_range(figures) for figures in found.values()]
        known = [paper.figure(self.task, *place) for place in found]
        theirs = f", paper {', '.join(map(str, known))}" if all(known) else ""
        seeds = sorted({len(figures) for figures in found.values()})
        count = f"{seeds[0]} seed{'s' * (seeds[0] > 1)}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        return f"{', '.join(means)}{theirs}; {count}"


def mean_and_range(figures: list[float]) -> str:
    low, high = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return f"{statistics.mean(figures):.2f}" + (f" [{low}, {high}]" if low != high else "")


LENGTHS = ("test_64", "test_128", "test_256", "test_512")
EPISODES = ("test_standard", "test_extended")
TO_96 = ("test_16", "test_32", "test_48", "test_64", "test_96")
DELTA = ("deltaproduct_4", "gdp_4", "gdn")
CLAIMS = (
    Claim("NPLR follows S5 at the length of training", "s5_generators", ("nplr",), ("test_64",), ge, PERFECT, False),
    Claim("plain Mamba-3 is at chance on S5", "s5_generators", ("mamba3",), ("test_64",), le, CHANCE_OF_S5),
    Claim("NPLR without RoPE follows S5 to 512", "s5_generators", ("nplr_norope",), LENGTHS, ge, PERFECT, False),
    Claim("NPLR follows Z5 at the length of training", "z5", ("nplr",), ("test_64",), ge, PERFECT, False),
    Claim("plain Mamba-3 follows Z5 at the length of training", "z5", ("mamba3",), ("test_64",), ge, PERFECT),
    Claim("NPLR finds the ball in standard and in extended episodes", "shell", ("nplr",), EPISODES, ge, PERFECT, False),
    Claim("plain Mamba-3 loses the ball in most episodes", "shell", ("mamba3",), EPISODES, le, 50.0),
    Claim("NPLR finds the ball with random timing up to 96 swaps", "shell_jitter", ("nplr",), TO_96, ge, MOST),
    Claim(
        "NPLR is better at 128 swaps without RoPE than with it",
        "shell_jitter",
        ("nplr_norope", "nplr"),
        ("test_128",),
        ge,
    ),
    Claim(
        "the delta models are near chance at 128 swaps with random timing",
        "shell_jitter",
        DELTA,
        ("test_128",),
        le,
        CHANCE_OF_CUPS,
    ),
)
