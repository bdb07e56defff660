"""The whole of a Mamba-3 mixer between its projections by compiled code, as a torch operator with its gradient."""

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..scan.cpu.compiled import ELEMENTS, INTEGER, NUMBER, TENSOR, CompiledFunction
from ..scan.cpu.operator import kept_slots
from ..scan.operator_arguments import SEQUENCES, Argument, OperatorArguments
from ..scan.sequences import TokenOrder
from .fused_step import DTYPES, PLAIN_TYPES, is_plain
from .mamba3_numbers import NUMBERS, MixerNumbers
from .mixer_operator import INDEX, MixerOperator, of_letters


class MixerWeights(NamedTuple):
    """
    The parameters of a mixer that are not projections. What is None is an option: without `A_bias` the gates are
    smooth, without `B_weight` the write is along k, without `norm_weight` the output is not normalised.
    """

    dt_bias: torch.Tensor  # (heads,)
    A_bias: torch.Tensor | None  # (heads,)
    B_weight: torch.Tensor | None  # (state,)
    B_bias: torch.Tensor | None  # (heads, 1, state)
    C_weight: torch.Tensor  # (state,)
    C_bias: torch.Tensor  # (heads, 1, state)
    D: torch.Tensor  # (heads,)
    norm_weight: torch.Tensor | None  # (heads * channels,)


class MixerMatrices(NamedTuple):
    """The projections of a mixer; those of the reflection may be None."""

    in_proj: torch.Tensor
    k_proj: torch.Tensor | None
    beta_proj: torch.Tensor | None
    beta_bias: torch.Tensor | None
    out_proj: torch.Tensor


class MixerSizes(NamedTuple):
    """What decides which tensors a mixer has, and their shapes."""

    hidden: int
    heads: int
    state: int
    channels: int
    pairs: int  # that are rotated
    angles: int  # rows of the input projection for them: of all heads or of each, whether they are rotated or not
    carries: bool  # whether the last token is written again, as with the trapezoid
    reflects: bool
    exact_gates: bool
    output_norm: bool

    @property
    def width(self) -> int:
        return 2 * self.heads * self.channels + 2 * self.state + 3 * self.heads + self.angles


class BlockFrame(NamedTuple):
    """What stands around a mixer in a block: the norm of its input, if there is a weight, and a residual connection."""

    weight: torch.Tensor | None = None  # (hidden_size,)
    bias: torch.Tensor | None = None  # (hidden_size,)
    epsilon: float = 0.0
    centred: bool = False  # whether the norm takes the mean off, as a LayerNorm does
    residual: bool = False


# Without a weight for B nothing is carried from token to token, and B and u of the state are empty.
TOKENS = {
    "projected": Argument("batch length width", "element"),
    "k": Argument("batch length heads*state", "element", optional=True),
    "beta": Argument("batch length heads", "element", optional=True),
}
LETTERS = of_letters(TOKENS)
WEIGHTS = {
    "dt_bias": Argument("heads"),
    "A_bias": Argument("heads", optional=True),
    "B_weight": Argument("state", optional=True),
    "B_bias": Argument("heads 1 state", optional=True),
    "C_weight": Argument("state"),
    "C_bias": Argument("heads 1 state"),
    "D": Argument("heads"),
    "norm_weight": Argument("heads*channels", optional=True),
}
STATES = {
    "h0": Argument("rows heads state channels"),
    "B0": Argument("rows heads carried_state"),
    "u0": Argument("rows heads carried_channels"),
    "phase0": Argument("rows heads pairs"),
}
RESULTS = ("out", "h", "B", "u", "phase", "kept", "kept_phase")


