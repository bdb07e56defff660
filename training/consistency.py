"""
A term of the loss that makes a state last: after words with the same label and the same last token, and in frames of
episodes that look the same and have to know the same, each head of a mixer must read the same.

The loss of the answers pulls no more once they are right at the lengths of training, and where it still does, it asks
for more than a state has to give. So what one token adds to the state may be wrong by a thousandth, which nobody sees
at length 64 and which is all there is at 8,192. It shows in each head by itself long before it shows in the answer, for
which the heads vote: there it is a part of the variance that label and token do not explain. At 0 a head reads nothing
but the state that the label names, for words of any length.

Some heads never come near it: what they read helps with short words and is noise in long ones. Before the term pulls,
the parts of most heads lie near 0 or near 1; those near 1 are dropped, that is, read no more, and later those that have
not come down with the others. Of those that are left some are far more exact than others, and what a head has wrong
grows with the word. So what a head reads is disturbed as much as it would be wrong in a word far longer than those of
training: the answers then rest upon the heads that will still be right.
"""

import math
from dataclasses import dataclass

import torch
from accelerate import DistributedType
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ..datasets_scripts.task import IGNORED, STATE_COLUMNS
from .usage import UsageError

FIRST_WEIGHT = 1.0
# Of the whole variance of a head: what it reads beyond the input is rounding below this. With a hundredth, heads could
# evade the term by reading little but the input.
INPUT_ALONE = 1e-6
LATER = 0.2  # of the limit by which heads are dropped at first
LEAST = 4  # of so many heads one stays at least
MOST_NOISE = 0.1  # of the variance of a head; more hides the answers
SMALLEST = 1e-30


@dataclass(frozen=True)
class Schedule:
    """
    Beside the loss of the answers the term weighs nothing at first; it pulls with a force like theirs once short words
    are followed, and with all of it at the end: both need the same rate, and only one of them can reach 0.

    Args:
        weight: At the end.
        start, full: Parts of the run. At the first it begins with 1, and grows by factors up to the second.
        limit: Heads of which more is unexplained when it begins are dropped, and those of which more than a fifth of
            that is when it has grown; a quarter of them stays each time.
        noise: At the end, the variance of the noise that the answers have to do with, over what is unexplained; but
            never more than a tenth of a head's. It grows with the weight.
    """

    weight: float
    start: float
    full: float
    limit: float = math.inf
    noise: float = 0.0

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

    def noise_at(self, part: float) -> float:
        return self.noise * self.weight_at(part) / self.weight

    def limit_after(self, step: int, steps: int) -> float:
        """By which heads are dropped after update `step` of a run, from 0; infinite after most of them."""
        before, now = (step - 1) / steps, step / steps
        if before < self.start <= now:
            return self.limit
        return LATER * self.limit if before < self.full <= now else math.inf


