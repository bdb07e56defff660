"""
Losses as a sum over items divided by their number. Trainer passes that number as `num_items_in_batch`, counted over all
processes and accumulation steps, so that the gradient does not depend on how a batch is divided.
"""

import torch
import torch.nn.functional as F

IGNORED = -100


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str,
    valid: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Args:
        logits (..., num_labels): Predictions.
        labels: (...) class indices for `"single_label_classification"`; else (..., num_labels), or (...) if num_labels
            is 1. An entry of -100 is ignored.
        problem_type: As in the configuration of transformers.
        valid (...): Where it is false the prediction does not count.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if problem_type == "single_label_classification":
        labels = labels if valid is None else labels.masked_fill(~valid, IGNORED)
        total = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten().long(),
            ignore_index=IGNORED,
            label_smoothing=label_smoothing,
            reduction="sum",
        )
        return divide(total, labels != IGNORED, num_items_in_batch)
    labels = labels.to(logits.dtype).reshape(logits.shape)
    counted = labels != IGNORED
    if valid is not None:
        counted = counted & valid[..., None]
    # Masked before and not after: what is not a number there would reach the gradient.
    labels = labels.masked_fill(~counted, 0.0)
    if problem_type == "regression":
        each = F.mse_loss(logits, labels, reduction="none")
    else:
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return divide(each.masked_fill(~counted, 0.0).sum(), counted, num_items_in_batch)


def behavior_cloning_loss(
    actions: torch.Tensor,
    labels: torch.Tensor,
    cue: torch.Tensor | None = None,
    cue_weight: float = 1.0,
    valid: torch.Tensor | None = None,
    episode: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Squared error over all frames, `cue_weight` times heavier while a cue is on.

    Args:
        actions, labels (batch, time, action_size): Predicted and demonstrated actions; a label of -100 is ignored.
        cue (batch, time): Above one half while the cue is on; None if there is no cue, and all frames count equally.
        valid (batch, time): Where it is false the frame does not count.
        episode (batch, time): Number of the episode each frame belongs to. If given, each episode's loss is divided by
            its own number of frames, and the result is their mean.
    """
    labels = labels.to(actions.dtype)
    counted = labels != IGNORED
    if valid is not None:
        counted = counted & valid[..., None]
    # Masked before and not after: what is not a number there would reach the gradient.
    each = (actions - labels.masked_fill(~counted, 0.0)).square()
    if cue is not None:
        each = torch.where(cue > 0.5, cue_weight, 1.0).to(actions.dtype)[..., None] * each
    each = each.masked_fill(~counted, 0.0)
    if episode is None:
        return divide(each.sum(), counted, num_items_in_batch)
    episodes = int(episode.max()) + 1
    totals, counts = each.new_zeros(episodes), each.new_zeros(episodes)
    totals = totals.index_add(0, episode.flatten(), each.sum(-1).flatten())
    counts = counts.index_add(0, episode.flatten(), counted.sum(-1).flatten().to(each.dtype))
    return (totals / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def divide(total: torch.Tensor, counted: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    number = counted.sum() if num_items_in_batch is None else num_items_in_batch
    return total / (number.to(total.device).clamp(min=1) if torch.is_tensor(number) else max(number, 1))