def mixer_fields() -> dict[str, type]:
    """The struct of the mixer in the C++ source, past where the sequences lie."""
    sizes = ("tokens", "letters", "width", "heads", "state", "channels", "pairs")
    names = (*TOKENS, *WEIGHTS, *STATES)
    gradients = [f"grad_{name}" for name in (*RESULTS[:5], *names)]
    return (
        dict.fromkeys((*sizes, "threads", "contractive", "overwrites", "heavy_tail"), INTEGER)
        | dict.fromkeys(("a_min", "epsilon", *MixerNumbers._fields), NUMBER)
        | dict.fromkeys((*INDEX, *names, *RESULTS, *gradients), TENSOR)
    )


class CompiledMixer(MixerOperator):
    """The gated output, the state after it (h, B, u, phase), and h and phase at the start of each segment."""

    name = "mixer_cpu"
    projections = TOKENS
    given = TOKENS | WEIGHTS | STATES | SEQUENCES
    options = {"contractive": bool, "overwrites": bool, "heavy_tail": bool, "a_min": float, "epsilon": float}
    for_gradient = {
        "grad_out": Argument("batch length heads*channels", "element"),
        "grad_h": Argument("rows heads state channels"),
        "grad_B": Argument("rows heads carried_state"),
        "grad_u": Argument("rows heads carried_channels"),
        "grad_phase": Argument("rows heads pairs"),
        "kept": Argument("slots heads state channels"),
        "kept_phase": Argument("slots heads pairs", "float64"),
    }
    sizes = ("heads", "state", "channels", "pairs")
    function = CompiledFunction("mixer_forward", mixer_fields())
    gradient_function = CompiledFunction("mixer_backward", mixer_fields())

    def check(self, operator, tensors, a_min, epsilon, **options):
        arguments = OperatorArguments(operator, tuple(ELEMENTS))
        arguments.check({"projected": self.projections["projected"]}, tensors)
        self.check_index(arguments, tensors)
        arguments.check_sequences(tensors)
        arguments.check({"h0": STATES["h0"]}, tensors)
        arguments.check_together(tensors, "k", "beta")
        arguments.check_together(tensors, "B_weight", "B_bias")
        sizes, carries = arguments.sizes, tensors["B_weight"] is not None
        if not carries and tensors["k"] is None:
            arguments.refuse("k", "is None", "given where B_weight is not")
        sizes["tokens"] = sizes["batch"] * sizes["length"]
        sizes["slots"] = kept_slots(sizes["rows"], sizes["tokens"])
        sizes |= {"carried_state": carries * sizes["state"], "carried_channels": carries * sizes["channels"]}
        arguments.check(STATES, tensors)
        arguments.check(self.projections | WEIGHTS, tensors)
        heads, n, channels, pairs, width = (sizes[name] for name in ("heads", "state", "channels", "pairs", "width"))
        if 2 * pairs > n:
            arguments.refuse("phase0", f"is of {pairs} pairs", f"of {n // 2} at most, with state={n}")
        angles = width - (2 * heads * channels + 2 * n + 3 * heads)
        # Of all heads or of each. Without RoPE they are there all the same, and nobody reads them.
        allowed = (pairs, heads * pairs) if pairs else range(heads * (n // 2) + 1)
        if angles not in allowed:
            least, most = (width - angles + count for count in (allowed[0], allowed[-1]))
            either = f"{least} or {most}" if pairs else f"{least} to {most}"
            arguments.refuse("projected", f"has {width} columns", f"of {either}, by the shape of the state")
        for name, number in (("a_min", a_min), ("epsilon", epsilon)):
            if not math.isfinite(number):
                arguments.refuse(name, f"is {number}", "finite")
        return arguments

    def make_results(self, tensors):
        projected, h0, phase0 = tensors["projected"], tensors["h0"], tensors["phase0"]
        batch, length = tensors.get("index", projected).shape[:2]
        rows, heads, n, channels = h0.shape
        slots = kept_slots(rows, batch * length)
        return {
            "out": projected.new_empty(batch, length, heads * channels),
            **{name.removesuffix("0"): tensors[name].new_empty(tensors[name].shape) for name in STATES},
            "kept": h0.new_empty(slots, heads, n, channels),
            "kept_phase": phase0.new_empty(slots, heads, phase0.shape[2], dtype=torch.float64),
        }

    def values(self, arguments):
        return super().values(arguments) | NUMBERS._asdict()


class CompiledMixerOfLetters(CompiledMixer):
    """The same of letters, with the number of each token's letter."""

    name = "mixer_cpu_letters"
    projections = LETTERS
    given = LETTERS | WEIGHTS | STATES | SEQUENCES | INDEX


mixer_operator, mixer_backward_operator = CompiledMixer().register()
letters_operator, letters_backward_operator = CompiledMixerOfLetters().register()
step_function = CompiledFunction(
    "mixer_step",
    mixer_fields()
    | dict.fromkeys(("hidden", "centred", "residual"), INTEGER)
    | {"block_epsilon": NUMBER}
    | dict.fromkeys(("x", *MixerMatrices._fields, "block_weight", "block_bias", "y"), TENSOR),
)


def mixer_cpu(
    projected: torch.Tensor,
    k: torch.Tensor | None,
    beta: torch.Tensor | None,
    weights: MixerWeights,
    state: tuple[torch.Tensor, ...],
    sequences: TokenOrder,
    index: torch.Tensor | None = None,
    *,
    contractive: bool,
    overwrites: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """
    Args:
        projected (batch, length, width): Columns z, x, B, C, dt, A, trap, angle.
        k (batch, length, heads * state), beta (batch, length, heads): None without a reflection.
        state: h, B, u and phase before these tokens, a row for each sequence.
        index (batch, length): Which letter each token is; `projected`, k and beta are then (letters, ...).

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
    given = (projected, k, beta, *weights, *state, *sequences)
    options = (contractive, overwrites, heavy_tail, a_min, epsilon)
    if index is None:
        out, h, B, u, phase, *_ = mixer_operator(*given, *options)
    else:
        out, h, B, u, phase, *_ = letters_operator(*given, index, *options)
    return out.to(dtype), (h, B, u, phase)


def step_cpu(
    x: torch.Tensor,
    sizes: MixerSizes,
    matrices: MixerMatrices,
    weights: MixerWeights,
    state: tuple[torch.Tensor, ...],
    frame: BlockFrame,
    *,
    contractive: bool,
    overwrites: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """
    One token of each row, x (rows, 1, hidden_size), through the whole mixer and the frame around it, without gradients
    and in the dtype of x. None if a tensor is not one that can be read as it stands: torch knows what to do with it, or
    what to say.
    """
    if type(x) not in PLAIN_TYPES or x.dim() != 3 or x.dtype not in DTYPES:
        return None
    dtype, rows = x.dtype, len(x)
    x, *state = (as_read(part, dtype) for part in (x, *state))
    parts = (x, *state, *matrices, *weights, frame.weight, frame.bias)
    shapes = step_shapes(rows, sizes, frame.weight is not None, frame.bias is not None)
    if not all(may_be_read(part, dtype, shape) for part, shape in zip(parts, shapes, strict=True)):
        return None
    pointers = tuple(None if part is None else part.data_ptr() for part in parts)
    template = step_template(sizes, pointers[5:], *frame[2:], contractive, overwrites, heavy_tail, a_min, epsilon)
    arguments = step_function.struct.from_buffer_copy(template)
    y, *final = (torch.empty_like(part) for part in parts[:5])
    arguments.rows = arguments.tokens = rows
    arguments.x, arguments.h0, arguments.B0, arguments.u0, arguments.phase0 = pointers[:5]
    arguments.y, arguments.h, arguments.B, arguments.u, arguments.phase = (part.data_ptr() for part in (y, *final))
    step_function.function(dtype)(ctypes.byref(arguments))
    return y, tuple(final)


def may_be_read(x, dtype: torch.dtype, shape: tuple[int, ...] | None) -> bool:
    """Whether x is what compiled code takes for a tensor of this shape, or for none."""
    return x is None if shape is None else is_plain(x, dtype, shape)


class PolicyBlock(NamedTuple):
    """What the compiled step of a whole policy takes of a block."""

    arguments: ctypes.Structure  # those of `step_function` that stay from step to step
    tensors: tuple[torch.Tensor, ...]  # which these arguments point to
    state_shapes: tuple[tuple[int, ...], ...]


def policy_block(
    dtype: torch.dtype,
    rows: int,
    sizes: MixerSizes,
    matrices: MixerMatrices,
    weights: MixerWeights,
    frame: BlockFrame,
    **options,
) -> PolicyBlock | None:
    """As `step_cpu`, but of the weights alone, for steps of `rows` tokens in this dtype."""
    parts = (*matrices, *weights, frame.weight, frame.bias)
    shapes = step_shapes(rows, sizes, frame.weight is not None, frame.bias is not None)
    if not all(may_be_read(part, dtype, shape) for part, shape in zip(parts, shapes[5:], strict=True)):
        return None
    pointers = tuple(None if part is None else part.data_ptr() for part in parts)
    arguments = step_template(sizes, pointers, *frame[2:], **options)
    return PolicyBlock(arguments, tuple(part for part in parts if part is not None), shapes[1:5])


def as_read(x, dtype: torch.dtype):
    """A plain tensor in this dtype and in one piece; anything else as it is."""
    return x.to(dtype).contiguous() if type(x) in PLAIN_TYPES and x.layout is torch.strided else x


@lru_cache(maxsize=1024)
def step_shapes(rows: int, sizes: MixerSizes, has_norm: bool, has_bias: bool) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of x, the state, the matrices, the weights and the frame of a step; None where nothing is to be."""
    hidden, heads, n, channels = sizes[:4]
    inner, carries, reflects = heads * channels, sizes.carries, sizes.reflects
    return (
        (rows, 1, hidden),
        (rows, heads, n, channels),
        (rows, heads, n if carries else 0),
        (rows, heads, channels if carries else 0),
        (rows, heads, sizes.pairs),
        (sizes.width, hidden),
        (heads * n, hidden) if reflects else None,
        (heads, hidden) if reflects else None,
        (heads,) if reflects else None,
        (hidden, inner),
        (heads,),
        (heads,) if sizes.exact_gates else None,
        (n,) if carries else None,
        (heads, 1, n) if carries else None,
        (n,),
        (heads, 1, n),
        (heads,),
        (inner,) if sizes.output_norm else None,
        (hidden,) if has_norm else None,
        (hidden,) if has_norm and has_bias else None,
    )


@lru_cache(maxsize=1024)
def step_template(
    sizes: MixerSizes,
    pointers: tuple[int | None, ...],
    block_epsilon: float,
    centred: bool,
    residual: bool,
    contractive: bool,
    overwrites: bool,
    heavy_tail: bool,
    a_min: float,
    epsilon: float,
) -> ctypes.Structure:
    """
    The part of a step's arguments that stays from one to the next; to fill the struct takes longer than the step. It
    holds these arguments and nothing else, so that it is right for whatever lies at the pointers.
    """
    names = (*MixerMatrices._fields, *MixerWeights._fields, "block_weight", "block_bias")
    return step_function.struct(
        equal_length=1,
        hidden=sizes.hidden,
        width=sizes.width,
        heads=sizes.heads,
        state=sizes.state,
        channels=sizes.channels,
        pairs=sizes.pairs,
        threads=1,
        block_epsilon=block_epsilon,
        centred=centred,
        residual=residual,
        contractive=contractive,
        overwrites=overwrites,
        heavy_tail=heavy_tail,
        a_min=a_min,
        epsilon=epsilon,
        **NUMBERS._asdict(),
        **dict(zip(names, pointers, strict=True)),
    )
