"""How many cores a run may use, and how many threads are worth their while."""

import os

import torch
from transformers import TrainingArguments

# Tokens of a pass times parameters of the model that are worth another thread. Threads wait for each other at every
# operator, which costs some 3 ms a step on 2 free cores (36 ms with two, where one takes 66: results/busy.json). A step
# of this much work takes about 12 ms, so that a second thread saves a quarter of it; one of half the work takes 7, of
# which it saves nothing. Where other work has the cores, two threads were slower than one even at eight times this.
WORK_OF_A_THREAD = 80_000_000


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_asked_for() -> int | None:
    """The number of threads that someone has set by OMP_NUM_THREADS; torchrun sets it to 1 where nobody has."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # those of nested regions may follow
    by_torchrun = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return int(given) if given.isdecimal() and int(given) and not by_torchrun else None


def set_threads(args: TrainingArguments, work: int, share: int | None = None) -> None:
    """
    Sets the number of threads of this process: what OMP_NUM_THREADS says, or as many as are worth their while.

    Args:
        work: Of a pass: its tokens times the parameters of the model.
        share: Cores that it may use; by default its part of all, if several processes train one model here.
    """
    if share is None:
        share = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if args.device.type == "cpu":
        share = min(share, 1 + work // WORK_OF_A_THREAD)
    torch.set_num_threads(threads_asked_for() or share)
