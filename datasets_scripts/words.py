"""Group words: predict the product of every prefix of a random word."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .counter_random import CounterRandom, split_rows
from .groups import Group, make_group
from .task import Task, check_at_least, check_choice, check_sizes


@dataclass(frozen=True)
class GroupWords(Task):
    """
    s_t = g_t o s_{t-1} with s_0 the identity; the letters g_t are independent and uniform. `datasets_scripts/groups.py`
    says how elements are numbered and composed.

    Args:
        group: Name of the group, such as "s5" or "z2xs3".
        inputs: "elements" draws letters from the whole group, "generators" from its generators only.
        length: Length of the words, in training at the end of the curriculum.
        start_length: Length at the start of a curriculum that grows to `length`; None for none.
        test_lengths: Lengths of the test sets; None for `length` and 2, 4, 8, 16 and 32 times that.
        test_size: Words in each test set.
    """

    group: str = "s5"
    inputs: str = "generators"
    length: int = 64
    start_length: int | None = None
    test_lengths: tuple[int, ...] | None = None
    test_size: int = 512

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.group, str):
            raise ValueError(f"group={self.group!r} is not allowed: it must be a name like s5.")
        check_choice("inputs", self.inputs, ("elements", "generators"))
        for name in ("length", "test_size"):
            check_at_least(name, getattr(self, name), 1)
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

    @property
    def model_fields(self) -> dict:
        return {"vocab_size": len(self.letters), "num_labels": self.algebra.order}

    @cached_property
    def label_names(self) -> list[str]:
        return [self.algebra.element_name(number) for number in range(self.algebra.order)]

    @property
    def model_names(self) -> dict:
        """Letters are called after their numbers, s0, s1 ... among the generators and g0, g1 ... in the whole group."""
        letter = "g" if self.inputs == "elements" else "s"
        return {
            "id2label": dict(enumerate(self.label_names)),
            "label2id": {name: number for number, name in enumerate(self.label_names)},
            "token_names": [f"{letter}{number}" for number in range(len(self.letters))],
        }

    @property
    def baseline(self) -> float:
        """Accuracy of a uniform guess among the elements that a word of known length can reach."""
        reached = {0}
        for _ in range(self.length):
            reached = {int(x) for x in np.unique(self.algebra.table[np.ix_(self.letters, sorted(reached))])}
        return 1 / len(reached)

    def training_length(self, step: int) -> int:
        """Length of the words at a step: with a curriculum it grows over the first part of training."""
        if self.start_length is None:
            return self.length
        return self.start_length + int((self.length - self.start_length) * self.progress(step))

    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        first, rows = split_rows(self.batch_size, rank, world_size)
        return self.draw("train", seed, step, first, rows, self.training_length(step))

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
    def splits(self) -> dict[str, int]:
        return dict.fromkeys(["validation", *self.test_sizes], self.test_size)

    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        if split == "train":
            return self.draw("train_set", 0, 0, start, stop - start, self.length)
        self.check_split(split, start, stop)
        length = self.length if split == "validation" else self.test_sizes[split]
        return self.draw(split, 0, 0, start, stop - start, length)

    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict[str, float | list[float]]:
        """
        Args:
            predictions (rows, length): Predicted element at every position.
        """
        correct = np.asarray(predictions) == np.asarray(rows["labels"])
        by_position = correct.mean(0)
        return {
            "accuracy": float(correct.mean()),
            "final_accuracy": float(by_position[-1]),
            "accuracy_by_position": by_position.tolist(),
        }
