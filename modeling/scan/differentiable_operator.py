"""
Operators of torch with gradients, from tables of what they are given. What is the same for all of them stands here: the
schemas, what a graph learns of their results without running them, what is kept for the gradient and handed on to it.
"""

import itertools
from abc import ABC, abstractmethod

import torch
from torch.library import CustomOpDef

from .operator_arguments import Argument, OperatorArguments, check_devices

Tensors = dict[str, torch.Tensor | None]


def free_namespace() -> str:
    """
    A namespace for the operators. The code of checkpoints may be loaded beside this package, and more than once, but
    operators cannot be registered twice under one name.
    """
    names = itertools.chain(["mamba3_nplr"], (f"mamba3_nplr_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(getattr(torch.ops, name), "scan_cpu"))


NAMESPACE = free_namespace()


class DifferentiableOperator(ABC):
    """
    What an operator NAME and that of its gradient, NAME_backward, are made of. NAME takes the tensors of `given`, then
    the `options`. NAME_backward takes those of `for_gradient` before them, and returns the gradients of all tensors
    that were given, but of whole numbers none.

    `for_gradient` has one entry for each result of NAME, in their order: `grad_X` for the gradient of a result X, and
    the name of the result itself where it is only kept for the gradient.
    """

    name: str
    given: dict[str, Argument]
    options: dict[str, type] = {}
    for_gradient: dict[str, Argument]
    device_types: str | None = None  # all of them

    @abstractmethod
    def check(self, operator: str, tensors: Tensors, **options) -> OperatorArguments:
        """Checks what both operators are given, for the one called `operator`, and finds all sizes of the tables."""

    @abstractmethod
    def make_results(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Memory for the results, by name, from the tensors of `given`, of which nothing but the shapes is read."""

    @abstractmethod
    def forward(self, arguments: OperatorArguments, tensors: Tensors, **options) -> None:
        """Fills the results. `tensors` holds them beside what is given; the first has zeros where there is padding."""

    @abstractmethod
    def backward(self, arguments: OperatorArguments, tensors: Tensors, **options) -> None:
        """Fills `grad_X` for each X that is given. `tensors` holds them, with zeros where there is padding."""

    def register(self) -> tuple[CustomOpDef, CustomOpDef]:
        """Makes both operators."""
        given = [f"Tensor{'?' if argument.optional else ''} {name}" for name, argument in self.given.items()]
        given += [f"{kind.__name__} {name}" for name, kind in self.options.items()]
        for_gradient = [f"Tensor {name}" for name in self.for_gradient]
        results = ", ".join("Tensor" for _ in self.for_gradient)
        operator = self.define(self.name, self.run, f"({', '.join(given)}) -> ({results})")
        gradient = self.define(
            f"{self.name}_backward", self.run_backward, f"({', '.join(for_gradient + given)}) -> Tensor[]"
        )
        operator.register_fake(self.run_without_memory)
        gradient.register_fake(self.run_backward_without_memory)

        def differentiate(ctx, *gradients):
            saved = ctx.saved_tensors  # read once: gradient checkpointing gives them away only once
            inputs, kept = saved[: len(self.given)], saved[len(self.given) :]
            # Nobody asks for those of what is only kept, which are None.
            of_results = [
                inputs[0].new_zeros(shape, dtype=dtype) if given is None else given
                for given, (shape, dtype) in zip(gradients, ctx.results, strict=False)
            ]
            found = iter(gradient(*of_results, *kept, *inputs, *ctx.options))
            wanted = self.differentiable(dict(zip(self.given, inputs, strict=True)))
            return (*(next(found) if name in wanted else None for name in self.given), *(None for _ in self.options))

        operator.register_autograd(differentiate, setup_context=self.keep)
        gradient.register_autograd(refuse_second_derivative)
        return operator, gradient

    def define(self, name: str, run, schema: str) -> CustomOpDef:
        name = f"{NAMESPACE}::{name}"
        return torch.library.custom_op(name, run, mutates_args=(), device_types=self.device_types, schema=schema)

    def run(self, *values) -> torch.Tensor | tuple[torch.Tensor, ...]:
        tensors, options = self.named(values)
        arguments = self.check(self.name, tensors, **options)
        results = self.make_results(tensors)
        if tensors.get("order") is not None:  # padding is not in it
            next(iter(results.values())).zero_()
        self.forward(arguments, contiguous(tensors) | results, **options)
        return as_returned(results)

    def run_without_memory(self, *values) -> torch.Tensor | tuple[torch.Tensor, ...]:
        tensors, _ = self.named(values)
        check_devices(*tensors.values())
        return as_returned(self.make_results(tensors))

    def run_backward(self, *values) -> list[torch.Tensor]:
        for_gradient, tensors, options = self.named_for_gradient(values)
        arguments = self.check(f"{self.name}_backward", tensors, **options)
        arguments.check(self.for_gradient, for_gradient)
        gradients = self.make_gradients(tensors)
        if tensors.get("order") is not None:
            for name, gradient in gradients.items():
                if self.given[name].shape.startswith("batch length"):
                    gradient.zero_()
        named = {f"grad_{name}": gradient for name, gradient in gradients.items()}
        self.backward(arguments, contiguous(tensors | for_gradient) | named, **options)
        return list(gradients.values())

    def run_backward_without_memory(self, *values) -> list[torch.Tensor]:
        for_gradient, tensors, _ = self.named_for_gradient(values)
        check_devices(*for_gradient.values(), *tensors.values())
        return list(self.make_gradients(tensors).values())

    def make_gradients(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: x.new_empty(x.shape) for name, x in self.differentiable(tensors).items()}

    def differentiable(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Those that are there and not of whole numbers."""
        return {name: x for name, x in tensors.items() if x is not None and self.given[name].dtype != "int64"}

    def keep(self, ctx, inputs: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """What the gradient takes beside those of the results, and what they are like."""
        output = output if isinstance(output, tuple) else (output,)
        kept = [x for name, x in zip(self.for_gradient, output, strict=True) if not name.startswith("grad_")]
        ctx.save_for_backward(*inputs[: len(self.given)], *kept)
        ctx.results = [(x.shape, x.dtype) for x in output[: len(output) - len(kept)]]
        ctx.set_materialize_grads(False)  # zeros for all that is kept would take a while
        ctx.options = inputs[len(self.given) :]

    def named(self, values: tuple) -> tuple[Tensors, dict]:
        """The tensors and the options that a call was given."""
        count = len(self.given)
        tensors = dict(zip(self.given, values[:count], strict=True))
        return tensors, dict(zip(self.options, values[count:], strict=True))

    def named_for_gradient(self, values: tuple) -> tuple[Tensors, Tensors, dict]:
        count = len(self.for_gradient)
        return dict(zip(self.for_gradient, values[:count], strict=True)), *self.named(values[count:])


def refuse_second_derivative(ctx, *gradients):
    """Says, where the operator of a gradient is differentiated once more, what to use instead."""
    raise RuntimeError(
        "Compiled code has no second derivative. The chunkwise scan has: give scan_backend='chunkwise' in the "
        "configuration, or backend='chunkwise' to scan()."
    )


def as_returned(results: dict[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """As an operator of torch returns them: a single one is no tuple."""
    values = tuple(results.values())
    return values if len(values) > 1 else values[0]


def contiguous(tensors: Tensors) -> Tensors:
    return {name: None if x is None else x.contiguous() for name, x in tensors.items()}
