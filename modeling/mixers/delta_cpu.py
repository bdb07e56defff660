"""The whole of a delta-family mixer between its projections by compiled code, as a torch operator with its gradient."""

import math
from typing import NamedTuple

import torch

from ..scan.cpu.compiled import ELEMENTS, INTEGER, NUMBER, TENSOR, CompiledFunction
from ..scan.cpu.operator import SEGMENT
from ..scan.operator_arguments import SEQUENCES, Argument, OperatorArguments
from ..scan.sequences import TokenOrder
from .mixer_operator import INDEX, MixerOperator, of_letters


class DeltaWeights(NamedTuple):
    """The parameters of a mixer that are not projections; without a convolution or a decay, theirs are None."""

    conv_weight: torch.Tensor | None  # (heads * (keys + steps * (keys + values)), width) of queries, keys and values
    A_log: torch.Tensor | None  # (heads,)
    dt_bias: torch.Tensor | None  # (heads,)
    norm_weight: torch.Tensor  # (values,)


# The width of what is projected may be filled up to a multiple of this, which is faster: see `project`.
COLUMNS = 16

TOKENS = {"projected": Argument("batch length width", "element")}
LETTERS = of_letters(TOKENS)
WEIGHTS = {
    "conv_weight": Argument("convolved conv_width", optional=True),
    "A_log": Argument("heads", optional=True),
    "dt_bias": Argument("heads", optional=True),
    "norm_weight": Argument("channels"),
}
STATES = {"h0": Argument("rows heads state channels"), "last0": Argument("rows before convolved")}
RESULTS = ("out", "h", "last", "kept")


def delta_fields() -> dict[str, type]:
    """The struct of the mixer in the C++ source, past where the sequences lie."""
    sizes = ("tokens", "letters", "width", "heads", "state", "channels", "threads", "steps", "conv_width", "gated")
    names = (*TOKENS, *WEIGHTS, *STATES)
    gradients = [f"grad_{name}" for name in (*RESULTS[:3], *names)]
    return (
        dict.fromkeys(sizes, INTEGER)
        | dict.fromkeys(("beta_max", "key_epsilon", "epsilon"), NUMBER)
        | dict.fromkeys((*INDEX, *names, *RESULTS, *gradients), TENSOR)
    )