class Consistency:
    """
    Args:
        model: One of this package. What the heads of its last block read is noted while it is trained.
        schedule: How much the term weighs.
    """

    def __init__(self, model: PreTrainedModel, schedule: Schedule):
        self.schedule = schedule
        self.heads = model.config.num_heads
        self.states, self.part = None, 0.0
        self.unexplained = None  # of each head, of what the model has just read; infinite of dropped ones
        self.parts = []  # the same, of the batches since the last update
        self.projection = getattr(model.base_model.layers[-1].mixer, model.readout_projection)
        self.projection.register_forward_pre_hook(self.note)

    def begin(self, batch: dict[str, torch.Tensor], part: float) -> dict[str, torch.Tensor]:
        """
        To be called before the model reads a batch; returns what the model is to read.

        Args:
            batch: Inputs of the model, and beside them the columns of `Task.states`.
            part: How far the run has come, from 0 to 1.
        """
        self.states, self.part = (batch["kinds"], batch["states"]), part
        return without_states(batch)

    def note(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        if not module.training or self.states is None or not self.schedule.weight_at(self.part):
            return None
        (kinds, states), self.states = self.states, None
        kept, read = self.kept_heads(), by_head(inputs[0], self.heads)
        chosen = read if kept.all() else read[..., kept, :]
        parts = unexplained_parts(chosen.flatten(-2), kinds, states, chosen.shape[-2])
        self.unexplained = parts.new_full((self.heads,), math.inf).masked_scatter(kept, parts)
        noise = self.schedule.noise_at(self.part)
        if noise:
            chosen = chosen + noise_like(chosen, (noise * parts).clamp(max=MOST_NOISE))
        if chosen is read:
            return None
        # Dropped heads read as 0: else their weights, which are 0, would get gradients.
        return (torch.zeros_like(read).index_copy(-2, kept.nonzero().flatten(), chosen).flatten(-2),)

    def kept_heads(self) -> torch.Tensor:
        """Which heads are read, (heads): the weights of the others are 0, in a run that was resumed as well."""
        if self.schedule.limit == math.inf:
            return torch.ones(self.heads, dtype=torch.bool, device=self.projection.weight.device)
        return by_head(self.projection.weight, self.heads).ne(0).any(-1).any(0)

    def add_to(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """
        The loss, whose value stays that of the answers, with the gradient of both.

        Args:
            loss: Of the batch that the model has just read.
            share: Part of the update's batch that this is.
        """
        parts, self.unexplained = self.unexplained, None
        if parts is None:
            return loss
        self.parts.append(parts.detach())
        weight, term = self.schedule.weight_at(self.part), parts[self.kept_heads()].mean()
        both = (loss + weight * share * term) / (1 + weight)
        return loss.detach() + (both - both.detach())

    @torch.no_grad()
    def drop_heads(self, parts: torch.Tensor, limit: float, optimizer: torch.optim.Optimizer) -> None:
        """
        Drops heads of which more is unexplained than the limit, but for the best quarter: their weights are set to 0,
        and what the optimizer remembers of these, so that they stay there.

        Args:
            parts (heads): How much is unexplained.
        """
        best = parts[self.kept_heads()].sort().values
        dropped = parts > best[(len(best) - 1) // LEAST].clamp(min=limit)
        weight = self.projection.weight
        remembered = [x for x in optimizer.state[weight].values() if getattr(x, "shape", None) == weight.shape]
        for x in (weight, *remembered):
            by_head(x, self.heads)[:, dropped] = 0.0


class DropHeads(TrainerCallback):
    """Drops heads after the first update with the term and the first with all of it, by what all processes saw."""

    def __init__(self, consistency: Consistency, accelerator):
        if accelerator.distributed_type == DistributedType.FSDP and consistency.schedule.limit < math.inf:
            raise UsageError("consistency_limit is not allowed with FSDP, where no process has all weights of a head.")
        self.consistency = consistency
        self.accelerator = accelerator

    def on_optimizer_step(self, args, state, control, optimizer, **kwargs):
        parts, self.consistency.parts = self.consistency.parts, []
        limit = self.consistency.schedule.limit_after(state.global_step, args.max_steps)
        if limit < math.inf:
            parts = self.accelerator.reduce(torch.stack(parts).mean(0), "mean")
            self.consistency.drop_heads(parts, limit, optimizer)


def without_states(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in batch.items() if name not in STATE_COLUMNS}


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., heads * channels) as (..., heads, channels)."""
    return x.unflatten(-1, (heads, -1))


@torch.no_grad()
def noise_like(read: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Noise for what heads read, (rows, length, heads, channels), whose variance is these parts (heads) of theirs."""
    deviation = read.detach().flatten(0, 1).var(0, correction=0).mean(-1).mul(parts).sqrt()
    return torch.randn_like(read) * deviation[:, None].to(read.dtype)


def unexplained_parts(read: torch.Tensor, kinds: torch.Tensor, states: torch.Tensor, heads: int) -> torch.Tensor:
    """
    How much of what each head reads, beyond the input, is not said by the state, (heads): the variance that is left
    where state and kind of input are the same, over that where the kind is the same.

    Args:
        read (rows, length, heads * channels): What each head reads.
        kinds, states (rows, length): Columns of `Task.states`.
    """
    counted = (states != IGNORED).flatten()
    states, kinds = states.flatten()[counted], kinds.flatten()[counted]
    read = by_head(read.flatten(0, 1)[counted], heads)  # (tokens, heads, channels)
    read = read.to(torch.promote_types(read.dtype, torch.float32))
    deviations, kind = around_means(read, kinds)
    overall = variances(*around_means(read, torch.zeros_like(kinds)))
    # Each kind of input counts by itself: else a head could close its gate to those on which it is wrong. Of a head
    # that reads the input alone the variances of kinds are rounding.
    scale = torch.rsqrt(variances(deviations, kind) + INPUT_ALONE * overall + SMALLEST)
    left, both = around_means(deviations * scale[kind][..., None], states * (kinds.max() + 1) + kinds)
    return left.square().sum((0, 2)) / max(1, len(both) - len(both.unique()))


def around_means(read: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read less its mean over tokens of the same group, and the number of each token's group, without gaps."""
    _, group, number = group.unique(return_inverse=True, return_counts=True)
    sums = read.new_zeros(len(number), *read.shape[1:]).index_add(0, group, read)
    return read - (sums / number[:, None, None])[group], group


def variances(deviations: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Of each head in each group, (groups, heads), without bias and summed over its channels."""
    number = group.bincount()
    total = deviations.new_zeros(len(number), deviations.shape[1]).index_add(0, group, deviations.square().sum(-1))
    return total / (number - 1).clamp(min=1)[:, None]
