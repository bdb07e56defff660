"""The scan on a GPU, in Triton, as an operator of torch with its gradient. The kernels are in `scan_triton_kernels`."""

import importlib.util
import os
from functools import cache

import torch
from transformers.utils import logging

from ..cpu.compiled import NAMESPACE, contiguous, refuse_second_derivative
from ..definition import ScanInputs, ScanState
from ..operator_arguments import Argument, OperatorArguments, check_devices, check_scan
from ..sequences import TokenOrder
from .launch import (
    INPUTS,
    LARGEST,
    Settings,
    backward,
    exact_precision,
    forward,
    interpreted,
    kept_dtype,
    make_settings,
    processors,
    slot_count,
)
from .self_check import disagreement

logger = logging.get_logger(__name__)

ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
GIVEN = (*INPUTS, "bounds", "order")
BACKWARD = {
    "dy": Argument("batch length heads channels", "element"),
    "dh": Argument("rows heads state channels"),
    "kept": Argument("slots heads state channels", "kept"),
    "T": Argument("solved heads chunk chunk", "float32"),
}


def unavailable(device: torch.device) -> str | None:
    """Why the Triton scan cannot run on a device, or None if it can."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"it runs on CUDA and ROCm devices, and the tensors are on {device.type}"
    return fault(device)


@torch.compiler.assume_constant_result
def fault(device: torch.device) -> str | None:
    """What keeps the kernels from running on a device; a graph takes the answer without tracing it."""
    return find_fault(device)


@cache
def find_fault(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted() or os.environ.get("MAMBA3_NPLR_SELF_CHECK") == "0":
        return None
    return self_check(device)


def self_check(device: torch.device) -> str | None:
    """Runs small examples of every path before the first use on a device, and warns if they go wrong."""
    reason = disagreement(scan_triton, device, ((1, 16), (processors(device), 16), (1, 64)))
    if reason is not None:
        logger.warning(
            f"The Triton scan cannot be trusted on {device} and the slower chunkwise scan takes its place: {reason}. "
            "MAMBA3_NPLR_SELF_CHECK=0 turns this check off."
        )
    return reason


@torch.library.custom_op(f"{NAMESPACE}::scan_triton", mutates_args=())
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the last h, and for the gradient G at the start of each chunk and T of each chunk."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    check_arguments("scan_triton", inputs)
    outputs = make_outputs(*inputs)
    if order is not None:
        outputs[0].zero_()  # padding, which the kernels never see, reads as 0
    tensors = contiguous(GIVEN, inputs)
    forward(settings_of(u, B), tensors | dict(zip(("y", "h", "kept", "T"), outputs, strict=True)))
    return outputs


@scan_operator.register_fake
def make_outputs(u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order):
    check_devices(u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    settings, (rows, heads, n, channels) = settings_of(u, B), h0.shape
    slots = slot_count(rows, *u.shape[:2], bounds is not None, settings)
    kept = u.new_empty(slots, heads, n, channels, dtype=kept_dtype(u.dtype))
    solved = solved_slots(slots, settings, k)
    T = u.new_empty(solved, heads, settings.CHUNK, settings.CHUNK, dtype=torch.float32)
    return u.new_empty(u.shape), h0.new_empty(h0.shape), kept, T


@torch.library.custom_op(f"{NAMESPACE}::scan_triton_backward", mutates_args=())
def scan_backward_operator(
    grad_y: torch.Tensor,
    grad_h: torch.Tensor,
    kept: torch.Tensor,
    T: torch.Tensor,
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
    """The gradients of all inputs that are there, in their order."""
    inputs = (u, B, C, log_decay, write, carry, k, reflection, D, h0, B0, u0, bounds, order)
    others = (grad_y, grad_h, kept, T)
    check_backward_arguments(check_arguments("scan_triton_backward", inputs), inputs, others)
    tensors = contiguous(GIVEN, inputs) | contiguous(BACKWARD, others)
    grads = make_gradients(*others, *inputs)
    names = [f"d{name}" for name, x in zip(INPUTS, inputs[: len(INPUTS)], strict=True) if x is not None]
    named = dict(zip(names, grads, strict=True))
    if D is not None:
        # A share from each chunk; adding them up here gives the same sum in every run.
        named["dD"] = u.new_empty(kept.shape[:2], dtype=torch.float32)
    # What no program writes: padding, places of chunks that no packed sequence needs, tokens before empty sequences.
    unwritten = set(names) if order is not None else {"dD"} if bounds is not None else set()
    if carry is None or bounds is not None:
        unwritten |= {"dB0", "du0"}
    for name in unwritten & named.keys():
        named[name].zero_()
    backward(settings_of(u, B), tensors | named)
    if D is not None:
        named["dD"] = named["dD"].sum(0).to(D.dtype)
    return [named[name] for name in names]


@scan_backward_operator.register_fake
def make_gradients(grad_y, grad_h, kept, T, *inputs):
    check_devices(grad_y, grad_h, kept, T, *inputs)
    *inputs, _, _ = inputs  # but not bounds and order
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def check_arguments(operator: str, inputs: tuple[torch.Tensor | None, ...]) -> OperatorArguments:
    """Checks what both operators are given; the result knows its sizes and checks what else there is."""
    arguments = check_scan(operator, ELEMENTS, dict(zip(GIVEN, inputs, strict=True)))
    sizes = arguments.sizes
    if max(sizes["state"], sizes["channels"]) > LARGEST or 0 in inputs[0].shape:
        found = f"has shape {tuple(inputs[0].shape)} with state={sizes['state']}"
        arguments.refuse("u", found, f"of one token or more, state and channels of {LARGEST} at most")
    return arguments


def check_backward_arguments(arguments: OperatorArguments, inputs: tuple, others: tuple[torch.Tensor, ...]) -> None:
    u, B, *_, k, _, _, h0, _, _, bounds, _ = inputs
    settings = settings_of(u, B)
    slots = slot_count(h0.shape[0], *u.shape[:2], bounds is not None, settings)
    arguments.sizes |= {"slots": slots, "solved": solved_slots(slots, settings, k), "chunk": settings.CHUNK}
    arguments.dtypes["kept"] = kept_dtype(u.dtype)
    arguments.check(BACKWARD, dict(zip(BACKWARD, others, strict=True)))


def solved_slots(slots: int, settings: Settings, k: torch.Tensor | None) -> int:
    """Small states solve once more in the backward pass rather than keep what they found."""
    return 0 if settings.small or k is None else slots


def settings_of(u: torch.Tensor, B: torch.Tensor) -> Settings:
    return make_settings(B.shape[-1], u.shape[-1], u.dtype, exact_precision())


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[2:])


def operator_backward(ctx, grad_y, grad_h, grad_kept, grad_T):
    *inputs, kept, T = ctx.saved_tensors
    grads = iter(scan_backward_operator(grad_y, grad_h, kept, T, *inputs))
    return (*(None if x is None else next(grads) for x in inputs[: len(INPUTS)]), None, None)


scan_operator.register_autograd(operator_backward, setup_context=keep_for_backward)
refuse_second_derivative(scan_backward_operator)


def fits(inputs: ScanInputs) -> bool:
    """Whether the kernels can do it: not float64, nor more than 128 state elements or channels."""
    dtypes = {x.dtype for x in inputs if x is not None}
    largest = max(inputs.B.shape[-1], inputs.u.shape[-1])
    return torch.float64 not in dtypes and largest <= LARGEST and inputs.u.numel() > 0


def scan_triton(inputs: ScanInputs, initial: ScanState, sequences: TokenOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """
    y and the last h of each sequence, as `scan_definition` finds them, for inputs that fit. u, B, C and k may be
    bfloat16 or float16, and y and their gradients are then, too.

    What is read at a token depends on no later one, with an exception that the other backends do not have: what is not
    finite, or becomes so in a product, makes NaN of its head from the start of its chunk on, that is up to 15 tokens
    back (31 for larger states in bfloat16), since the kernels multiply it by zeros there. To take it out before, as
    `scan_chunkwise` does, would more than double the traffic of the forward pass: u, B, k and four gates read and
    written once more, and y, are about 300 bytes a token and head at 16 state elements and channels in bfloat16, beside
    240.
    """
    y, h, _, _ = scan_operator(*inputs, *initial, *sequences)
    return y, h
