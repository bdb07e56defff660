"""
A term of the loss that makes a state last: after words with the same label and the same last token, each head of a
mixer must read the same.

The loss of the answers pulls no more once they are right at the lengths of training, and where it still does, it asks
for more than a state has to give. So what one token adds to the state may be wrong by a thousandth, which nobody sees
at length 64 and which is all there is at 8,192. It shows in each head by itself long before it shows in the answer, for
which the heads vote: there it is a part of the variance that label and token do not explain. At 0 a head reads nothing
but the state that the label names, for words of any length.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.losses import IGNORED

FIRST_WEIGHT = 1.0
# Of the whole variance of a head: below this, what it reads beyond the token counts for little.
TOKEN_ALONE = 0.01
SMALLEST = 1e-30


@dataclass(frozen=True)
class Schedule:
    """
    Beside the loss of the answers the term weighs nothing at first; it pulls with a force like theirs once short words
    are followed, and with all of it at the end: both need the same rate, and only one of them can reach 0.

    Args:
        weight: At the end.
        start, full: Parts of the run. At the first it begins with 1, and grows by factors up to the second.
    """

    weight: float
    start: float
    full: float

    def __post_init__(self):
        if not self.start < self.full:
            raise ValueError(
                f"consistency_start={self.start} is not allowed: it must be below consistency_full={self.full}."
            )

    def weight_at(self, part: float) -> float:
        if part < self.start:
            return 0.0
        grown = min(1.0, (part - self.start) / (self.full - self.start))
        return FIRST_WEIGHT * (self.weight / FIRST_WEIGHT) ** grown


class Consistency:
    """
    Args:
        model: A classifier of this package. What the heads of its last block read is noted while it is trained.
        schedule: How much the term weighs.
    """

    def __init__(self, model: PreTrainedModel, schedule: Schedule):
        self.schedule = schedule
        self.heads = model.config.num_heads
        self.read = None
        projection = getattr(model.base_model.layers[-1].mixer, model.readout_projection)
        projection.register_forward_pre_hook(self.note)

    def note(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            self.read = inputs[0]

    def add_to(self, loss: torch.Tensor, batch: dict[str, torch.Tensor], part: float, share: float) -> torch.Tensor:
        """
        The loss, whose value stays that of the answers, with the gradient of both.

        Args:
            batch: What the model has just read, with a label for each token.
            part: How far the run has come, from 0 to 1.
            share: Part of the update's batch that this is.
        """
        read, self.read = self.read, None
        weight = self.schedule.weight_at(part)
        if not weight:
            return loss
        term = unexplained_part(read, batch["input_ids"], batch["labels"], self.heads)
        both = (loss + weight * share * term) / (1 + weight)
        return loss.detach() + (both - both.detach())


def unexplained_part(read: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, heads: int) -> torch.Tensor:
    """
    How much of what a head reads, beyond the token, is not said by the label: the variance that is left where label and
    token are the same, over that where the token is the same. The mean over heads.

    Args:
        read (rows, length, heads * channels): What each head reads.
        tokens, labels (rows, length): A label of -100 does not count.
    """
    counted = (labels != IGNORED).flatten()
    labels, tokens = labels.flatten()[counted], tokens.flatten()[counted]
    read = read.flatten(0, 1)[counted].unflatten(-1, (heads, -1))  # (tokens, heads, channels)
    read = read.to(torch.promote_types(read.dtype, torch.float32))
    by_both = squares_around_means(read, labels * (tokens.max() + 1) + tokens)
    by_token = squares_around_means(read, tokens)
    overall = squares_around_means(read, torch.zeros_like(tokens))
    # A head may also read the token alone: then it needs no label, and the first two are nothing beside the third.
    return (by_both / (by_token + TOKEN_ALONE * overall + SMALLEST)).mean()


def squares_around_means(read: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """The variance of each head, (heads), around its mean over tokens of the same kind; without bias."""
    _, kind, number = kind.unique(return_inverse=True, return_counts=True)
    sums = read.new_zeros(len(number), *read.shape[1:]).index_add(0, kind, read)
    means = sums / number[:, None, None]
    return (read - means[kind]).square().sum((0, 2)) / (number - 1).sum().clamp(min=1)
