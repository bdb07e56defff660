"""
Tokens as letters. What the first block does with one token by itself, up to its scan, depends on nothing but which
letter it is: with few letters and many tokens it is computed once for each letter, and the scan reads it by an index.
Observations that repeat are letters too.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks

from ..scan.torch_transforms import is_transforming, is_watched
from .fused_step import PLAIN_TYPES, has_global_hooks, is_bare, parameter

# Below this many tokens for each letter the time that is saved is not worth a sum of gradients by letters.
TOKENS_FOR_EACH = 2


class Letters(NamedTuple):
    """Tokens (batch, length, hidden_size) that are rows of a table."""

    embeddings: torch.Tensor  # (letters, hidden_size)
    index: torch.Tensor  # (batch, length)


def find_letters(embedding: nn.Module, input_ids: torch.Tensor) -> Letters | None:
    """
    The letters of tokens, or None where they would save nothing, or somebody looks at each token: an embedding that
    does more than to look up rows, hooks, modes, transforms, and graphs, which would be bound to the number of tokens.
    """
    # First: what is traced must not depend on sizes.
    if is_seen_by_others() or not is_unseen(embedding, nn.Embedding) or not looks_up_rows(embedding):
        return None
    weight = parameter(embedding, "weight")
    if type(weight) not in PLAIN_TYPES or TOKENS_FOR_EACH * len(weight) > input_ids.numel():
        return None
    return Letters(weight, input_ids.long())


def find_equal_observations(linear: nn.Module, observations: torch.Tensor) -> Letters | None:
    """The same for observations (batch, length, size) that repeat, as the frames of episodes do, and their map."""
    if is_seen_by_others() or not observations.is_cpu or observations.requires_grad:
        return None
    if observations.shape[1] <= 1 or not observations.numel() or not is_unseen(linear, nn.Linear):
        return None
    weight, bias = parameter(linear, "weight"), linear._parameters.get("bias")
    if type(weight) not in PLAIN_TYPES or "bias" in linear.__dict__:
        return None
    distinct, index = distinct_rows(observations.flatten(0, 1))
    if TOKENS_FOR_EACH * len(distinct) > len(index):
        return None
    return Letters(F.linear(distinct, weight, bias), index.view(observations.shape[:2]))


def is_seen_by_others() -> bool:
    """Whether somebody looks at all operators or modules there are, in either direction."""
    if torch.compiler.is_compiling() or is_watched() or is_transforming() or has_global_hooks():
        return True
    return bool(module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks)


def is_unseen(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module is bare, and nobody would miss gradients that go past what comes out of it."""
    return is_bare(module, kind) and not (module._backward_hooks or module._backward_pre_hooks)


def looks_up_rows(embedding: nn.Embedding) -> bool:
    """Whether the gradient of a row is the sum of those of its tokens, and rows are taken as they are."""
    options = (embedding.padding_idx, embedding.max_norm)
    return options == (None, None) and not embedding.scale_grad_by_freq and not embedding.sparse


def take_tokens(x: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor | None:
    """Each token's row (batch, length, ...) of what was computed for letters; x as it is without an index."""
    return x if x is None or index is None else F.embedding(index, x)


def distinct_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows of (number, size), and which of them each row is."""
    # Rows that are equal have equal sums, which are much faster to sort; those that are not almost always have not.
    weights = torch.linspace(1.0, 2.0, rows.shape[1], dtype=torch.float64).exp()
    _, index = torch.unique(rows.double() @ weights, return_inverse=True)
    distinct = rows.new_empty(int(index.max()) + 1, rows.shape[1])
    distinct[index] = rows
    return (distinct, index) if torch.equal(distinct[index], rows) else torch.unique(rows, dim=0, return_inverse=True)
