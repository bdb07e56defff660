"""The scan on a GPU, in Triton, as an operator of torch with its gradient. `kernels` says which kernels there are."""

import importlib.util
import os
from functools import cache

import torch
from transformers.utils import logging

from ..definition import ScanInputs, ScanState
from ..differentiable_operator import DifferentiableOperator, Tensors
from ..operator_arguments import SCAN_GIVEN, SCAN_GRADIENTS, Argument, check_scan
from ..sequences import TokenOrder
from .launch import (
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
            f"The Triton scan cannot be trusted on {device} and falls back to the slower chunkwise scan: {reason}. "
            "MAMBA3_NPLR_SELF_CHECK=0 turns this check off."
        )
    return reason


def settings_of(u: torch.Tensor, B: torch.Tensor) -> Settings:
    return make_settings(B.shape[-1], u.shape[-1], u.dtype, exact_precision())


class TritonScan(DifferentiableOperator):
    """y, the last h, and for the gradient G at the start of each chunk and T of each chunk."""

    name = "scan_triton"
    given = SCAN_GIVEN
    for_gradient = SCAN_GRADIENTS | {
        "kept": Argument("slots heads state channels", "kept"),
        "T": Argument("solved heads chunk chunk", "float32"),
    }

    def check(self, operator, tensors):
        arguments = check_scan(operator, ELEMENTS, tensors)
        u, sizes = tensors["u"], arguments.sizes
        if max(sizes["state"], sizes["channels"]) > LARGEST or 0 in u.shape:
            found = f"has shape {tuple(u.shape)} with state={sizes['state']}"
            arguments.refuse("u", found, f"of one token or more, state and channels of {LARGEST} at most")
        slots, solved = self.slots(tensors)
        sizes |= {"slots": slots, "solved": solved, "chunk": settings_of(u, tensors["B"]).CHUNK}
        arguments.dtypes["kept"] = kept_dtype(u.dtype)
        return arguments

    def make_results(self, tensors):
        u, h0, chunk = tensors["u"], tensors["h0"], settings_of(tensors["u"], tensors["B"]).CHUNK
        slots, solved = self.slots(tensors)
        return {
            "y": u.new_empty(u.shape),
            "h": h0.new_empty(h0.shape),
            "kept": u.new_empty(slots, *h0.shape[1:], dtype=kept_dtype(u.dtype)),
            "T": u.new_empty(solved, h0.shape[1], chunk, chunk, dtype=torch.float32),
        }

    def forward(self, arguments, tensors):
        forward(settings_of(tensors["u"], tensors["B"]), tensors)

    def backward(self, arguments, tensors):
        named = {name.replace("grad_", "d"): x for name, x in tensors.items()}
        D, packed = tensors["D"], tensors["bounds"] is not None
        if D is not None:
            # A share from each chunk; adding them up here gives the same sum in every run.
            named["dD"] = D.new_empty(tensors["kept"].shape[:2])
            if packed:  # some places for chunks may not be needed
                named["dD"].zero_()
        if packed or tensors["carry"] is None:  # nobody reads the token before an empty sequence, or before any
            named["dB0"].zero_()
            named["du0"].zero_()
        backward(settings_of(tensors["u"], tensors["B"]), named)
        if D is not None:
            torch.sum(named["dD"], 0, out=tensors["grad_D"])

    def slots(self, tensors: Tensors) -> tuple[int, int]:
        """How many chunks there is room for, and how many T."""
        u, settings = tensors["u"], settings_of(tensors["u"], tensors["B"])
        slots = slot_count(tensors["h0"].shape[0], *u.shape[:2], tensors["bounds"] is not None, settings)
        # Small states solve once more in the backward pass rather than keep what they found.
        return slots, 0 if settings.small or tensors["k"] is None else slots


scan_operator, scan_backward_operator = TritonScan().register()


def fits(inputs: ScanInputs) -> bool:
    """Whether the kernels can do it: not float64, nor more than 128 state elements or channels."""
    dtypes = {x.dtype for x in inputs if x is not None}
    largest = max(inputs.B.shape[-1], inputs.u.shape[-1])
    return torch.float64 not in dtypes and largest <= LARGEST and inputs.u.numel() > 0


def scan_triton(
    inputs: ScanInputs, initial: ScanState, sequences: TokenOrder, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    y and the last h of each sequence, as `scan_definition` finds them, for inputs that fit. u, B, C and k may be
    bfloat16 or float16, and y and their gradients are then, too. Chunks have a size of their own.

    What is read at a token depends on no later one, with an exception that the other backends do not have: what is not
    finite, or becomes so in a product, makes NaN of its head from the start of its chunk on, that is up to 15 tokens
    back (31 for larger states in bfloat16), since the kernels multiply it by zeros there. To take it out before, as
    `scan_chunkwise` does, would more than double the traffic of the forward pass: u, B, k and four gates read and
    written once more, and y, are about 300 bytes a token and head at 16 state elements and channels in bfloat16, beside
    240.
    """
    y, h, _, _ = scan_operator(*inputs, *initial, *sequences)
    return y, h
