"""Columns of the published datasets between numpy, Arrow and torch, without a Python object for each number."""

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from .task import Task


def to_table(task: Task, rows: dict[str, np.ndarray]) -> pa.Table:
    """Rows as a task makes them, as an Arrow table with its features and without padding."""
    features, lengths = task.features(), task.lengths(rows)
    arrays = [to_arrow(rows[name], lengths.get(name)) for name in features]
    return pa.table(arrays, names=list(features)).cast(features.arrow_schema)


def to_arrow(array: np.ndarray, lengths: np.ndarray | None) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    if lengths is None:
        lengths = np.full(len(array), array.shape[1])
    inside = np.arange(array.shape[1]) < lengths[:, None]
    values = array[inside]  # (items, ...) of all rows
    items = pa.array(values.reshape(-1))
    if array.ndim == 3:
        items = pa.FixedSizeListArray.from_arrays(items, array.shape[2])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), items)


def read_columns(dataset: Dataset) -> dict[str, torch.Tensor]:
    """
    The columns of a dataset as tensors, at the speed of memory. A column of sequences becomes (rows, length, ...) if
    all are of one length; else its items are packed, (1, items, ...), and `cu_seqlens` holds their bounds.
    """
    table = dataset.with_format("arrow")[:]
    columns, bounds = {}, None
    for name in table.column_names:
        columns[name], offsets = from_arrow(table.column(name).combine_chunks())
        bounds = offsets if offsets is not None else bounds
    return columns if bounds is None else columns | {"cu_seqlens": bounds}


def from_arrow(array: pa.Array) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The items of a column, and the bounds of its sequences if they are of different lengths."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not pa.types.is_list(array.type):
        return to_tensor(array), None
    offsets = array.offsets.to_numpy()
    items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if pa.types.is_fixed_size_list(items.type):
        width = items.type.list_size
        values = to_tensor(items.flatten()).reshape(-1, width)
    else:
        values = to_tensor(items)
    lengths = np.diff(offsets)
    if len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), lengths[0], *values.shape[1:]), None
    return values[None], torch.from_numpy((offsets - offsets[0]).astype(np.int64))


def to_tensor(array: pa.Array) -> torch.Tensor:
    # Arrow memory is read-only, which torch tensors cannot be: one copy.
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
