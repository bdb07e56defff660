"""
Linear maps by the faster of the two libraries that torch has for matrix products on processors.

It multiplies by MKL, which leaves half of each vector idle on processors that are not Intel's. AMD's compute with 512
bits at once from Zen 5 on: there oneDNN takes less than half of the time for the same products in float32.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from .fused_step import PLAIN_TYPES, bare_weight
from .letters import is_seen_by_others, is_unseen

# With fewer multiplications, the call from Python takes as long as is saved.
FEWEST_MULTIPLICATIONS = 2**22


def apply_linear(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear module makes of x, (..., inputs). A graph that is traced calls it, as does whoever watches it."""
    weight = None if is_seen_by_others() or not is_unseen(module, nn.Linear) else bare_weight(module)
    return module(x) if weight is None else multiply(x, weight)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (..., inputs) times the transpose of weight (outputs, inputs), where nobody watches the operators of torch."""
    return OneDNNProduct.apply(x, weight) if is_faster_by_onednn(x, weight) else F.linear(x, weight)


def is_faster_by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        all(type(part) in PLAIN_TYPES and part.dtype is torch.float32 and part.is_cpu for part in (x, weight))
        and x.dim() > 1
        and x.shape[:-1].numel() * weight.numel() >= FEWEST_MULTIPLICATIONS
        and leaves_vectors_idle()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")  # which would have another precision
    )


@lru_cache
def leaves_vectors_idle() -> bool:
    """Whether this processor computes with 512 bits at once, and MKL with half of that."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    found = torch.cpu.get_capabilities()
    # The last is what AMD's processors have from Zen 5 on. Zen 4 takes two cycles for 512 bits.
    is_wide = found.get("cpu_name", "").startswith("AMD") and found.get("avx512_vp2intersect", False)
    return is_wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


class OneDNNProduct(torch.autograd.Function):
    """x times the transpose of weight; its gradients are such products too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = OneDNNProduct.apply(grad, weight.mT) if ctx.needs_input_grad[0] else None
        return grad_x, product_over_rows(grad, x) if ctx.needs_input_grad[1] else None


def product_over_rows(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sum over all rows of grad (..., outputs) times x (..., inputs): (outputs, inputs)."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    # The first factor is copied, with its rows one after another: the narrower one, then.
    if grad.shape[1] <= x.shape[1]:
        return OneDNNProduct.apply(grad.mT, x.mT)
    return OneDNNProduct.apply(x.mT, grad.mT).mT
