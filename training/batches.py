"""A task's training batches as a dataset: the batch of every step made when it is needed, and never stored."""

import torch
from torch.utils.data import DataLoader, Dataset

from ..datasets_scripts.task import Task


class FreshBatches(Dataset):
    """
    Item `i` is a process's share of a training batch, as arguments of the model. A share may itself be divided into
    `accumulation` parts, which are then items of their own. Shares and parts of a step together are the same batch,
    however it is divided, so that nothing depends on the number of processes.

    Args:
        steps: Updates of the run.
        rank, world_size: Which process this is, of how many.
        with_states: Whether items hold the columns of `Task.states` as well.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        steps: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        with_states: bool = False,
    ):
        self.task = task
        self.seed = seed
        self.steps = steps
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size
        self.with_states = with_states

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, part = divmod(index, self.accumulation)
        share = self.rank * self.accumulation + part
        return self.task.batch(self.seed, step, share, self.world_size * self.accumulation, self.with_states)

    def describe(self, step: int) -> str:
        """Names the batch of a step, for messages."""
        return f"seed={self.seed}, step={step}, rank={self.rank}, world_size={self.world_size}"

    def loader(self, num_workers: int = 0, **options) -> DataLoader:
        """One item at a time, in order: Trainer skips those of a resumed run by their numbers, without making them."""
        if num_workers == 0:
            options = {name: x for name, x in options.items() if name not in ("prefetch_factor", "persistent_workers")}
        return DataLoader(
            self, batch_size=1, collate_fn=only_item, num_workers=num_workers, worker_init_fn=one_thread, **options
        )


def only_item(items: list) -> dict[str, torch.Tensor]:
    [item] = items
    return item


def one_thread(_: int) -> None:
    # Workers beside a training process must not fight it for cores.
    torch.set_num_threads(1)
