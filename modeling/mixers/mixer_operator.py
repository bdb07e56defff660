"""What operators of whole mixers between their projections share, for tokens and for letters (see `letters`)."""

import torch

from ..scan.cpu.compiled import CompiledFunction
from ..scan.differentiable_operator import DifferentiableOperator
from ..scan.operator_arguments import Argument, OperatorArguments

INDEX = {"index": Argument("batch length", "int64")}


def of_letters(projections: dict[str, Argument]) -> dict[str, Argument]:
    """Projections of letters in the place of those of tokens, where an index says which letter each token is."""
    return {name: x._replace(shape=x.shape.replace("batch length", "letters")) for name, x in projections.items()}


class MixerOperator(DifferentiableOperator):
    """A mixer sets what its base needs, the functions that compute, and the sizes that they are told."""

    projections: dict[str, Argument]
    sizes: tuple[str, ...]
    function: CompiledFunction
    gradient_function: CompiledFunction
    device_types = "cpu"

    def check_index(self, arguments: OperatorArguments, tensors: dict[str, torch.Tensor | None]) -> None:
        """For tokens that are letters."""
        if "index" in self.given:
            arguments.check(INDEX, tensors)
            arguments.check_index("index", tensors["index"], arguments.sizes["letters"])

    def forward(self, arguments, tensors, **options):
        self.function(tensors["projected"].dtype, self.values(arguments) | options, tensors)

    def backward(self, arguments, tensors, **options):
        self.gradient_function(tensors["projected"].dtype, self.values(arguments) | options, tensors)

    def values(self, arguments: OperatorArguments) -> dict[str, int | float]:
        """What the functions are told beside tensors and options."""
        sizes = {name: arguments.sizes[name] for name in ("rows", "tokens", "width", *self.sizes)}
        return sizes | {"equal_length": arguments.sizes["length"], "letters": arguments.sizes.get("letters", 0)}
