"""Rows of a user's own data as batches."""

import torch
from torch.nn.utils.rnn import pad_sequence

INPUTS = ("input_ids", "observations", "inputs_embeds")
ARGUMENTS = (*INPUTS, "attention_mask", "position_ids", "labels")


def pad_sequences(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    A data collator for Trainer: rows of any lengths as one batch of arguments of the models.

    Args:
        rows: Each with `input_ids` (length,), `observations` (length, observation_size) or `inputs_embeds` (length,
            hidden_size), and perhaps `labels`, for the whole sequence or for every position; lists, arrays or tensors.
            What a dataset has beside the arguments of the models is left out.

    Where lengths differ, the ends are padded: `attention_mask` is then 0 there and labels are -100, which do not count.
    """
    check_rows(rows)
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0] if name in ARGUMENTS}
    batch = {name: pad_column(name, values) for name, values in columns.items()}
    mask = padding_mask(columns[next(name for name in INPUTS if name in columns)])
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
                "and may have labels. Trainer itself leaves out keys that are no arguments of the model."
            )
        if row.keys() != rows[0].keys():
            raise ValueError(f"Row {number} has the keys {', '.join(row)}; row 0 has {', '.join(rows[0])}.")


def padding_mask(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """The attention mask of rows (length, ...) that are padded at their ends; None if they are all of one length."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    if (lengths == lengths[0]).all():
        return None
    return (torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]).long()


def pad_column(name: str, values: list[torch.Tensor]) -> torch.Tensor:
    if values[0].is_floating_point():
        values = [x.to(torch.get_default_dtype()) for x in values]
    if values[0].dim() == 0:
        return torch.stack(values)
    return pad_sequence(values, batch_first=True, padding_value=-100 if name == "labels" else 0)
