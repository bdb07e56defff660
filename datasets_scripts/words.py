"""Group words: predict the product of every prefix of a random word."""

from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .counter_random import CounterRandom, split_rows
from .groups import Group, make_group
from .task import check_at_least, check_choice, check_sizes
from .task_kinds import PrefixClassification
from .task_texts import TaskTexts

LONGEST_WITH_NUMBERS = 80  # letters of a word whose picture has room for a number in each field
LETTER_WIDTH = 10  # of a permutation of five points in a table

TEXTS = TaskTexts(
    problem="group word problem",
    subject="group words",
    sequences="words",
    answer="last product",
    details="accuracy by position",
    heading="Words",
    section="""\
A word is a sequence of letters g_1 ... g_L of a finite group, drawn independently and uniformly; the label at position
t is the product s_t = g_t o s_(t-1), with s_0 the identity. The product applies s_(t-1) first.

| Column | Type | Meaning |
| --- | --- | --- |
| `input_ids` | list of int32 | number of each letter among the allowed letters |
| `labels` | list of ClassLabel | number of the product of each prefix; its name is the permutation, in one line |

Elements are numbered from 0, the identity: in cyclic groups by the shift, in symmetric and alternating groups in
lexicographic order of their one-line notation. `s5_generators` draws the four adjacent transpositions of five points;
letter j swaps places j and j + 1. The other configurations draw from all elements.""",
    tags=("group-word-problem",),
    vocabulary="letters and elements",
)


