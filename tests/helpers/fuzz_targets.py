"""What is called with random arguments: for each a right call to start from, and the definition to compare with."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

from helpers.family_cases import DELTA_CASES, build_case
from helpers.mixer_cases import make_delta_mixer
from helpers.model_cases import OPTIONS, SIZES, build
from helpers.scan_cases import scan_inputs, scan_state
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRModel
from mamba3_nplr.modeling.mixers import delta, delta_cpu
from mamba3_nplr.modeling.mixers import mamba3_cpu as mixer_cpu
from mamba3_nplr.modeling.mixers.delta import DeltaState
from mamba3_nplr.modeling.mixers.joined_projections import project
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State
from mamba3_nplr.modeling.scan.cpu import operator as scan_cpu
from mamba3_nplr.modeling.scan.definition import VECTORS, ScanInputs, ScanState, scan_definition
from mamba3_nplr.modeling.scan.differentiable_operator import NAMESPACE
from mamba3_nplr.modeling.scan.dispatch import scan
from mamba3_nplr.modeling.scan.operator_arguments import SEQUENCES
from mamba3_nplr.modeling.scan.sequences import token_order

# What gradients are of.
SCAN_LEAVES = (*ScanInputs._fields, "h0", "B0", "u0")
MIXER_LEAVES = (*mixer_cpu.TOKENS, *mixer_cpu.WEIGHTS, *mixer_cpu.STATES)
DELTA_LEAVES = (*delta_cpu.TOKENS, *delta_cpu.WEIGHTS, *delta_cpu.STATES)
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.2}


@dataclass
class Call:
    arguments: dict
    run: Callable[[dict], list[torch.Tensor]]
    reference: Callable[[dict], list[torch.Tensor | None]]
    tolerance: float


def random_sequences(draw: random.Random) -> tuple[int, int, dict]:
    """A batch, a length, and a mask or bounds or nothing."""
    kind, length = draw.choice(["rows", "mask", "packed"]), draw.choice([0, 1, 2, 7, 16, 17, 35])
    if kind == "packed":
        cuts = sorted(draw.randint(0, length) for _ in range(draw.randint(0, 3)))
        return 1, length, {"cu_seqlens": torch.tensor([0, *cuts, length])}
    batch = draw.randint(1, 3)
    return batch, length, {"mask": torch.rand(batch, length) < 0.6} if kind == "mask" else {}


def row_count(batch: int, sequences: dict) -> int:
    return len(sequences["cu_seqlens"]) - 1 if "cu_seqlens" in sequences else batch


def in_rows(tensors: list, batch: int, length: int, bounds, order):
    """For each sequence the numbers of its tokens, and what these tensors (batch, length, ...) hold of them."""
    tokens = torch.arange(batch * length) if order is None else order
    starts = torch.arange(batch) * length
    bounds = torch.stack([starts, starts + length], dim=1) if bounds is None else bounds
    for start, end in bounds.tolist():
        at = tokens[start:end]
        yield at, [None if x is None else x.flatten(0, 1)[at][None] for x in tensors]


def plain(arguments: dict) -> dict:
    """Copies with leaves of their own."""

    def copied(x):
        if not torch.is_tensor(x) or x.numel() > 1 << 20:  # the same number again and again
            return x
        return x.detach().resolve_neg().clone().requires_grad_(x.is_floating_point())

    return {name: copied(x) for name, x in arguments.items()}


# The scan


def scan_arguments(draw: random.Random, dtypes=tuple(TOLERANCES)) -> tuple[dict, dict, torch.dtype]:
    dtype = draw.choice(dtypes)
    batch, length, sequences = random_sequences(draw)
    form = draw.choice(["contractive", "rank0", "delta"])
    n, channels = draw.choice([(16, 16), (3, 5), (1, 1), (8, 20)])
    inputs = scan_inputs(batch, length, draw.randint(1, 3), n, channels, form)
    state = scan_state(inputs, row_count(batch, sequences))
    inside = torch.promote_types(dtype, torch.float32)
    given = inputs._asdict() | dict(zip(("h0", "B0", "u0"), state, strict=True))
    given = {name: None if x is None else x.to(dtype if name in VECTORS else inside) for name, x in given.items()}
    return given, sequences, dtype


def scan_by_rows(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """y and h by the definition, a sequence at a time."""
    inside = given["log_decay"].dtype
    batch, length = given["u"].shape[:2]
    inputs = [None if given[name] is None else given[name].to(inside) for name in ScanInputs._fields]
    state = [given[name] for name in ("h0", "B0", "u0")]
    y, last = torch.zeros_like(inputs[0]).flatten(0, 1), []
    rows = in_rows(inputs[:-1], batch, length, given["bounds"], given["order"])
    for row, (at, parts) in enumerate(rows):
        one, h = scan_definition(ScanInputs(*parts, inputs[-1]), ScanState(*(x[row : row + 1] for x in state)), 1)
        y, last = y.index_copy(0, at, one[0]), [*last, h]
    return y.view(inputs[0].shape).to(given["u"].dtype), torch.cat(last)


def scan_operator_call(draw: random.Random) -> Call:
    given, sequences, dtype = scan_arguments(draw)
    order = token_order(sequences.get("mask"), sequences.get("cu_seqlens"), *given["u"].shape[:2])
    given |= order._asdict()
    return Call(
        given,
        lambda given: [x.detach() for x in scan_cpu.scan_operator(*given.values())[:2]],
        lambda given: [x.detach() for x in scan_by_rows(plain(given))],
        TOLERANCES[dtype],
    )


def scan_backward_call(draw: random.Random) -> Call:
    call = scan_operator_call(draw)
    y, h, kept = scan_cpu.scan_operator(*call.arguments.values())
    before = {"grad_y": torch.randn_like(y), "grad_h": torch.randn_like(h), "kept": kept}
    original = {"kept": kept} | call.arguments

    def reference(given: dict) -> list[torch.Tensor]:
        given = plain(given)
        leaves = [given[name] for name in SCAN_LEAVES if given[name] is not None]
        y, h = scan_by_rows(given)
        total = (given["grad_y"] * y).sum() + (given["grad_h"] * h).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return grads if unchanged(given, original) else [None] * len(grads)

    def run(given: dict) -> list[torch.Tensor]:
        return scan_cpu.scan_backward_operator(*given.values())

    return Call(before | call.arguments, run, reference, 10 * call.tolerance)


def scan_call(draw: random.Random) -> Call:
    given, sequences, dtype = scan_arguments(draw)
    given |= {"mask": None, "cu_seqlens": None, "chunk_size": draw.choice([4, 64])} | sequences

    def run(given: dict, backend: str) -> list[torch.Tensor]:
        named = dict(given)
        state = [named.pop(name) for name in ("h0", "B0", "u0")]
        positional = [named.pop(name) for name in ("u", "B", "C", "log_decay", "write")]
        state = None if state[0] is None else ScanState(*state)
        y, state = scan(*positional, **named, initial_state=state, backend=backend)
        return [y.detach(), *(x.detach() for x in state)]

    return Call(
        given, lambda given: run(given, "cpu"), lambda given: run(plain_values(given), "reference"), TOLERANCES[dtype]
    )


def plain_values(arguments: dict) -> dict:
    return {name: x.detach() if torch.is_tensor(x) else x for name, x in plain(arguments).items()}


def unchanged(given: dict, original: dict) -> bool:
    """Whether what the forward pass kept is still that of these arguments."""

    def same(x, other) -> bool:
        if torch.is_tensor(x) and torch.is_tensor(other):
            return torch.equal(x.nan_to_num(), other.nan_to_num())
        return type(x) is type(other) and x == other

    return all(same(given[name], x) for name, x in original.items())


# The mixer between its projections


def mixer_by_rows(mixer, given: dict) -> list[torch.Tensor]:
    """The output and the state of the mixer in torch with these weights, a sequence at a time."""
    mixer = with_options(mixer, given)
    mixer.config.scan_backend = "reference"
    for name in ("dt_bias", "A_bias", "B_bias", "C_bias", "D"):
        replace(mixer, name, given[name])
    for norm, name in (("B_norm", "B_weight"), ("C_norm", "C_weight"), ("norm", "norm_weight")):
        if getattr(mixer, norm) is not None:
            replace(getattr(mixer, norm), "weight", given[name])
    projected, state = given["projected"], [given[name] for name in ("h0", "B0", "u0", "phase0")]
    batch, length = projected.shape[:2]
    out = projected.new_zeros(batch * length, mixer.config.num_heads * mixer.config.head_dim)
    tokens, last = [given[name] for name in ("projected", "k", "beta")], []
    for row, (at, parts) in enumerate(in_rows(tokens, batch, length, given["bounds"], given["order"])):
        one, final = mixer.mix(*parts, Mamba3State(*(x[row : row + 1] for x in state)), None, None)
        out, last = out.index_copy(0, at, one[0].to(out.dtype)), [*last, final]
    return [out.view(batch, length, out.shape[-1]), *(torch.cat(parts) for parts in zip(*last, strict=True))]


def comparable(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and state, with the sine and cosine of the phase, which is the same at pi and -pi."""
    *outputs, phase = (x.detach() for x in outputs)
    return [*outputs, phase.sin(), phase.cos()]


