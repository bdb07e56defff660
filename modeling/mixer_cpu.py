"""The whole of a Mamba-3 mixer between its projections by compiled code, as a torch operator with its gradient."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from .cpu_operator import (
    ELEMENTS,
    INTEGER,
    NAMESPACE,
    NUMBER,
    TENSOR,
    CompiledFunction,
    contiguous,
    refuse_second_derivative,
)
from .operator_arguments import Argument, OperatorArguments, check_devices
from .scan_cpu import kept_slots
from .sequence_rows import TokenOrder


class MixerWeights(NamedTuple):
    """
    The parameters of a mixer that are not projections. What is None is an option: without `A_bias` the gates are
    smooth, without `B_weight` the write is that of the delta rule, without `norm_weight` the output is not normalised.
    """

    dt_bias: torch.Tensor  # (heads,)
    A_bias: torch.Tensor | None  # (heads,)
    B_weight: torch.Tensor | None  # (state,)
    B_bias: torch.Tensor | None  # (heads, state)
    C_weight: torch.Tensor  # (state,)
    C_bias: torch.Tensor  # (heads, state)
    D: torch.Tensor  # (heads,)
    norm_weight: torch.Tensor | None  # (heads * channels,)


class MixerMatrices(NamedTuple):
    """The projections of a mixer; those of the reflection may be None."""

    in_proj: torch.Tensor
    k_proj: torch.Tensor | None
    beta_proj: torch.Tensor | None
    beta_bias: torch.Tensor | None
    out_proj: torch.Tensor


class BlockFrame(NamedTuple):
    """What stands around a mixer in a block: the norm of its input, if there is a weight, and a residual connection."""

    weight: torch.Tensor | None = None  # (hidden_size,)
    bias: torch.Tensor | None = None  # (hidden_size,)
    epsilon: float = 0.0
    centred: bool = False  # whether the norm takes the mean off, as a LayerNorm does
    residual: bool = False


NAMES = ("projected", "k", "beta", *MixerWeights._fields, "h0", "B0", "u0", "phase0")
GIVEN = (*NAMES, "bounds", "order")
FINAL = ("h", "B", "u", "phase")
INTEGERS = ("tokens", "width", "heads", "state", "channels", "pairs", "threads", "contractive", "heavy_tail")
GRADIENTS = ("grad_out", *(f"grad_{name}" for name in (*FINAL, *NAMES)))
FIELDS = (
    dict.fromkeys(INTEGERS, INTEGER)
    | dict.fromkeys(("a_min", "epsilon"), NUMBER)
    | dict.fromkeys((*NAMES, "out", *FINAL, "kept", "kept_phase", *GRADIENTS), TENSOR)
)
forward_function = CompiledFunction("mixer_forward", FIELDS)
backward_function = CompiledFunction("mixer_backward", FIELDS)
step_function = CompiledFunction(
    "mixer_step",
    FIELDS
    | dict.fromkeys(("hidden", "centred", "residual"), INTEGER)
    | {"block_epsilon": NUMBER}
    | dict.fromkeys(("x", *MixerMatrices._fields, "block_weight", "block_bias", "y"), TENSOR),
)


# Without a weight for B nothing is carried from token to token, and B and u of the state are empty.
TOKENS = {"projected": Argument("batch length width", "element")}
STATES = {
    "h0": Argument("rows heads state channels"),
    "B0": Argument("rows heads carried_state"),
    "u0": Argument("rows heads carried_channels"),
    "phase0": Argument("rows heads pairs"),
}
REST = {
    "k": Argument("batch length heads*state", "element"),
    "beta": Argument("batch length heads", "element"),
    "dt_bias": Argument("heads"),
    "A_bias": Argument("heads"),
    "B_weight": Argument("state"),
    "B_bias": Argument("heads 1 state"),
    "C_weight": Argument("state"),
    "C_bias": Argument("heads 1 state"),
    "D": Argument("heads"),
    "norm_weight": Argument("heads*channels"),
}
BACKWARD = {
    "grad_out": Argument("batch length heads*channels", "element"),
    "grad_h": Argument("rows heads state channels"),
    "grad_B": Argument("rows heads carried_state"),
    "grad_u": Argument("rows heads carried_channels"),
    "grad_phase": Argument("rows heads pairs"),
    "kept": Argument("slots heads state channels"),
    "kept_phase": Argument("slots heads pairs", "float64"),
}


def check_mixer(operator: str, tensors: dict[str, torch.Tensor | None]) -> OperatorArguments:
    """Checks what both operators are given; the result knows its sizes and checks what else there is."""
    arguments = OperatorArguments(operator, tuple(ELEMENTS))
    arguments.check(TOKENS, tensors)
    arguments.check_sequences(tensors)
    arguments.check({"h0": STATES["h0"]}, tensors)
    arguments.check_together(tensors, "k", "beta")
    arguments.check_together(tensors, "B_weight", "B_bias")
    sizes, carries = arguments.sizes, tensors["B_weight"] is not None
    if not carries and tensors["k"] is None:
        arguments.refuse("k", "is None", "given where B_weight is not")
    sizes |= {"carried_state": carries * sizes["state"], "carried_channels": carries * sizes["channels"]}
    arguments.check(STATES, tensors)
    arguments.check(REST, tensors)
    heads, n, channels, pairs, width = (sizes[name] for name in ("heads", "state", "channels", "pairs", "width"))
    if 2 * pairs > n:
        arguments.refuse("phase0", f"is of {pairs} pairs", f"of {n // 2} at most, with state={n}")
    least = 2 * heads * channels + 2 * n + 3 * heads + pairs
    if width < least:
        arguments.refuse("projected", f"has {width} columns", f"of {least} or more, by the shape of the state")
    return arguments


def values(arguments: OperatorArguments, *options: bool | float) -> dict[str, int | float]:
    names = ("rows", "width", "heads", "state", "channels", "pairs")
    sizes = {name: arguments.sizes[name] for name in names} | {"equal_length": arguments.sizes["length"]}
    sizes["tokens"] = arguments.sizes["batch"] * arguments.sizes["length"]
    return sizes | dict(zip(("contractive", "heavy_tail", "a_min", "epsilon"), options, strict=True))


@torch.library.custom_op(f"{NAMESPACE}::mixer_cpu", mutates_args=(), device_types="cpu")
def mixer_operator(
    projected: torch.Tensor,
    k: torch.Tensor | None,
    beta: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_bias: torch.Tensor | None,
    B_weight: torch.Tensor | None,
    B_bias: torch.Tensor | None,
    C_weight: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
    phase0: torch.Tensor,
    bounds: torch.Tensor | None,
    order: torch.Tensor | None,
    contractive: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gated output, the state after it (h, B, u, phase), and h and phase at the start of each segment."""
    inputs = (projected, k, beta, dt_bias, A_bias, B_weight, B_bias, C_weight, C_bias, D, norm_weight)
    inputs = (*inputs, h0, B0, u0, phase0, bounds, order)
    arguments = check_mixer("mixer_cpu", dict(zip(GIVEN, inputs, strict=True)))
    outputs = make_outputs(*inputs)
    if order is not None:
        outputs[0].zero_()  # padding, which the compiled code never sees, reads as 0
    tensors = contiguous(GIVEN, inputs) | dict(zip(("out", *FINAL, "kept", "kept_phase"), outputs, strict=True))
    forward_function(projected.dtype, values(arguments, contractive, heavy_tail, a_min, epsilon), tensors)
    return outputs


