"""
A model on the evaluation sets of a task. The state is handed on from piece to piece of the sequences, so that the
memory of a pass does not grow with their length.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from ..datasets_scripts.task import Task


def evaluate(
    model: nn.Module,
    task: Task,
    splits: Iterable[str] | None = None,
    batch_size: int = 128,
    piece_length: int = 128,
    progress: bool = False,
) -> dict[str, dict]:
    """
    The task's metrics on each evaluation set: on `splits`, or on all but the validation set.

    Args:
        model: Of the head that learns the task, wrapped for several processes or not.
        batch_size, piece_length: Sequences and positions in a pass. They change no result but for rounding.
        progress: Whether to show a bar.
    """
    task = task.for_evaluation
    splits = list(task.test_sizes if splits is None else splits)
    for split in splits:
        task.check_split(split, 0, 0)
    results, training = {}, model.training
    model.eval()
    with tqdm(total=sum(task.splits[name] for name in splits), unit=" sequences", disable=not progress) as bar:
        for split in splits:
            bar.set_description(split)
            results[split] = evaluate_split(model, task, split, batch_size, piece_length, bar)
    model.train(training)
    return results


def evaluate_split(model: nn.Module, task: Task, split: str, batch_size: int, piece_length: int, bar: tqdm) -> dict:
    predictions, columns = [], []
    size = task.splits[split]
    for start in range(0, size, batch_size):
        rows = task.rows(split, start, min(start + batch_size, size))
        predictions.append(predict(model, task, task.model_inputs(rows), piece_length))
        # The largest column by far, which metrics do not need.
        columns.append({name: x for name, x in rows.items() if name != task.input_column})
        bar.update(len(predictions[-1]))
    rows = {name: join([part[name] for part in columns]) for name in columns[0]}
    return task.metrics(join(predictions), rows) | {"chance": task.chance(rows)}


@torch.no_grad()
def predict(model: nn.Module, task: Task, inputs: dict[str, torch.Tensor], piece_length: int) -> np.ndarray:
    """What the model predicts at every position of its inputs, (rows, length, ...)."""
    device = next(model.parameters()).device
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    length = inputs[task.input_column].shape[1]
    state, pieces = None, []
    for start in range(0, length, piece_length):
        piece = {name: x[:, start : start + piece_length].to(device) for name, x in inputs.items()}
        output = model(**piece, past_key_values=state, use_cache=True, **task.forward_options)
        state = output.past_key_values
        pieces.append(task.predictions(output).cpu().numpy())
    return np.concatenate(pieces, axis=1)


def join(arrays: list[np.ndarray]) -> np.ndarray:
    """Rows of several batches together, padded with 0 to the longest."""
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    length = max(x.shape[1] for x in arrays)
    padding = [[(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)] for x in arrays]
    return np.concatenate([np.pad(x, pad) for x, pad in zip(arrays, padding, strict=True)])


def scalars(metrics: dict) -> dict[str, float]:
    """The single figures among some metrics, for the log."""
    return {name: x for name, x in metrics.items() if isinstance(x, int | float) and name != "chance"}