def replace(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Not by a parameter: the gradient is that of the value."""
    module._parameters.pop(name, None)
    setattr(module, name, value)


def mixer_operator_call(draw: random.Random) -> Call:
    return make_mixer_call(draw)[0]


def make_mixer_call(draw: random.Random) -> tuple[Call, nn.Module]:
    dtype, option = draw.choice([torch.float64, torch.float32]), draw.choice(list(OPTIONS))
    sizes = draw.choice([{}, {"state_size": 16, "head_dim": 16, "hidden_size": 16}, {"state_size": 5, "head_dim": 3}])
    mixer = build(Mamba3NPLRModel, option, dtype, num_hidden_layers=1, **sizes).layers[0].mixer
    batch, length, sequences = random_sequences(draw)
    x = torch.randn(batch, length, mixer.config.hidden_size, dtype=dtype)
    k, beta = (None, None) if mixer.k_proj is None else (mixer.k_proj(x), mixer.beta_proj(x))
    state = (torch.randn(shape, dtype=dtype) for shape in mixer.state_shapes(row_count(batch, sequences)))
    order = token_order(sequences.get("mask"), sequences.get("cu_seqlens"), batch, length)
    values = (mixer.in_proj(x), k, beta, *mixer.weights(), *state, *order)
    values = (None if x is None else x.detach().clone() for x in values)
    given = dict(zip(mixer_cpu.CompiledMixer.given, values, strict=True))
    call = Call(
        given | mixer.options,
        lambda given: comparable(mixer_cpu.mixer_operator(*given.values())[:5]),
        lambda given: comparable(mixer_by_rows(mixer, plain(given))),
        TOLERANCES[dtype],
    )
    return call, mixer


def with_options(mixer, given: dict):
    """A copy with other options."""
    mixer = copy.deepcopy(mixer)
    mixer.config.reflection_form = "contractive" if given["contractive"] else "additive"
    if mixer.config.injection != "trapezoid":
        mixer.config.injection = "overwrite" if given["overwrites"] else "delta"
    mixer.config.decay_activation = "heavy_tail" if given["heavy_tail"] else "softplus"
    mixer.config.a_min = float(given["a_min"])
    for norm in (mixer.B_norm, mixer.C_norm, mixer.norm):
        if norm is not None:
            norm.eps = given["epsilon"]
    return mixer


def mixer_backward_call(draw: random.Random) -> Call:
    call, mixer = make_mixer_call(draw)
    return backward_call(call, mixer_cpu.CompiledMixer, MIXER_LEAVES, lambda given: mixer_by_rows(mixer, given))


def backward_call(call: Call, kind: type, leaf_names: tuple[str, ...], by_rows) -> Call:
    """The gradient of a call of the operator of a mixer; `by_rows` is the mixer in torch."""
    operators = getattr(torch.ops, NAMESPACE)
    operator, gradient_operator = (getattr(operators, kind.name + x) for x in ("", "_backward"))
    results = dict(zip(kind.for_gradient, operator(*call.arguments.values()), strict=True))
    names = [name for name in results if name.startswith("grad_")]
    before = {name: torch.randn_like(x) if name in names else x for name, x in results.items()}
    original = {name: x for name, x in results.items() if name not in names} | call.arguments

    def reference(given: dict) -> list[torch.Tensor]:
        given = plain(given)
        leaves = [given[name] for name in leaf_names if given[name] is not None]
        total = sum((given[name] * x).sum() for name, x in zip(names, by_rows(given), strict=True))
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return grads if unchanged(given, original) else [None] * len(grads)

    def run(given: dict) -> list[torch.Tensor]:
        return gradient_operator(*given.values())

    return Call(before | call.arguments, run, reference, 100 * call.tolerance)


# The mixer of the delta family between its projections


def delta_by_rows(mixer, given: dict) -> list[torch.Tensor]:
    """The output and the state of the mixer in torch with these weights, a sequence at a time."""
    mixer = copy.deepcopy(mixer)
    mixer.config.scan_backend, mixer.config.beta_max = "reference", float(given["beta_max"])
    mixer.conv_weight = lambda: given["conv_weight"]
    for module, name, value in (
        (mixer, "A_log", given["A_log"]),
        (mixer, "dt_bias", given["dt_bias"]),
        (mixer.o_norm, "weight", given["norm_weight"]),
    ):
        replace(module, name, value)
    mixer.o_norm.eps = given["epsilon"]
    projected, state = given["projected"], DeltaState(given["h0"], given["last0"])
    batch, length = projected.shape[:2]
    out, last = projected.new_zeros(batch * length, mixer.o_proj.in_features), []
    with mock.patch.object(delta, "KEY_EPSILON", given["key_epsilon"]):
        for row, (at, [part]) in enumerate(in_rows([projected], batch, length, given["bounds"], given["order"])):
            one, final = mixer.mix(part, DeltaState(*(x[row : row + 1] for x in state)), None, None)
            out, last = out.index_copy(0, at, one[0].to(out.dtype)), [*last, final]
    return [out.view(batch, length, out.shape[-1]), *(torch.cat(parts) for parts in zip(*last, strict=True))]


def delta_operator_call(draw: random.Random) -> Call:
    return make_delta_call(draw)[0]


def make_delta_call(draw: random.Random) -> tuple[Call, nn.Module]:
    dtype, case = draw.choice([torch.float64, torch.float32]), draw.choice(DELTA_CASES)
    sizes = draw.choice([{}, {"head_key_dim": 16, "head_value_dim": 16}, {"head_key_dim": 5, "head_value_dim": 3}])
    mixer = make_delta_mixer(case, dtype, **sizes)
    batch, length, sequences = random_sequences(draw)
    projected = project(mixer, list(mixer.projections), torch.randn(batch, length, 12, dtype=dtype))
    state = (torch.randn(shape, dtype=dtype) for shape in mixer.state_shapes(row_count(batch, sequences)))
    order = token_order(sequences.get("mask"), sequences.get("cu_seqlens"), batch, length)
    values = (projected, *mixer.weights(), *state, *order)
    values = (None if x is None else x.detach().clone() for x in values)
    call = Call(
        dict(zip(delta_cpu.CompiledDelta.given, values, strict=True)) | mixer.options(),
        lambda given: detached(delta_cpu.delta_operator(*given.values())[:3]),
        lambda given: detached(delta_by_rows(mixer, plain(given))),
        TOLERANCES[dtype],
    )
    return call, mixer


def delta_backward_call(draw: random.Random) -> Call:
    call, mixer = make_delta_call(draw)
    return backward_call(call, delta_cpu.CompiledDelta, DELTA_LEAVES, lambda given: delta_by_rows(mixer, given))


# Both mixers of letters


def mixer_letters_call(draw: random.Random) -> Call:
    return make_mixer_letters_call(draw)[0]


def mixer_letters_backward_call(draw: random.Random) -> Call:
    return backward_call(*make_mixer_letters_call(draw))


def delta_letters_call(draw: random.Random) -> Call:
    return make_delta_letters_call(draw)[0]


def delta_letters_backward_call(draw: random.Random) -> Call:
    return backward_call(*make_delta_letters_call(draw))


def make_mixer_letters_call(draw: random.Random):
    call, mixer = make_mixer_call(draw)
    kind, by_rows = mixer_cpu.CompiledMixerOfLetters, lambda given: mixer_by_rows(mixer, by_token(given))
    given = as_letters(call.arguments, mixer_cpu.TOKENS, draw)
    return letters_call(given, call, kind, comparable, by_rows), kind, MIXER_LEAVES, by_rows


def make_delta_letters_call(draw: random.Random):
    call, mixer = make_delta_call(draw)
    kind, by_rows = delta_cpu.CompiledDeltaOfLetters, lambda given: delta_by_rows(mixer, by_token(given))
    given = as_letters(call.arguments, delta_cpu.TOKENS, draw)
    return letters_call(given, call, kind, detached, by_rows), kind, DELTA_LEAVES, by_rows


def as_letters(given: dict, names, draw: random.Random) -> dict:
    """The arguments of an operator for letters, of which there may be more than tokens."""
    batch, length = given["projected"].shape[:2]
    letters = draw.choice([1, 3, 70])
    changed = {name: x.new_empty(letters, *x.shape[2:]).normal_() for name in names if (x := given[name]) is not None}
    index = torch.randint(letters, (batch, length))
    values = list((given | changed).items())
    end = 1 + max(place for place, name in enumerate(given) if name in SEQUENCES)
    return dict([*values[:end], ("index", index), *values[end:]])  # options come after it


def by_token(given: dict) -> dict:
    """What the operator for tokens would be given."""
    index = given["index"]
    taken = {name: x[index] for name in mixer_cpu.TOKENS if (x := given.get(name)) is not None}
    return given | taken


def letters_call(given: dict, call: Call, kind: type, unpack, by_rows) -> Call:
    operator = getattr(getattr(torch.ops, NAMESPACE), kind.name)
    outputs = sum(name.startswith("grad_") for name in kind.for_gradient)
    return Call(
        given,
        lambda given: unpack(operator(*given.values())[:outputs]),
        lambda given: unpack(by_rows(plain(given))),
        call.tolerance,
    )


def detached(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach() for x in outputs]


# Mixers and models


def module_call(module: nn.Module, given: dict, draw: random.Random, dtype: torch.dtype, unpack) -> Call:
    with_gradients = draw.random() < 0.5

    def run(given: dict, backend: str) -> list[torch.Tensor]:
        for part in module.modules():
            if hasattr(part, "config"):
                part.config.scan_backend = backend
        with torch.set_grad_enabled(with_gradients):
            return [x.detach() for x in unpack(module, given)]

    return Call(
        given, lambda given: run(given, "cpu"), lambda given: run(plain_values(given), "reference"), TOLERANCES[dtype]
    )


def some_model(draw: random.Random, dtype: torch.dtype, **changes) -> nn.Module:
    if draw.random() < 0.6:
        return build(Mamba3NPLRModel, draw.choice(list(OPTIONS)), dtype, **changes)
    return build_case(draw.choice(DELTA_CASES), dtype=dtype, **changes)


def mixer_call(draw: random.Random) -> Call:
    dtype = draw.choice([torch.float64, torch.float32])
    mixer = some_model(draw, dtype, num_hidden_layers=1).layers[0].mixer
    batch, length, sequences = random_sequences(draw)
    shapes = mixer.state_shapes(row_count(batch, sequences))
    given = {"hidden_states": torch.randn(batch, length, 12, dtype=dtype), "mask": None, "cu_seqlens": None}
    given |= sequences | {name: torch.randn(shape, dtype=dtype) for name, shape in shapes._asdict().items()}

    def unpack(mixer, given: dict) -> list[torch.Tensor]:
        given = dict(given)
        state = type(shapes)(*(given.pop(name) for name in shapes._fields))
        y, state = mixer(**given, state=state)
        return comparable([y, *state]) if "phase" in shapes._fields else [y, *state]

    return module_call(mixer, given, draw, dtype, unpack)


def model_call(draw: random.Random) -> Call:
    dtype = draw.choice([torch.float64, torch.float32])
    model = some_model(draw, dtype)
    batch, length, sequences = random_sequences(draw)
    given = {"attention_mask": sequences.get("mask"), "cu_seqlens": sequences.get("cu_seqlens"), "position_ids": None}
    if draw.random() < 0.5:
        given["input_ids"] = torch.randint(0, SIZES["vocab_size"], (batch, length))
    else:
        given["inputs_embeds"] = torch.randn(batch, length, 12, dtype=dtype)
    return module_call(model, given, draw, dtype, lambda model, given: [model(**given).last_hidden_state])


def policy_call(draw: random.Random) -> Call:
    """A step after another one, which is a single call of the library for the whole policy."""
    dtype = draw.choice([torch.float64, torch.float32])
    sizes = draw.choice([{}, {"state_size": 16, "head_dim": 16, "hidden_size": 16}])
    policy = build(Mamba3NPLRForBehaviorCloning, draw.choice(list(OPTIONS)), dtype, **sizes)
    size = policy.config.observation_size
    given = {"observation": torch.randn(draw.choice([(size,), (1, size), (3, size)]), dtype=dtype)}
    first = torch.randn_like(given["observation"])

    def unpack(policy, given: dict) -> list[torch.Tensor]:
        policy.reset()
        policy.select_action(first)
        return [torch.as_tensor(policy.select_action(**given))]

    return module_call(policy, given, draw, dtype, unpack)


TARGETS = {
    "scan_cpu": scan_operator_call,
    "scan_cpu_backward": scan_backward_call,
    "mixer_cpu": mixer_operator_call,
    "mixer_cpu_backward": mixer_backward_call,
    "delta_cpu": delta_operator_call,
    "delta_cpu_backward": delta_backward_call,
    "mixer_cpu_letters": mixer_letters_call,
    "mixer_cpu_letters_backward": mixer_letters_backward_call,
    "delta_cpu_letters": delta_letters_call,
    "delta_cpu_letters_backward": delta_letters_backward_call,
    "scan()": scan_call,
    "mixers": mixer_call,
    "models": model_call,
    "policies": policy_call,
}
