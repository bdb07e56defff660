"""
What a run tells of itself to the process that has started it, if that listens: lines of JSON through a pipe, whose
number is in the environment.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from transformers import TrainerCallback

from ..datasets_scripts.task import Task
from .endings import StoppedError, in_few_words
from .trainer import StopOnSignal

PIPE = "MAMBA3_NPLR_PROGRESS_PIPE"
INTERVAL = 0.5  # seconds between two reports of a training


def is_watched() -> bool:
    return PIPE in os.environ


def tell(**fields) -> bool:
    """Tells whoever listens; returns whether anyone has listened in the past and does no more."""
    if not is_watched():
        return False
    try:
        os.write(int(os.environ[PIPE]), json.dumps(fields).encode() + b"\n")
    except BrokenPipeError:
        return True
    return False


@contextmanager
def tell_failure() -> Iterator[None]:
    """Tells in a few words what ends the block, unless that is a signal."""
    try:
        yield
    except StoppedError:
        raise
    except Exception as error:
        tell(failure=in_few_words(error))
        raise


class TellProgress(TrainerCallback):
    """
    Tells how far the training has come. A run that is no longer listened to stops, after a checkpoint: its parent has
    ended, and no signal has told so on systems that send none.
    """

    def __init__(self, task: Task, stop: StopOnSignal):
        self.task = task
        self.stop = stop

    def on_train_begin(self, args, state, control, **kwargs):
        self.left = TimeLeft([self.task.training_length(step) for step in range(state.max_steps)])
        self.told = self.before = time.monotonic()
        self.told_step = state.global_step
        tell(stage="training", updates=state.global_step, total=state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            tell(loss=logs["loss"])

    def on_step_end(self, args, state, control, **kwargs):
        now, step = time.monotonic(), state.global_step
        self.left.add(step - 1, now - self.before)
        self.before = now
        if now < self.told + INTERVAL and step < state.max_steps and not self.stop.stopped:
            return
        speed = (step - self.told_step) / max(now - self.told, 1e-9)
        self.told, self.told_step = now, step
        alone = tell(updates=step, speed=speed, seconds_left=self.left.seconds_after(step))
        if alone and not self.stop.stopped:
            self.stop.note(signal.SIGTERM, None)


class TimeLeft:
    """
    How long the updates to come will take, by a straight line through the times of those that were: a curriculum makes
    the sequences longer, and the time of an update grows with them.

    Args:
        lengths: Of the sequences of each update.
    """

    WARM_UP = 3  # updates that say nothing of the others

    def __init__(self, lengths: list[int]):
        self.lengths = np.asarray(lengths, float)
        self.sums = np.zeros(5)  # of 1, length, length^2, seconds, length * seconds
        self.seen = 0

    def add(self, step: int, seconds: float) -> None:
        self.seen += 1
        if self.seen > self.WARM_UP:
            x = self.lengths[step]
            self.sums += (1, x, x * x, seconds, x * seconds)

    def seconds_after(self, step: int) -> float | None:
        """Seconds from the end of this many updates; None while too few were seen."""
        count, x, xx, y, xy = self.sums
        if not count:
            return None
        spread = count * xx - x * x
        slope = max(0.0, (count * xy - x * y) / spread) if spread > 0 else 0.0
        rest = self.lengths[step:]
        return max(0.0, float(len(rest) * (y - slope * x) / count + slope * rest.sum()))
