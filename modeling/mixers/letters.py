"""
Tokens as letters. What the first block does with one token by itself, up to its scan, depends on nothing but which
letter it is: with few letters and many tokens it is computed once for each letter, and the scan reads it by an index.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

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
    if torch.compiler.is_compiling() or is_watched() or is_transforming() or has_global_hooks():
        return None
    if not is_bare(embedding, nn.Embedding) or not looks_up_rows(embedding):
        return None
    weight = parameter(embedding, "weight")
    if type(weight) not in PLAIN_TYPES or TOKENS_FOR_EACH * len(weight) > input_ids.numel():
        return None
    return Letters(weight, input_ids.long())


def looks_up_rows(embedding: nn.Embedding) -> bool:
    """Whether the gradient of a row is the sum of those of its tokens, and rows are taken as they are."""
    options = (embedding.padding_idx, embedding.max_norm)
    return options == (None, None) and not embedding.scale_grad_by_freq and not embedding.sparse


def take_tokens(x: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor | None:
    """Each token's row (batch, length, ...) of what was computed for letters; x as it is without an index."""
    return x if x is None or index is None else F.embedding(index, x)
