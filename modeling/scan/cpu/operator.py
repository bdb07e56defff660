"""The scan on a processor by compiled code, as a torch operator with its gradient. `scan.h` does the work."""

import torch

from ..definition import ScanInputs, ScanState
from ..operator_arguments import Argument, OperatorArguments, check_devices, check_scan
from ..sequences import TokenOrder
from .compiled import ELEMENTS, INTEGER, NAMESPACE, TENSOR, CompiledFunction, contiguous, refuse_second_derivative

NAMES = (*ScanInputs._fields, "h0", "B0", "u0")
GIVEN = (*NAMES, "bounds", "order")
# Steps between two kept states, as in the C++ source.
SEGMENT = 16

FIELDS = dict.fromkeys(("heads", "state", "channels", "threads"), INTEGER) | dict.fromkeys(
    (*NAMES, "y", "h", "kept", "grad_y", "grad_h", *(f"grad_{name}" for name in NAMES)), TENSOR
)
forward_function = CompiledFunction("scan_forward", FIELDS)
backward_function = CompiledFunction("scan_backward", FIELDS)


BACKWARD = {
    "grad_y": Argument("batch length heads channels", "element"),
    "grad_h": Argument("rows heads state channels"),
    "kept": Argument("slots heads state channels"),
}


def values(arguments: OperatorArguments) -> dict[str, int]:
    sizes = {name: arguments.sizes[name] for name in ("rows", "heads", "state", "channels")}
    return sizes | {"equal_length": arguments.sizes["length"]}


def kept_slots(rows: int, tokens: int) -> int:
    """Places for kept states that suffice for sequences of any lengths."""
    return tokens // SEGMENT + rows


@torch.library.custom_op(f"{NAMESPACE}::scan_cpu", mutates_args=(), device_types="cpu")
def scan_operator(
    u: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    carry: torch.Tensor | None,
    k: torch.Tensor | None,
    reflection: torch.Tensor | None,
    D: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
    bounds: torch.Tensor | None,
    order: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the last h, and h at the start of each segment, which the gradient needs."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    arguments = check_scan("scan_cpu", tuple(ELEMENTS), dict(zip(GIVEN, inputs, strict=True)))
    y, h, kept = make_outputs(*inputs)
    if order is not None:
        y.zero_()  # padding, which the compiled code never sees, reads as 0
    forward_function(u.dtype, values(arguments), contiguous(GIVEN, inputs) | {"y": y, "h": h, "kept": kept})
    return y, h, kept


@scan_operator.register_fake
def make_outputs(u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order):
    check_devices(u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    kept = h0.new_empty(kept_slots(h0.shape[0], u.shape[0] * u.shape[1]), *h0.shape[1:])
    return u.new_empty(u.shape), h0.new_empty(h0.shape), kept


@torch.library.custom_op(f"{NAMESPACE}::scan_cpu_backward", mutates_args=(), device_types="cpu")
def scan_backward_operator(
    grad_y: torch.Tensor,
    grad_h: torch.Tensor,
    kept: torch.Tensor,
    u: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    carry: torch.Tensor | None,
    k: torch.Tensor | None,
    reflection: torch.Tensor | None,
    D: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
    bounds: torch.Tensor | None,
    order: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The gradients of all inputs that are there, in their order; that of D is one for each row, still to be added."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    arguments = check_scan("scan_cpu_backward", tuple(ELEMENTS), dict(zip(GIVEN, inputs, strict=True)))
    arguments.sizes["slots"] = kept_slots(h0.shape[0], u.shape[0] * u.shape[1])
    arguments.check(BACKWARD, {"grad_y": grad_y, "grad_h": grad_h, "kept": kept})
    grads = make_gradients(grad_y, grad_h, kept, *inputs)
    given = [f"grad_{name}" for name, x in zip(NAMES, inputs[: len(NAMES)], strict=True) if x is not None]
    if order is not None:
        for grad in grads:
            grad.zero_()  # padding has none
    tensors = contiguous(GIVEN, inputs) | contiguous(BACKWARD, (grad_y, grad_h, kept))
    backward_function(u.dtype, values(arguments), tensors | dict(zip(given, grads, strict=True)))
    return grads


@scan_backward_operator.register_fake
def make_gradients(grad_y, grad_h, kept, u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order):
    check_devices(grad_y, grad_h, kept, u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    before_D, after_D = (u, B, C, log_decay, write, carry, k, reflection), (h0, B0, u0)
    grad_D = [] if D is None else [D.new_empty(h0.shape[0], *D.shape)]
    before_D, after_D = ([x.new_empty(x.shape) for x in inputs if x is not None] for inputs in (before_D, after_D))
    return before_D + grad_D + after_D


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])


def backward(ctx, grad_y, grad_h, grad_kept):
    *inputs, kept = ctx.saved_tensors
    grads = iter(scan_backward_operator(grad_y, grad_h, kept, *inputs))
    named = {name: None if x is None else next(grads) for name, x in zip(NAMES, inputs[: len(NAMES)], strict=True)}
    if named["D"] is not None:
        named["D"] = named["D"].sum(0)
    return (*named.values(), None, None)


scan_operator.register_autograd(backward, setup_context=keep_for_backward)
refuse_second_derivative(scan_backward_operator)


def scan_cpu(inputs: ScanInputs, initial: ScanState, sequences: TokenOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the last h of each sequence, as `scan_definition` finds them. u, B, C and k may be bfloat16."""
    y, h, _ = scan_operator(*inputs, *initial, *sequences)
    return y, h
