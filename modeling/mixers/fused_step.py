"""
Where one compiled call may stand for a mixer, and the frame of a block around it, at single tokens.

Compiled code reads the memory of tensors. It sees nothing of what torch does around a module or a tensor: hooks, modes,
transforms, weights that are elsewhere. So it is taken only where every condition of this file holds, and the ordinary
path, which leaves all of that to torch, elsewhere. Nothing is kept from one step to the next, as any of it may change
in between; to ask again takes less time than to find a module's submodules by their attributes.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from ..scan.torch_transforms import is_plain_torch

MAX_ROWS = 8  # with more, the matrix products of torch are faster
DTYPES = (torch.float32, torch.float64)
PLAIN_TYPES = (nn.Parameter, torch.Tensor)

# What compiled code stands for: these classes, with the forward that they have when they are loaded.
FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Embedding)}

Kind = TypeVar("Kind", bound=type[nn.Module])


def known_to_compiled_code(kind: Kind) -> Kind:
    """Decorates a class of modules that compiled code may stand for."""
    FORWARDS[kind] = kind.forward
    return kind


# Methods that call modules in an order that compiled code may stand for; what overrides them may do anything.
METHODS = set()

Method = TypeVar("Method", bound=Callable)


def known_method(method: Method) -> Method:
    """Decorates such a method."""
    METHODS.add(method)
    return method


def may_step(hidden_states: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether these are single tokens of a few rows, and nothing but their numbers is asked for."""
    # First: a graph that is being traced would be bound to the sizes that are asked for below.
    if not is_plain_torch() or mask is not None or cu_seqlens is not None or hidden_states.dim() != 3:
        return False
    rows, length, _ = hidden_states.shape
    return length == 1 and rows <= MAX_ROWS


def has_global_hooks() -> bool:
    """Whether somebody looks at all modules there are."""
    return bool(module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)


def is_known(kind: type[nn.Module]) -> bool:
    """Whether compiled code may stand for modules of this class, and it is as it was loaded."""
    return kind.forward is FORWARDS.get(kind)


def is_bare(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """
    Whether to call the module is to run the forward of `kind` and nothing else. A subclass may do anything (among them
    are modules with parametrizations and most quantised ones). Hooks change inputs and outputs, or fetch the weights,
    as a `forward` put in place of the module's own does: that is how accelerate offloads.
    """
    if type(module) is not kind or not is_known(kind):
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def submodule(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule of this name; None if it is none, or something else stands before it."""
    return None if name in module.__dict__ else module._modules.get(name)


def parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """
    The parameter of this name; None if it is none: `torch.nn.utils.weight_norm` and its like put in its place what they
    make of others.
    """
    return None if name in module.__dict__ else module._parameters.get(name)


def bare_weight(module: nn.Module | None) -> torch.Tensor | None:
    """The weight of a linear map that is bare and has no bias, which compiled code would leave out."""
    if not is_bare(module, nn.Linear) or "bias" in module.__dict__ or module._parameters.get("bias") is not None:
        return None
    return parameter(module, "weight")


def are_bare_norms(norms: Iterable[tuple[nn.Module | None, int]], kind: type[nn.Module], epsilon: float) -> bool:
    """
    Whether norms, given with the size of their groups, are those that compiled code computes: it knows one eps, and
    groups that are vectors of the state or the channels of a head. Both may have been changed since.
    """
    return not has_global_hooks() and all(
        is_bare(norm, kind) and norm.group_size == group_size and norm.eps == epsilon for norm, group_size in norms
    )


def has_plain_parameters(norm: nn.Module) -> bool:
    """
    Whether a bare norm of torch has a weight of the shape that it normalises and a number for its eps. Without a weight
    it may still divide, and without an eps it takes one that depends on the dtype.
    """
    weight = parameter(norm, "weight")
    if weight is None or "bias" in norm.__dict__ or type(norm.eps) is not float:
        return False
    return weight.shape == norm.normalized_shape


def is_plain(x: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """
    Whether x is a tensor and no more than that (subclasses compute otherwise, or hold no numbers of their own), whose
    numbers lie in the memory of this process, one after another and as they are.
    """
    return (
        type(x) in PLAIN_TYPES
        and x.dtype is dtype
        and x.layout is torch.strided
        and x.is_cpu  # and so not meta, as offloaded weights are
        and x.shape == shape
        and x.is_contiguous()
        and not x.is_neg()  # as imaginary parts of conjugates are: memory holds the number with the other sign
        # Sharded weights are freed by taking their storage away.
        and x.untyped_storage().nbytes() >= x.nbytes
    )
