"""
A policy in the environment of a task: it sees what its own actions have led to, on the same episodes on which
`evaluation.py` shows it what the demonstrator's have.
"""

from collections.abc import Iterable
from importlib.util import find_spec

import numpy as np
from tqdm.auto import tqdm

from ..datasets_scripts.task import Task
from .usage import UsageError

NO_GYMNASIUM = "--rollouts needs gymnasium: pip install 'mamba3_nplr[gym]'."


def check_rollouts(task: Task, name: str, splits: Iterable[str], rollouts: int) -> None:
    """Refuses what cannot be played, before any work."""
    if task.environment is None:
        raise UsageError(f"--rollouts cannot be used: {name} has no environment to act in.")
    if find_spec("gymnasium") is None:
        raise UsageError(NO_GYMNASIUM)
    for split in splits:
        if rollouts > task.splits[split]:
            raise UsageError(f"rollouts={rollouts} is not allowed: {split} has {task.splits[split]} episodes.")


def roll_out(
    policy, task: Task, splits: Iterable[str], rollouts: int, batch_size: int = 128, progress: bool = False
) -> dict[str, dict]:
    """
    The task's metrics after the first episodes of each split, as `evaluate` returns them.

    Args:
        policy: A model with `select_action` and `reset`. What it remembers of earlier episodes is lost.
        rollouts: Episodes of each split.
        batch_size: Environments that run side by side. It changes no result but for rounding.
        progress: Whether to show a bar.
    """
    splits, results, training = list(splits), {}, policy.training
    policy.eval()
    with tqdm(total=rollouts * len(splits), unit=" episodes", disable=not progress) as bar:
        for split in splits:
            bar.set_description(split)
            returns = [
                play(policy, task, split, start, min(batch_size, rollouts - start), bar)
                for start in range(0, rollouts, batch_size)
            ]
            rows = {name: x for name, x in task.rows(split, 0, rollouts).items() if name != task.input_column}
            results[split] = task.outcome(np.concatenate(returns), rows) | {"chance": task.chance(rows)}
    policy.reset()
    policy.train(training)
    return results


def play(policy, task: Task, split: str, first: int, count: int, bar: tqdm) -> np.ndarray:
    """What the episodes of some consecutive rows return, (count,)."""
    import gymnasium

    environments = gymnasium.make_vec(task.environment, num_envs=count, **task.environment_settings(split))
    observations, _ = environments.reset(seed=first)
    policy.reset()
    returns, running = np.zeros(count), np.ones(count, dtype=bool)
    while running.any():
        actions = policy.select_action(observations)
        observations, rewards, terminated, truncated, _ = environments.step(actions)
        returns += rewards * running
        ended = running & (terminated | truncated)
        running &= ~ended
        bar.update(int(ended.sum()))
    environments.close()
    return returns