def delta_steps(h0: torch.Tensor, last0: torch.Tensor) -> int:
    """Of a token, by the number of its queries, keys and values."""
    _, heads, n, channels = h0.shape
    return (last0.shape[2] // heads - n) // (n + channels)


def kept_slots(rows: int, tokens: int, steps: int) -> int:
    """Places for kept states that suffice for sequences of any lengths; a segment has whole tokens."""
    return tokens // max(1, SEGMENT // steps) + rows


class CompiledDelta(MixerOperator):
    """The gated output, the state after it (h and the last tokens), and h at the start of each segment."""

    name = "delta_cpu"
    projections = TOKENS
    given = TOKENS | WEIGHTS | STATES | SEQUENCES
    options = {"gated": bool, "beta_max": float, "key_epsilon": float, "epsilon": float}
    for_gradient = {
        "grad_out": Argument("batch length heads*channels", "element"),
        "grad_h": Argument("rows heads state channels"),
        "grad_last": Argument("rows before convolved"),
        "kept": Argument("slots heads state channels"),
    }
    sizes = ("heads", "state", "channels", "steps", "conv_width")
    function = CompiledFunction("delta_forward", delta_fields(), part="delta")
    gradient_function = CompiledFunction("delta_backward", delta_fields(), part="delta")

    def check(self, operator, tensors, gated, **numbers):
        arguments = OperatorArguments(operator, tuple(ELEMENTS))
        for name, number in numbers.items():
            if not math.isfinite(number):
                arguments.refuse(name, f"is {number}", "finite")
        arguments.check(self.projections, tensors)
        self.check_index(arguments, tensors)
        arguments.check_sequences(tensors)
        arguments.check(STATES, tensors)
        arguments.check_together(tensors, "A_log", "dt_bias")
        sizes = arguments.sizes
        heads, n, channels, convolved = (sizes[name] for name in ("heads", "state", "channels", "convolved"))
        steps = delta_steps(tensors["h0"], tensors["last0"]) if heads * (n + channels) else 0
        if steps < 1 or convolved != heads * (n + steps * (n + channels)):
            allowed = f"of {heads * n} and, for each delta step, {heads * (n + channels)}, by the shape of h0"
            arguments.refuse("last0", f"has {convolved} columns", allowed)
        least = convolved + heads * (steps + (tensors["A_log"] is not None) + gated * channels)
        filled = -(-least // COLUMNS) * COLUMNS
        if sizes["width"] not in (least, filled):
            allowed = f"of {least} or {filled}, by the shape of the state"
            arguments.refuse("projected", f"has {sizes['width']} columns", allowed)
        arguments.check(WEIGHTS, tensors)
        conv_width = sizes.setdefault("conv_width", 0)
        if tensors["conv_weight"] is not None and conv_width < 1:
            arguments.refuse("conv_weight", "has 0 columns", "of 1 or more")
        if sizes["before"] != max(conv_width - 1, 0):
            arguments.refuse("last0", f"holds {sizes['before']} tokens", f"of {max(conv_width - 1, 0)}")
        sizes |= {"steps": steps, "tokens": sizes["batch"] * sizes["length"]}
        sizes["slots"] = kept_slots(sizes["rows"], sizes["tokens"], steps)
        return arguments

    def make_results(self, tensors):
        projected, h0, last0 = tensors["projected"], tensors["h0"], tensors["last0"]
        batch, length = tensors.get("index", projected).shape[:2]
        rows, heads, n, channels = h0.shape
        slots = kept_slots(rows, batch * length, delta_steps(h0, last0))
        return {
            "out": projected.new_empty(batch, length, heads * channels),
            "h": h0.new_empty(h0.shape),
            "last": last0.new_empty(last0.shape),
            "kept": h0.new_empty(slots, heads, n, channels),
        }


class CompiledDeltaOfLetters(CompiledDelta):
    """The same of letters, with the number of each token's letter."""

    name = "delta_cpu_letters"
    projections = LETTERS
    given = LETTERS | WEIGHTS | STATES | SEQUENCES | INDEX


delta_operator, delta_backward_operator = CompiledDelta().register()
letters_operator, letters_backward_operator = CompiledDeltaOfLetters().register()


def delta_cpu(
    projected: torch.Tensor,
    weights: DeltaWeights,
    state: tuple[torch.Tensor, torch.Tensor],
    sequences: TokenOrder,
    index: torch.Tensor | None = None,
    *,
    gated: bool,
    beta_max: float,
    key_epsilon: float,
    epsilon: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """
    Args:
        projected (batch, length, width): Columns of q, k, v, with an output gate g, b, with a decay a, and some
            that nobody reads, up to a multiple of `COLUMNS`.
        state: h and the last tokens before these, a row for each sequence.
        gated: Whether there is an output gate.
        index (batch, length): Which letter each token is; `projected` is then (letters, width).
        key_epsilon, epsilon: Of the normalisation of queries and keys, and of the output norm.

    Returns:
        What the output projection takes, (batch, length, heads * values), in the dtype of `projected`, and the state
        after these tokens. Inside all is float32, or float64 if `projected` is.
    """
    dtype = projected.dtype
    if dtype == torch.float16:  # the compiled code has no half precision but bfloat16
        projected = projected.float()
    inside = torch.promote_types(projected.dtype, torch.float32)
    weights, state = ((None if x is None else x.to(inside) for x in group) for group in (weights, state))
    given, options = (projected, *weights, *state, *sequences), (gated, beta_max, key_epsilon, epsilon)
    if index is None:
        out, h, last, _ = delta_operator(*given, *options)
    else:
        out, h, last, _ = letters_operator(*given, index, *options)
    return out.to(dtype), (h, last)
