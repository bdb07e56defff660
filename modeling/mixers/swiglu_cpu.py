"""The activation and the product of a SwiGLU network by compiled code, as a torch operator with its gradient."""

import torch

from ..scan.cpu.compiled import ELEMENTS, INTEGER, TENSOR, CompiledFunction
from ..scan.differentiable_operator import DifferentiableOperator
from ..scan.operator_arguments import Argument, OperatorArguments


def swiglu_fields() -> dict[str, type]:
    """The struct in the C++ source, past where sequences lie, which it does not use."""
    tensors = ("projected", "out", "grad_out", "grad_projected")
    return dict.fromkeys(("tokens", "size", "threads"), INTEGER) | dict.fromkeys(tensors, TENSOR)


class CompiledSwiGLU(DifferentiableOperator):
    """silu(a) * b, where each token has a, then b."""

    name = "swiglu_cpu"
    given = {"projected": Argument("batch length both", "element")}
    for_gradient = {"grad_out": Argument("batch length size", "element")}
    device_types = "cpu"
    swiglu_forward = CompiledFunction("swiglu_forward", swiglu_fields(), part="delta")
    swiglu_backward = CompiledFunction("swiglu_backward", swiglu_fields(), part="delta")

    def check(self, operator, tensors):
        arguments = OperatorArguments(operator, tuple(ELEMENTS))
        arguments.check(self.given, tensors)
        sizes = arguments.sizes
        if sizes["both"] % 2:
            arguments.refuse("projected", f"has {sizes['both']} columns", "of an even number")
        sizes |= {"size": sizes["both"] // 2, "tokens": sizes["batch"] * sizes["length"]}
        return arguments

    def make_results(self, tensors):
        batch, length, both = tensors["projected"].shape
        return {"out": tensors["projected"].new_empty(batch, length, both // 2)}

    def forward(self, arguments, tensors):
        self.swiglu_forward(tensors["projected"].dtype, self.values(arguments), tensors)

    def backward(self, arguments, tensors):
        self.swiglu_backward(tensors["projected"].dtype, self.values(arguments), tensors)

    def values(self, arguments: OperatorArguments) -> dict[str, int]:
        return {name: arguments.sizes[name] for name in ("tokens", "size")}


swiglu_operator, swiglu_backward_operator = CompiledSwiGLU().register()


def swiglu_cpu(projected: torch.Tensor) -> torch.Tensor:
    """silu(a) * b from (batch, length, 2 size), a before b. Inside all is float32, or float64 if `projected` is."""
    dtype = projected.dtype
    if dtype == torch.float16:  # the compiled code has no half precision but bfloat16
        projected = projected.float()
    return swiglu_operator(projected).to(dtype)
