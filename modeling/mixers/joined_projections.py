"""Several linear maps of one input as one matrix product, where that is all they are."""

import torch
from torch import nn

from .fused_step import PLAIN_TYPES, bare_weight, submodule
from .letters import is_seen_by_others, is_unseen
from .linear_maps import multiply

# With fewer tokens it takes longer to join the matrices than to multiply by each.
FEWEST_TOKENS = 256


def project(module: nn.Module, names: list[str], x: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """
    What the submodules of these names make of x, (..., size), along the last axis. Zeros may follow, up to a
    `multiple` of some width: products of such matrices are faster.
    """
    joined = project_joined(module, names, x, multiple)
    return torch.cat([getattr(module, name)(x) for name in names], dim=-1) if joined is None else joined


def project_joined(module: nn.Module, names: list[str], x: torch.Tensor, multiple: int = 1) -> torch.Tensor | None:
    """
    The same by one matrix product; None where that would not be faster, or a submodule may do anything but multiply by
    its weight. A graph that is traced calls the modules.
    """
    # First: what is traced must not depend on sizes.
    if is_seen_by_others() or x.shape[:-1].numel() < FEWEST_TOKENS:
        return None
    modules = [submodule(module, name) for name in names]
    weights = [bare_weight(module) if is_unseen(module, nn.Linear) else None for module in modules]
    if any(type(weight) not in PLAIN_TYPES for weight in weights):
        return None
    first = weights[0]
    if any(weight.dtype != first.dtype or weight.device != first.device for weight in weights):
        return None
    rest = -sum(len(weight) for weight in weights) % multiple
    return multiply(x, torch.cat([*weights, first.new_zeros(rest, first.shape[1])] if rest else weights))
