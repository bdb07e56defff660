"""A causal convolution over the last few tokens, each channel by itself, for sequences in pieces, padded or packed."""

import torch

from ..scan.sequences import SequenceRows


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, rows: SequenceRows | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        x (batch, length, channels): Inputs.
        weight (channels, width): The last column weighs the token itself.
        before (sequences, width - 1, channels): The tokens before these, zero at the start of a sequence.
        rows: Where the tokens lie if some are padding or sequences are packed.

    Returns:
        The result, like x; and the last width - 1 tokens of each sequence, like `before`.
    """
    x = x if rows is None else rows.gather(x)
    length, width = x.shape[1], weight.shape[1]
    x = torch.cat([before, x], dim=1)
    # Sums of shifted products: unlike a call of conv1d they round alike whatever the padding.
    y = sum(x[:, shift : shift + length] * weight[:, shift] for shift in range(width))
    if rows is None:
        return y, x[:, length:]
    # The slots of a row's last tokens: its own length and `width - 1` tokens before it.
    last = rows.lengths[:, None] + torch.arange(width - 1, device=x.device)
    return rows.scatter(y), x.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
