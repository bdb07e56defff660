"""The scan on a processor by compiled code, as a torch operator with its gradient. `scan.h` does the work."""

import torch

from ..definition import ScanInputs, ScanState
from ..differentiable_operator import DifferentiableOperator
from ..operator_arguments import (
    SCAN_GIVEN,
    SCAN_GRADIENTS,
    SCAN_STATES,
    SCAN_TOKENS,
    Argument,
    OperatorArguments,
    check_scan,
)
from ..sequences import TokenOrder
from .compiled import ELEMENTS, INTEGER, TENSOR, CompiledFunction

# Steps between two kept states, as in the C++ source.
SEGMENT = 16


def kept_slots(rows: int, tokens: int) -> int:
    """Places for kept states that suffice for sequences of any lengths."""
    return tokens // SEGMENT + rows


def scan_fields() -> dict[str, type]:
    """The struct of the scan in the C++ source, past where the sequences lie."""
    names = (*SCAN_TOKENS, *SCAN_STATES)
    gradients = [f"grad_{name}" for name in ("y", "h", *names)]
    sizes = dict.fromkeys(("heads", "state", "channels", "threads"), INTEGER)
    return sizes | dict.fromkeys((*names, "y", "h", "kept", *gradients), TENSOR)


class CompiledScan(DifferentiableOperator):
    """y, the last h, and h at the start of each segment, which the gradient needs."""

    name = "scan_cpu"
    given = SCAN_GIVEN
    for_gradient = SCAN_GRADIENTS | {"kept": Argument("slots heads state channels")}
    device_types = "cpu"
    scan_forward = CompiledFunction("scan_forward", scan_fields())
    scan_backward = CompiledFunction("scan_backward", scan_fields())

    def check(self, operator, tensors):
        arguments = check_scan(operator, tuple(ELEMENTS), tensors)
        sizes = arguments.sizes
        sizes["slots"] = kept_slots(sizes["rows"], sizes["batch"] * sizes["length"])
        return arguments

    def make_results(self, tensors):
        u, h0 = tensors["u"], tensors["h0"]
        kept = h0.new_empty(kept_slots(h0.shape[0], u.shape[0] * u.shape[1]), *h0.shape[1:])
        return {"y": u.new_empty(u.shape), "h": h0.new_empty(h0.shape), "kept": kept}

    def forward(self, arguments, tensors):
        self.scan_forward(tensors["u"].dtype, self.sizes(arguments), tensors)

    def backward(self, arguments, tensors):
        D = tensors["D"]
        by_row = None if D is None else D.new_empty(arguments.sizes["rows"], *D.shape)
        self.scan_backward(tensors["u"].dtype, self.sizes(arguments), tensors | {"grad_D": by_row})
        if D is not None:
            torch.sum(by_row, 0, out=tensors["grad_D"])

    def sizes(self, arguments: OperatorArguments) -> dict[str, int]:
        sizes = {name: arguments.sizes[name] for name in ("rows", "heads", "state", "channels")}
        return sizes | {"equal_length": arguments.sizes["length"]}


scan_operator, scan_backward_operator = CompiledScan().register()


def scan_cpu(
    inputs: ScanInputs, initial: ScanState, sequences: TokenOrder, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    y and the last h of each sequence, as `scan_definition` finds them. u, B, C and k may be bfloat16. Segments take the
    place of chunks.
    """
    y, h, _ = scan_operator(*inputs, *initial, *sequences)
    return y, h