@mixer_operator.register_fake
def make_outputs(
    projected,
    k,
    beta,
    dt_bias,
    A_bias,
    B_weight,
    B_bias,
    C_weight,
    C_bias,
    D,
    norm_weight,
    h0,
    B0,
    u0,
    phase0,
    bounds,
    order,
    *options,
):
    check_devices(projected, k, beta, dt_bias, A_bias, B_weight, B_bias, C_weight, C_bias, D, norm_weight)
    check_devices(projected, h0, B0, u0, phase0, bounds, order)
    batch, length, _ = projected.shape
    rows, heads, n, channels = h0.shape
    slots = kept_slots(rows, batch * length)
    return (
        projected.new_empty(batch, length, heads * channels),
        *(x.new_empty(x.shape) for x in (h0, B0, u0, phase0)),
        h0.new_empty(slots, heads, n, channels),
        phase0.new_empty(slots, heads, phase0.shape[2], dtype=torch.float64),
    )


@torch.library.custom_op(f"{NAMESPACE}::mixer_cpu_backward", mutates_args=(), device_types="cpu")
def mixer_backward_operator(
    grad_out: torch.Tensor,
    grad_h: torch.Tensor,
    grad_B: torch.Tensor,
    grad_u: torch.Tensor,
    grad_phase: torch.Tensor,
    kept: torch.Tensor,
    kept_phase: torch.Tensor,
    projected: torch.Tensor,
    k: torch.Tensor | None,
    beta: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_bias: torch.Tensor | None,
    B_weight: torch.Tensor | None,
    B_bias: torch.Tensor | None,
    C_weight: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    h0: torch.Tensor,
    B0: torch.Tensor,
    u0: torch.Tensor,
    phase0: torch.Tensor,
    bounds: torch.Tensor | None,
    order: torch.Tensor | None,
    contractive: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> list[torch.Tensor]:
    """The gradients of all inputs that are there, in their order."""
    inputs = (projected, k, beta, dt_bias, A_bias, B_weight, B_bias, C_weight, C_bias, D, norm_weight)
    inputs = (*inputs, h0, B0, u0, phase0, bounds, order)
    arguments = check_mixer("mixer_cpu_backward", dict(zip(GIVEN, inputs, strict=True)))
    arguments.sizes["slots"] = kept_slots(h0.shape[0], projected.shape[0] * projected.shape[1])
    others = (grad_out, grad_h, grad_B, grad_u, grad_phase, kept, kept_phase)
    arguments.check(BACKWARD, dict(zip(BACKWARD, others, strict=True)))
    given = {f"grad_{name}": x for name, x in zip(NAMES, inputs[: len(NAMES)], strict=True) if x is not None}
    grads = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in given.items()}
    if order is not None:
        for name in ("grad_projected", "grad_k", "grad_beta"):
            if name in grads:
                grads[name].zero_()
    tensors = contiguous(GIVEN, inputs) | contiguous(BACKWARD, others) | grads
    backward_function(projected.dtype, values(arguments, contractive, heavy_tail, a_min, epsilon), tensors)
    return list(grads.values())


