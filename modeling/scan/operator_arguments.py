"""
What compiled operators accept. They are given addresses and sizes, and can tell nothing about the memory there, so that
every tensor is checked here before: one check for all operators, driven by a table of their arguments.
"""

from typing import NamedTuple

import torch

from .torch_transforms import refuse_forward_mode


class Argument(NamedTuple):
    """
    The shape of a tensor by the names of its sizes, such as `"batch length heads*state"`, and its dtype: that of what
    the projections make and take ("element"), of the arithmetic ("inside"), or the name of one in torch. Where it is
    not optional None is refused, which torch itself takes for any tensor.
    """

    shape: str
    dtype: str = "inside"
    optional: bool = False


SCAN_TOKENS = {
    "u": Argument("batch length heads channels", "element"),
    "B": Argument("batch length heads state", "element"),
    "C": Argument("batch length heads state", "element"),
    "log_decay": Argument("batch length heads"),
    "write": Argument("batch length heads"),
    "carry": Argument("batch length heads", optional=True),
    "k": Argument("batch length heads state", "element", optional=True),
    "reflection": Argument("batch length heads", optional=True),
    "D": Argument("heads", optional=True),
}
SCAN_STATES = {
    "h0": Argument("rows heads state channels"),
    "B0": Argument("rows heads state"),
    "u0": Argument("rows heads channels"),
}
SEQUENCES = {
    "bounds": Argument("rows 2", "int64", optional=True),
    "order": Argument("batch*length", "int64", optional=True),
}
SCAN_GIVEN = SCAN_TOKENS | SCAN_STATES | SEQUENCES
SCAN_GRADIENTS = {
    "grad_y": Argument("batch length heads channels", "element"),
    "grad_h": Argument("rows heads state channels"),
}