@dataclass(frozen=True)
class GroupWords(PrefixClassification):
    """
    s_t = g_t o s_{t-1} with s_0 the identity; the letters g_t are independent and uniform. `datasets_scripts/groups.py`
    says how elements are numbered and composed.

    Args:
        group: Name of the group, such as "s5" or "z2xs3".
        inputs: "elements" draws letters from the whole group, "generators" from its generators only.
        length: Length of the words, in training at the end of the curriculum.
        start_length: Length at the start of a curriculum that grows to `length`; None for none.
        growth: How it grows. "linear" adds letters evenly; "geometric" multiplies, so that words stay short for longer,
            and shorter words are more in a batch, which holds about as many letters at any time.
        test_lengths: Lengths of the test sets; None for `length` and 2, 4, 8, 16 and 32 times that.
        test_size: Words in each test set.
    """

    texts = TEXTS
    example_entry = "permutation"

    group: str = "s5"
    inputs: str = "generators"
    length: int = 64
    start_length: int | None = None
    growth: str = "linear"
    test_lengths: tuple[int, ...] | None = None
    test_size: int = 512

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.group, str):
            raise ValueError(f"group={self.group!r} is not allowed: it must be a name like s5.")
        check_choice("inputs", self.inputs, ("elements", "generators"))
        check_choice("growth", self.growth, ("linear", "geometric"))
        for name in ("length", "test_size"):
            check_at_least(name, getattr(self, name), 1)
        if self.start_length is None and self.growth != "linear":
            raise ValueError(f"growth={self.growth!r} is not allowed without a start_length to grow from.")
        if self.start_length is not None:
            check_at_least("start_length", self.start_length, 1)
            check_at_least("length", self.length, self.start_length)
        if self.test_lengths is not None:
            check_sizes("test_lengths", self.test_lengths, 1)
        if len(self.letters) == 0:
            raise ValueError(f"group={self.group!r} has no generators; inputs must be 'elements'.")

    @cached_property
    def algebra(self) -> Group:
        return make_group(self.group)

    @cached_property
    def letters(self) -> np.ndarray:
        """The element that each input token stands for."""
        numbers = range(self.algebra.order) if self.inputs == "elements" else self.algebra.generators
        return np.array(numbers, dtype=np.int32)

    @cached_property
    def label_names(self) -> list[str]:
        return [self.algebra.element_name(number) for number in range(self.algebra.order)]

    @property
    def token_names(self) -> list[str]:
        """Letters are called after their numbers, s0, s1 ... among the generators and g0, g1 ... in the whole group."""
        letter = "g" if self.inputs == "elements" else "s"
        return [f"{letter}{number}" for number in range(len(self.letters))]

    @property
    def baseline(self) -> float:
        """Accuracy of a uniform guess among the elements that a word of known length can reach."""
        reached = {0}
        for _ in range(self.length):
            reached = {int(x) for x in np.unique(self.algebra.table[np.ix_(self.letters, sorted(reached))])}
        return 1 / len(reached)

    def chance(self, rows: dict[str, np.ndarray]) -> float:
        return self.baseline

    def training_length(self, step: int) -> int:
        """Length of the words at a step: with a curriculum it grows over the first part of training."""
        if self.start_length is None:
            return self.length
        if self.growth == "geometric":
            return round(self.start_length * (self.length / self.start_length) ** self.progress(step))
        return self.start_length + int((self.length - self.start_length) * self.progress(step))

    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        length = self.training_length(step)
        times = self.length // length if self.growth == "geometric" else 1
        first, rows = split_rows(self.batch_size * times, rank, world_size)
        return self.draw("train", seed, step, first, rows, length)

    def draw(self, purpose: str, seed: int, step: int, first_row: int, rows: int, length: int) -> dict[str, np.ndarray]:
        random = CounterRandom(f"{self.key}/{purpose}", seed, step, first_row, rows, length)
        tokens = random.integers(len(self.letters), length)
        products = self.algebra.prefix_products(self.letters[tokens])
        return {"input_ids": tokens, "labels": products.astype(np.int64)}

    @property
    def key(self) -> str:
        """Tells the random numbers of this task from those of others; sizes and schedules do not matter."""
        return f"words/{self.group}/{self.inputs}"

    @property
    def settings(self) -> dict:
        return super().settings | {"test_lengths": tuple(self.test_sizes.values())}

    @property
    def test_sizes(self) -> dict[str, int]:
        lengths = self.test_lengths
        if lengths is None:
            lengths = [self.length * times for times in (1, 2, 4, 8, 16, 32)]
        return {f"test_{length}": length for length in lengths}

    @property
    def trained_size(self) -> int:
        return self.length

    @property
    def splits(self) -> dict[str, int]:
        return dict.fromkeys(["validation", *self.test_sizes], self.test_size)

    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        if split == "train":
            return self.draw("train_set", 0, 0, start, stop - start, self.length)
        self.check_split(split, start, stop)
        length = self.length if split == "validation" else self.test_sizes[split]
        return self.draw(split, 0, 0, start, stop - start, length)

    @property
    def question(self) -> str:
        return f"Words over {self.group.upper()}: is the product of all letters right?"

    @property
    def description(self) -> str:
        return f"Reads words over the group {self.group} and predicts the product of each prefix."

    @property
    def short_description(self) -> str:
        return f"words over {self.group}, {len(self.letters)} letters, {self.algebra.order} classes"

    def describe_row(self, row: dict[str, np.ndarray]) -> str:
        lines = [f"{'step':>5}  {'token':>5}  {'letter':<{LETTER_WIDTH}}  product of the prefix (label)"]
        for step, (token, label) in enumerate(zip(row["input_ids"], row["labels"], strict=True), start=1):
            letter = self.label_names[self.letters[token]]
            lines.append(f"{step:>5}  {token:>5}  {letter:<{LETTER_WIDTH}}  {self.label_names[label]} ({label})")
        return "\n".join(lines)

    def draw_row(self, axes, row: dict[str, np.ndarray]) -> None:
        """Which point is at which place after each letter, by color; with numbers and letters where there is room."""
        places = self.algebra.elements[np.concatenate([[0], row["labels"]])]  # (length + 1, degree) of each point
        points, degree = np.argsort(places, axis=1).T, places.shape[1]
        colors = point_colors(degree)
        options = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
        axes.imshow(points, cmap=colors, vmin=0, vmax=degree - 1, **options)
        for point in range(degree):
            axes.plot([], [], "s", color=colors(point), label=f"point {point}")
        if points.shape[1] <= LONGEST_WITH_NUMBERS:
            for (place, step), point in np.ndenumerate(points):
                axes.text(step, place, point, ha="center", va="center", fontsize=7)
            letters, names = axes.secondary_xaxis("top"), self.token_names
            letters.set_xticks(range(1, points.shape[1]), [names[x] for x in row["input_ids"]])
            letters.tick_params(labelsize=6, length=0)
            letters.set_xlabel("letter read", fontsize=8)
        axes.set(
            xlabel="number of letters read",
            ylabel="place",
            title=f"Word over {self.group.upper()}: the point at each place",
        )
        axes.set_yticks(range(degree))
        axes.legend(loc="upper center", ncols=min(degree, 10), fontsize=8, bbox_to_anchor=(0.5, -0.18), frameon=False)


def point_colors(degree: int):
    """A light color for each point, so that numbers can be read on them."""
    from matplotlib.colors import ListedColormap

    return ListedColormap([hsv_to_rgb(point / degree, 0.4, 1.0) for point in range(degree)])
