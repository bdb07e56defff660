"""What a task is: it makes its training batches, its evaluation sets and its metrics."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True)
class Task(ABC):
    """
    Everything a task makes is a pure function of its settings and of the arguments: the same on every machine and for
    every number of processes. Evaluation sets share no random numbers with training, whatever its seed.

    Args:
        batch_size: Rows in a training batch, over all processes.
        total_steps: Updates in a training run, for the curriculum.
        curriculum_part: Part of the updates over which a curriculum grows.
    """

    batch_size: int = 64
    total_steps: int = 20_000
    curriculum_part: float = 0.6

    def __post_init__(self):
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("total_steps", self.total_steps, 1)
        part = self.curriculum_part
        if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
            raise ValueError(f"curriculum_part={part!r} is not allowed: it must be above 0 and at most 1.")

    def progress(self, step: int) -> float:
        """How far the curriculum has come, from 0 to 1."""
        return min(1.0, step / (self.curriculum_part * self.total_steps))

    def batch(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
        """A process's share of the training batch of a step, as arguments of the model."""
        check_at_least("step", step, 0)
        return self.model_inputs(self.arrays(seed, step, rank, world_size))

    def model_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Columns of the dataset as arguments of the model."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def check_split(self, split: str, start: int, stop: int) -> None:
        if split not in self.splits:
            raise ValueError(f"split={split!r} is unknown. The splits are: train, {', '.join(self.splits)}.")
        if not 0 <= start <= stop <= self.splits[split]:
            raise ValueError(f"rows {start} to {stop} are not in {split}, which has {self.splits[split]}.")

    @property
    @abstractmethod
    def model_fields(self) -> dict:
        """Fields of the model's configuration that follow from the task."""

    @property
    def model_names(self) -> dict:
        """Names for the model's configuration, of what it reads and predicts, by which pipelines speak of them."""
        return {}

    @property
    def settings(self) -> dict:
        """All fields by name, those that are None and follow from others as they turn out."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    @abstractmethod
    def test_sizes(self) -> dict[str, int]:
        """The test sets by name, with the length of their words or the number of windows of their episodes."""

    @property
    @abstractmethod
    def splits(self) -> dict[str, int]:
        """The evaluation sets, by name, and their sizes. There is a `train` split of any size beside them."""

    @abstractmethod
    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        """A process's share of the training batch of a step, as columns of the dataset."""

    @abstractmethod
    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        """Some rows of an evaluation set, or of the published `train` split, as columns of the dataset."""

    @abstractmethod
    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """Figures of merit of a model's predictions for `rows`."""


def check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not allowed: it must be a whole number of at least {least}.")


def check_sizes(name: str, sizes: tuple[int, ...], least: int) -> None:
    """Of test sets: at least one, since a run is known by what it reaches there, and none twice."""
    if not isinstance(sizes, tuple | list) or not sizes or len(set(map(repr, sizes))) < len(sizes):
        raise ValueError(f"{name}={sizes!r} is not allowed: it must be a list of one or more different whole numbers.")
    for size in sizes:
        check_at_least(name, size, least)


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed: it must be true or false.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not allowed: it must be one of {', '.join(choices)}.")
