"""Ways to hand over an argument that change nothing about it, and ways to spoil it."""

import random

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def harmless(x, draw: random.Random):
    """The same numbers in another place."""
    if not torch.is_tensor(x):
        return x
    kinds = [lambda: x, lambda: other_strides(x), lambda: far_into_memory(x)]
    if x.is_floating_point():
        kinds += [lambda: torch._neg_view(-x), lambda: nn.Parameter(x.detach().clone())]
        kinds += [lambda: x.detach().clone().requires_grad_()]
    return draw.choice(kinds)()


def other_strides(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=-1).select(-1, 1)


def far_into_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(7), x.flatten()])[7:].view(x.shape)


def spoil(x, draw: random.Random, direct: bool, alone: bool):
    """
    What no caller should hand over; now and then it is right by chance. `direct`: to an operator of ours at once.
    `alone`: beside right arguments only.
    """
    if alone and torch.is_tensor(x) and draw.random() < 0.03:
        return FakeTensorMode().from_tensor(x)  # beside a tensor too large to print torch loses its own way
    if direct and torch.is_tensor(x) and draw.random() < 0.1:
        return without_memory(x, draw)  # which operators of torch read all the same
    if not torch.is_tensor(x):
        return draw.choice([None, "text", -1, float("nan"), 1 << 62, torch.zeros(3), [1, 2], True])
    change = draw.choice([other_shape, other_shape, other_kind, other_kind, other_numbers, not_a_tensor])
    try:
        return change(x, draw)
    except (RuntimeError, IndexError):  # torch has no such tensor, as of an axis without entries
        return x


def other_shape(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    axis = draw.randrange(x.dim()) if x.dim() else 0
    changes = [
        lambda: x[None],
        lambda: x[..., None],
        lambda: x.flatten(),
        lambda: x.transpose(0, -1),
        lambda: x.new_zeros(draw.choice([(), (0,), (1,), (1, 1, 1, 1), (3, 0, 2)])),
        lambda: x[(None,) * 3].expand(1 << 20, 1 << 20, -1, *x.shape),
    ]
    if x.dim():
        changes += [
            lambda: x.narrow(axis, 0, draw.randrange(x.shape[axis] + 1)),
            lambda: torch.cat([x, x], dim=axis),
            lambda: x.select(axis, 0),
            lambda: x.narrow(axis, 0, 1).expand(x.shape),
            lambda: x.narrow(axis, 0, 1).expand(*x.shape[:axis], 1 << 40, *x.shape[axis + 1 :]),
        ]
    return draw.choice(changes)()


def other_kind(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    changes = [
        *(lambda dtype=dtype: x.to(dtype) for dtype in DTYPES),
        lambda: x.to("meta"),
        lambda: x.to_sparse(),
        lambda: x.float().to_mkldnn(),
        lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: torch.complex(x.double(), x.double()).conj().imag,
        lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    ]
    return draw.choice(changes)()


def without_memory(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    made = x.clone()
    made.untyped_storage().resize_(draw.choice([0, made.untyped_storage().nbytes() // 2]))
    return made


def other_numbers(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Of integers and booleans; others are as good as these."""
    if x.is_floating_point():
        return x
    wild = [-1, 0, 1, 2, 5, 1 << 31, 1 << 62, -(1 << 63)]
    x = x.long().clone()
    for _ in range(draw.randint(1, 3)):
        if x.numel():
            x.view(-1)[draw.randrange(x.numel())] = draw.choice(wild)
    return x


def not_a_tensor(x: torch.Tensor, draw: random.Random):
    return draw.choice([None, 3, "text", [], x.tolist(), np.zeros(x.shape), (x, x)])