class OperatorArguments:
    """
    Checks the tensors of an operator against one table after another. A name stands for the same size wherever it
    occurs; the first tensor that has it says how large it is, and the first tensor of all which dtype is the "element",
    one of `elements`, and on which device all must be.
    """

    def __init__(self, operator: str, elements: tuple[torch.dtype, ...]):
        refuse_forward_mode(operator)
        self.operator = operator
        self.elements = elements
        self.sizes: dict[str, int] = {}
        self.dtypes = {"int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
        self.device: torch.device | None = None

    def check(self, table: dict[str, Argument], tensors: dict[str, torch.Tensor | None]) -> None:
        for name, argument in table.items():
            x = tensors[name]
            if x is None and argument.optional:
                continue
            if x is None:
                self.refuse(name, "is None", "a tensor")
            self.check_dtype(name, x, argument.dtype)
            self.check_memory(name, x)
            check_shape(name, x, argument.shape, self.sizes)

    def check_dtype(self, name: str, x: torch.Tensor, kind: str) -> None:
        if kind == "element" and kind not in self.dtypes:
            if x.dtype not in self.elements:
                self.refuse(name, f"has dtype {x.dtype}", f"one of {self.elements}")
            self.dtypes["element"] = x.dtype
            self.dtypes["inside"] = torch.promote_types(x.dtype, torch.float32)
        if x.dtype != self.dtypes[kind]:
            self.refuse(name, f"has dtype {x.dtype}", f"{self.dtypes[kind]}")

    def check_memory(self, name: str, x: torch.Tensor) -> None:
        self.device = x.device if self.device is None else self.device
        if x.device != self.device:
            self.refuse(name, f"is on {x.device}", f"on {self.device}, as the others")
        if x.layout != torch.strided:
            self.refuse(name, f"has layout {x.layout}", "torch.strided")
        if x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            needed = (x.storage_offset() + last + 1) * x.element_size()
            there = x.untyped_storage().nbytes()
            if needed > there:
                self.refuse(name, f"has {there} bytes of memory", f"of {needed} or more, as its shape says")

    def check_together(self, tensors: dict[str, torch.Tensor | None], *names: str) -> None:
        """These are given all or none."""
        left_out = [name for name in names if tensors[name] is None]
        if left_out and len(left_out) < len(names):
            raise ValueError(f"{' and '.join(names)} belong together; {self.operator} was given no {left_out[0]}.")

    def check_sequences(self, tensors: dict[str, torch.Tensor | None]) -> None:
        """Where the sequences lie: each row is one, or those of `bounds`, one after another, in `order`."""
        bounds, order = tensors["bounds"], tensors["order"]
        if bounds is None:
            if order is not None:
                self.refuse("order", "was given without bounds", "omitted, too")
            self.sizes["rows"] = self.sizes["batch"]
        self.check(SEQUENCES, tensors)
        if bounds is None or self.device.type != "cpu":  # to look at values would stall an accelerator
            return
        tokens = self.sizes["batch"] * self.sizes["length"]
        steps = torch.cat([bounds.new_zeros(1), bounds.flatten(), bounds.new_full((1,), tokens)]).diff()
        if (steps < 0).any():
            self.refuse("bounds", f"is {bounds.tolist()}", f"rising from 0 or more to {tokens} or less")
        if order is None and steps[::2].any():  # no token is padding
            self.refuse("bounds", f"is {bounds.tolist()}", f"without gaps from 0 to {tokens}")
        if order is not None and tokens:
            self.check_order(order, tokens)

    def check_index(self, name: str, index: torch.Tensor, count: int) -> None:
        """Its numbers are those of `count` places."""
        if not index.numel() or self.device.type != "cpu":  # to look at values would stall an accelerator
            return
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= count:
            self.refuse(name, f"holds {low if low < 0 else high}", f"of numbers 0 to {count - 1}")

    def check_order(self, order: torch.Tensor, tokens: int) -> None:
        self.check_index("order", order, tokens)
        if order.bincount().max() > 1:
            self.refuse("order", "holds a number twice", f"of each number from 0 to {tokens - 1} once")

    def refuse(self, name: str, found: str, allowed: str) -> None:
        raise ValueError(f"{name} {found}; for {self.operator} it must be {allowed}.")


def check_devices(*tensors: torch.Tensor | None) -> None:
    """For shapes alone: a single tensor of the meta device is enough for torch to ask for no more than them."""
    devices = {str(x.device) for x in tensors if isinstance(x, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"The tensors are on {', '.join(sorted(devices))}; they must be on one device.")


def check_shape(name: str, x: torch.Tensor, names: str, sizes: dict[str, int]) -> None:
    """
    Raises an error unless x has the shape `names` (see `Argument`). Sizes that are not in `sizes` yet are taken from x
    and put there; products must be of those that are.
    """
    names = names.split()
    if x.dim() == len(names):
        for one, size in zip(names, x.shape, strict=True):
            if one.isidentifier():
                sizes.setdefault(one, size)
        if tuple(x.shape) == tuple(size_of(one, sizes) for one in names):
            return
    allowed = ", ".join(one if one.isdigit() else f"{one}={size_of(one, sizes)}" for one in names)
    raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({allowed}).")


def size_of(name: str, sizes: dict[str, int]) -> int | str:
    """Of a name, a number, or a product of names; "any" if it is not known."""
    size = 1
    for factor in name.split("*"):
        if not factor.isdigit() and factor not in sizes:
            return "any"
        size = size * (int(factor) if factor.isdigit() else sizes[factor])
    return size


def check_scan(
    operator: str, elements: tuple[torch.dtype, ...], tensors: dict[str, torch.Tensor | None]
) -> OperatorArguments:
    """Checks what every operator that scans is given; the result knows its sizes and checks what else there is."""
    arguments = OperatorArguments(operator, elements)
    arguments.check(SCAN_TOKENS, tensors)
    arguments.check_together(tensors, "k", "reflection")
    arguments.check_sequences(tensors)
    arguments.check(SCAN_STATES, tensors)
    return arguments
