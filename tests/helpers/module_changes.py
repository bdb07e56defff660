"""What others do to modules and tensors that compiled code stands for: each changes a result, or where it is found."""

from contextlib import contextmanager

import accelerate
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Marked(torch.Tensor):
    """Makes all that is computed from it of its own class."""


def double(output):
    """Twice the output of a module; a mixer returns a state beside it."""
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def hook(module):
    module.register_forward_hook(lambda module, args, output: double(output))


def hook_with_keywords(module):
    module.register_forward_hook(lambda module, args, named, output: double(output), with_kwargs=True)


def pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))


def pre_hook_with_keywords(module):
    module.register_forward_pre_hook(lambda module, args, named: ((args[0] + 1, *args[1:]), named), with_kwargs=True)


def other_forward(module):
    forward = module.forward
    module.forward = lambda *args, **named: double(forward(*args, **named))


def hook_of_accelerate(module):
    class Doubling(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return double(output)

    accelerate.hooks.add_hook_to_module(module, Doubling())


def subclass(module):
    kind = type(module)
    module.__class__ = type(
        "Other", (kind,), {"forward": lambda self, *args, **named: double(kind.forward(self, *args, **named))}
    )


CALLS = [hook, hook_with_keywords, pre_hook, pre_hook_with_keywords, other_forward, hook_of_accelerate, subclass]


def scattered(p):
    """The same numbers with gaps between them."""
    p.data = torch.stack([p.data, p.data + 1], dim=-1)[..., 0]


def negated_twice(p):
    """The same numbers, of which memory holds the negative."""
    p.data = torch._neg_view(-p.data)


def single(p):
    p.data = p.data.float()


def double_precision_of_single(p):
    p.data = p.data.float().double()


def view_of_many(p):
    """The same numbers in the middle of others, as some optimizers and averages keep them."""
    p.data = torch.cat([p.data.flatten() + 1, p.data.flatten()])[p.numel() :].view(p.shape)


def freed(p):
    p.untyped_storage().resize_(0)


def freed_view(p):
    view_of_many(p)
    freed(p)


def weight_norm(module):
    parametrizations.weight_norm(module)
    module.parametrizations.weight.original0.data *= 2


def old_weight_norm(module):
    nn.utils.weight_norm(module)
    module.weight_g.data *= 2


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def arrangements(x):
    """Ways to hand over a tensor that change no number, and whether they leave it a plain one."""
    return {
        "float32": (x.float(), True),
        "scattered": (torch.stack([x, x + 1], dim=-1)[..., 0], True),
        "backwards": (x.transpose(0, -1).contiguous().transpose(0, -1), True),
        "negated": (torch._neg_view(-x), False),
        "parameter": (nn.Parameter(x), True),
        "subclass": (x.as_subclass(Marked), False),
    }


@contextmanager
def seen_modules(register: str):
    """The modules that a hook on all of them sees, which `register` of torch puts on."""
    seen = []
    handle = getattr(nn.modules.module, register)(lambda module, *rest: seen.append(module))
    try:
        yield seen
    finally:
        handle.remove()
