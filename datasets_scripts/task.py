"""
What a task is. All that is special to one stands on its class: what it draws and measures, how a model's output is
read, and what is drawn and said of it. No other code knows a task by its type or its name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch

from .task_texts import HubNames, TaskTexts

if TYPE_CHECKING:
    from datasets import Features  # slow to import, and not needed to make batches


STATE_COLUMNS = ("kinds", "states")  # of `Task.states`
IGNORED = -100  # a label that does not count, as in torch and transformers


@dataclass(frozen=True)
class Task(ABC):
    """
    Everything a task makes is a pure function of its settings and of the arguments: the same on every machine and for
    every number of processes. Evaluation sets share no random numbers with training, whatever its seed.

    A task is a subclass of one of the two in `task_kinds.py`, which know a head of the models, with an entry in
    `tasks.py`. What is a property here may be an attribute of the class there.

    Args:
        batch_size: Rows in a training batch, over all processes.
        total_steps: Updates in a training run, for the curriculum.
        curriculum_start: Part of the updates before a curriculum begins to grow.
        curriculum_part: Part of the updates after which it has grown.
    """

    batch_size: int = 64
    total_steps: int = 20_000
    curriculum_start: float = 0.0
    curriculum_part: float = 0.6

    def __post_init__(self):
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("total_steps", self.total_steps, 1)
        start, part = self.curriculum_start, self.curriculum_part
        if not is_number(part) or not 0 < part <= 1:
            raise ValueError(f"curriculum_part={part!r} is not allowed: it must be above 0 and at most 1.")
        if not is_number(start) or not 0 <= start < part:
            raise ValueError(
                f"curriculum_start={start!r} is not allowed: it must be at least 0 and below curriculum_part={part}."
            )

    @property
    def settings(self) -> dict:
        """All fields by name, those that are None and follow from others as they turn out."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def arrays(self, seed: int, step: int, rank: int = 0, world_size: int = 1) -> dict[str, np.ndarray]:
        """A process's share of the training batch of a step, as columns of the dataset."""

    def batch(
        self, seed: int, step: int, rank: int = 0, world_size: int = 1, with_states: bool = False
    ) -> dict[str, torch.Tensor]:
        """
        A process's share of the training batch of a step, as arguments of the model; or, with states, what `states`
        says of it beside them, laid out as they are.
        """
        check_at_least("step", step, 0)
        arrays = self.arrays(seed, step, rank, world_size)
        return self.model_inputs(arrays | (self.states(arrays) if with_states else {}))

    def model_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Columns of the dataset as arguments of the model."""
        return {name: torch.from_numpy(arrays[name]) for name in self.inputs_in(arrays)}

    def inputs_in(self, arrays: dict[str, np.ndarray]) -> list[str]:
        """The columns that have an entry for each position of what a model reads."""
        return [self.input_column, "labels", *(name for name in STATE_COLUMNS if name in arrays)]

    def states(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """
        What a state has to hold, for a training that makes it last; None where a task does not say.

        Returns:
            Two columns of whole numbers (rows, length). `states`: what the inputs up to this position come to, whatever
            they were; -100 where this is not said. `kinds`: which of the inputs this one is, among those that look the
            same.
        """
        return None

    def progress(self, step: int) -> float:
        """How far the curriculum has come, from 0 to 1."""
        start = self.curriculum_start * self.total_steps
        return min(1.0, max(0.0, (step - start) / (self.curriculum_part * self.total_steps - start)))

    def training_length(self, step: int) -> int:
        """The size of the sequences at a step, if a curriculum makes them grow."""
        return self.trained_size

    @property
    @abstractmethod
    def test_sizes(self) -> dict[str, int]:
        """The test sets by name, with the size of their sequences."""

    @property
    @abstractmethod
    def size_name(self) -> str:
        """What the size of a sequence is, such as "length"."""

    @property
    @abstractmethod
    def trained_size(self) -> int:
        """The largest size in training."""

    @property
    @abstractmethod
    def splits(self) -> dict[str, int]:
        """The evaluation sets, by name, and their rows. There is a `train` split of any size beside them."""

    @abstractmethod
    def rows(self, split: str, start: int, stop: int) -> dict[str, np.ndarray]:
        """Some rows of an evaluation set, or of the published `train` split, as columns of the dataset."""

    def check_split(self, split: str, start: int, stop: int) -> None:
        if split not in self.splits:
            raise ValueError(f"split={split!r} is unknown. The splits are: train, {', '.join(self.splits)}.")
        if not 0 <= start <= stop <= self.splits[split]:
            raise ValueError(f"rows {start} to {stop} are not in {split}, which has {self.splits[split]}.")

    def lengths(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns that are padded, each with the number of positions of each row that are not padding."""
        return {}

    @property
    def for_evaluation(self) -> Self:
        """The same task with model inputs of one sequence a row, as evaluation needs them."""
        return self

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The one of the metrics that tables and pictures show, a part of 1."""

    # The id of the environment of gymnasium in which a policy acts in the task's episodes, if there is one.
    environment: ClassVar[str | None] = None

    def environment_settings(self, split: str) -> dict:
        """Arguments of that environment with which `reset(seed=i)` starts row i of a split."""
        return {}

    def outcome(self, returns: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """The metrics of policies that have acted in that environment, by what each row has returned, (rows,)."""
        return {self.main_metric: float(returns.mean())}

    @abstractmethod
    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict:
        """
        Figures of merit of a model's predictions for `rows`, of which the input column may be missing; the labels
        themselves are predictions without a fault.
        """

    @abstractmethod
    def chance(self, rows: dict[str, np.ndarray]) -> float:
        """What the best guess gets by the main metric on these rows without following the state."""

    @property
    @abstractmethod
    def auto_class(self) -> str:
        """Name of the Auto class whose models learn the task."""

    @property
    @abstractmethod
    def model_fields(self) -> dict:
        """Fields of the model's configuration that follow from the task."""

    @property
    def loss_fields(self) -> tuple[str, ...]:
        """Those of them that matter to the loss only: a model that was trained with others can do the task too."""
        return ()

    @property
    def model_names(self) -> dict:
        """Names for the model's configuration, of what it reads and predicts, by which pipelines speak of them."""
        return {}

    @property
    @abstractmethod
    def input_column(self) -> str:
        """The column that the model reads."""

    @property
    def forward_options(self) -> dict:
        """Further arguments of the model, where predictions are wanted."""
        return {}

    @abstractmethod
    def predictions(self, output) -> torch.Tensor:
        """What a model's output predicts at each position, (rows, length, ...)."""

    @abstractmethod
    def features(self) -> "Features":
        """The columns of the dataset. Sequences have no fixed length: the splits of a task differ in it."""

    @property
    @abstractmethod
    def rows_in_file(self) -> int:
        """Rows in a file of the dataset, which is made in memory."""

    @abstractmethod
    def describe_row(self, row: dict[str, np.ndarray]) -> str:
        """A row, without padding, as lines of text."""

    @abstractmethod
    def draw_row(self, axes, row: dict[str, np.ndarray]) -> None:
        """A row, without padding, as a picture on `axes` of matplotlib."""

    @property
    @abstractmethod
    def texts(self) -> TaskTexts:
        """What cards and pictures say of all tasks of this class."""

    @property
    @abstractmethod
    def question(self) -> str:
        """What the main metric asks, the title of pictures of it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What a model of the task does, in a sentence."""

    @property
    @abstractmethod
    def short_description(self) -> str:
        """What the dataset is, in a few words."""

    @property
    @abstractmethod
    def hub(self) -> HubNames:
        """What the Hub calls its like, for the metadata of cards."""

    @abstractmethod
    def example(self, checkpoint: str, config) -> str:
        """
        Code that uses a model of the task, with a line of its own for the checkpoint.

        Args:
            checkpoint: Folder or repository.
            config: Configuration of the model.
        """

    @property
    @abstractmethod
    def example_note(self) -> str:
        """What else a reader of that code should know, in a sentence."""


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
