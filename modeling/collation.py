"""Rows of a user's own data as batches."""

import torch
from torch.nn.utils.rnn import pad_sequence

from .model_inputs import as_numbers

CONTINUOUS = ("observations", "inputs_embeds")
INPUTS = ("input_ids", *CONTINUOUS)
ARGUMENTS = (*INPUTS, "attention_mask", "position_ids", "labels")


def pad_sequences(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    A data collator for Trainer: rows of any lengths as one batch of arguments of the models.

    Args:
        rows: Each with `input_ids` (length,), `observations` (length, observation_size) or `inputs_embeds` (length,
            hidden_size), and perhaps `labels`, for the whole sequence or for every position; lists, arrays or tensors.
            Columns that are not arguments of the models are dropped.

    Where lengths differ, the ends are padded: `attention_mask` is then 0 there and labels are -100, which do not count.
    Observations and embeddings, and what has a fraction in any row, come in torch's default floating dtype; other
    numbers in int64.
    """
    check_rows(rows)
    columns = {name: read_column(name, rows) for name in rows[0] if name in ARGUMENTS}
    inputs = next(name for name in INPUTS if name in columns)
    for name in ("attention_mask", "position_ids"):
        if name in columns:
            check_lengths(name, columns[name], inputs, columns[inputs])
    batch = {name: pad_column(name, values) for name, values in columns.items()}
    mask = padding_mask(columns[inputs])
    if "attention_mask" not in batch and mask is not None:
        batch["attention_mask"] = mask
    return batch


def check_rows(rows: list[dict]) -> None:
    if len(rows) == 0:
        raise ValueError("rows is empty: a batch needs at least one row.")
    for number, row in enumerate(rows):
        if not any(name in row for name in INPUTS):
            raise ValueError(
                f"Row {number} has the keys {', '.join(map(str, row)) or 'none'}; it needs one of {', '.join(INPUTS)}, "
                "and may have labels. Trainer itself drops keys that are not arguments of the model."
            )
        if row.keys() != rows[0].keys():
            raise ValueError(f"Row {number} has the keys {', '.join(row)}; row 0 has {', '.join(rows[0])}.")


def read_column(name: str, rows: list[dict]) -> list[torch.Tensor]:
    """One argument of all rows, as tensors that differ in their first axis at most."""
    values = [as_numbers(f"Row {number}: {name}", row[name]) for number, row in enumerate(rows)]
    for number, value in enumerate(values):
        if value.dim() != values[0].dim() or value.shape[1:] != values[0].shape[1:]:
            raise ValueError(
                f"Row {number} has {name} of shape {tuple(value.shape)}; row 0 has {tuple(values[0].shape)}, and only "
                "the first axis, the length, may differ."
            )
    return values


def check_lengths(name: str, values: list[torch.Tensor], inputs: str, given: list[torch.Tensor]) -> None:
    for number, (value, row) in enumerate(zip(values, given, strict=True)):
        if value.shape != row.shape[:1]:
            raise ValueError(
                f"Row {number} has {name} of shape {tuple(value.shape)}; with {inputs} of length {len(row)} it must "
                f"be {tuple(row.shape[:1])}."
            )


def padding_mask(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """The attention mask of rows (length, ...) that are padded at their ends; None if they are all of one length."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    if (lengths == lengths[0]).all():
        return None
    return (torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]).long()


def pad_column(name: str, values: list[torch.Tensor]) -> torch.Tensor:
    dtype = column_dtype(name, values)
    values = [x.to(dtype) for x in values]
    if values[0].dim() == 0:
        return torch.stack(values)
    return pad_sequence(values, batch_first=True, padding_value=-100 if name == "labels" else 0)


def column_dtype(name: str, values: list[torch.Tensor]) -> torch.dtype:
    # An empty list reads as floating point, whatever its column holds.
    dtypes = {x.dtype for x in values if x.numel()}
    if name in CONTINUOUS or any(dtype.is_floating_point for dtype in dtypes):
        return torch.get_default_dtype()
    # Neither booleans nor unsigned numbers could hold the -100 of labels.
    return torch.bool if dtypes == {torch.bool} and name != "labels" else torch.int64