@mixer_backward_operator.register_fake
def make_gradients(grad_out, grad_h, grad_B, grad_u, grad_phase, kept, kept_phase, *inputs):
    check_devices(grad_out, grad_h, grad_B, grad_u, grad_phase, kept, kept_phase, *inputs)
    return [x.new_empty(x.shape) for x in inputs[: len(NAMES)] if x is not None]


def keep_for_backward(ctx, inputs, output):
    *tensors, contractive, heavy_tail, a_min, epsilon = inputs
    ctx.options = (contractive, heavy_tail, a_min, epsilon)
    ctx.save_for_backward(*tensors, *output[-2:])


def backward(ctx, grad_out, grad_h, grad_B, grad_u, grad_phase, grad_kept, grad_kept_phase):
    *inputs, kept, kept_phase = ctx.saved_tensors
    grads = mixer_backward_operator(
        grad_out, grad_h, grad_B, grad_u, grad_phase, kept, kept_phase, *inputs, *ctx.options
    )
    grads = iter(grads)
    return (*(None if x is None else next(grads) for x in inputs[: len(NAMES)]), *(None,) * 6)


mixer_operator.register_autograd(backward, setup_context=keep_for_backward)
refuse_second_derivative(mixer_backward_operator)


def mixer_cpu(
    projected: torch.Tensor,
    k: torch.Tensor | None,
    beta: torch.Tensor | None,
    weights: MixerWeights,
    state: tuple[torch.Tensor, ...],
    sequences: TokenOrder,
    *,
    contractive: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """
    Args:
        projected (batch, length, width): Columns z, x, B, C, dt, A, trap, angle.
        k (batch, length, heads * state), beta (batch, length, heads): None without a reflection.
        state: h, B, u and phase before these tokens, a row for each sequence.

    Returns:
        What the output projection takes, (batch, length, heads * channels), in the dtype of `projected`, and the state
        after these tokens. Inside all is float32, or float64 if `projected` is.
    """
    dtype = projected.dtype
    if dtype == torch.float16:  # the compiled code has no half precision but bfloat16
        projected = projected.float()
    inside = torch.promote_types(projected.dtype, torch.float32)
    k, beta = (None if x is None else x.to(projected.dtype) for x in (k, beta))
    weights, state = ((None if x is None else x.to(inside) for x in group) for group in (weights, state))
    out, h, B, u, phase, *_ = mixer_operator(
        projected, k, beta, *weights, *state, *sequences, contractive, heavy_tail, a_min, epsilon
    )
    return out.to(dtype), (h, B, u, phase)


def step_cpu(
    x: torch.Tensor,
    matrices: MixerMatrices,
    weights: MixerWeights,
    state: tuple[torch.Tensor, ...],
    frame: BlockFrame,
    *,
    contractive: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """
    One token of each row, x (rows, hidden_size), through the whole mixer and the frame around it, without gradients; in
    the dtype of x.
    """
    parts = (*matrices, *weights, frame.weight, frame.bias)
    parts = [part if part is None or part.dtype == x.dtype else part.to(x.dtype) for part in parts]
    pointers = tuple(None if part is None else part.data_ptr() for part in parts)
    sizes = (x.shape[1], matrices.in_proj.shape[0], *state[0].shape[1:], state[3].shape[2])
    template = step_template(*sizes, pointers, *frame[2:], contractive, heavy_tail, a_min, epsilon)
    arguments = step_function.struct.from_buffer_copy(template)
    x, state = x.contiguous(), [part.to(x.dtype).contiguous() for part in state]
    y, *final = (torch.empty_like(part) for part in (x, *state))
    arguments.rows = arguments.tokens = len(x)
    arguments.x, arguments.y = x.data_ptr(), y.data_ptr()
    arguments.h0, arguments.B0, arguments.u0, arguments.phase0 = (part.data_ptr() for part in state)
    arguments.h, arguments.B, arguments.u, arguments.phase = (part.data_ptr() for part in final)
    step_function.function(x.dtype)(ctypes.byref(arguments))
    return y, tuple(final)


@lru_cache(maxsize=1024)
def step_template(
    hidden,
    width,
    heads,
    state,
    channels,
    pairs,
    pointers,
    block_epsilon,
    centred,
    residual,
    contractive,
    heavy_tail,
    a_min,
    epsilon,
) -> ctypes.Structure:
    """The part of a step's arguments that stays from one to the next; to fill the struct takes longer than the step."""
    names = (*MixerMatrices._fields, *MixerWeights._fields, "block_weight", "block_bias")
    return step_function.struct(
        equal_length=1,
        hidden=hidden,
        width=width,
        heads=heads,
        state=state,
        channels=channels,
        pairs=pairs,
        threads=1,
        block_epsilon=block_epsilon,
        centred=centred,
        residual=residual,
        contractive=contractive,
        heavy_tail=heavy_tail,
        a_min=a_min,
        epsilon=epsilon,
        **dict(zip(names, pointers, strict=True)),
    )
