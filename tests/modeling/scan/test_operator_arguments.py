"""Nothing that is handed to a compiled operator, or to what calls it, ends the process or gives a wrong number."""

import subprocess
import sys

import pytest
import torch

from helpers.family_cases import build_case
from helpers.fuzz_targets import TARGETS
from helpers.mixer_cases import delta_operator_arguments, make_delta_mixer, operator_arguments
from helpers.model_cases import build
from helpers.places import PROGRAMS
from helpers.scan_cases import scan_inputs, scan_state
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.mixers import delta_cpu
from mamba3_nplr.modeling.mixers import mamba3_cpu as mixer_cpu
from mamba3_nplr.modeling.mixers.delta import DeltaState
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu import operator as scan_cpu
from mamba3_nplr.modeling.scan.definition import ScanInputs
from mamba3_nplr.modeling.scan.differentiable_operator import NAMESPACE
from mamba3_nplr.modeling.scan.dispatch import BACKENDS, scan
from mamba3_nplr.modeling.scan.operator_arguments import SCAN_GIVEN
from mamba3_nplr.modeling.scan.sequences import TokenOrder, token_order
from mamba3_nplr.modeling.scan.triton import operator as scan_triton
from mamba3_nplr.modeling.scan.triton.launch import interpreted
from programs.fuzz_operators import outcome

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")

MASK = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


def scan_call() -> dict:
    inputs = scan_inputs(batch=3, length=5, dtype=torch.float32)
    state, order = scan_state(inputs), token_order(MASK, None, 3, 5)
    return inputs._asdict() | dict(zip(("h0", "B0", "u0"), state, strict=True)) | order._asdict()


def mixer_call() -> dict:
    mixer = build(Mamba3NPLRModel, "exact_gates", torch.float32, output_norm=True).layers[0].mixer
    values = operator_arguments(mixer, rows=3, length=5)
    names = (*mixer_cpu.CompiledMixer.given, *mixer.options)
    return dict(zip(names, values, strict=True)) | token_order(MASK, None, 3, 5)._asdict()


def delta_call() -> dict:
    mixer = make_delta_mixer("gdp_everything", torch.float32)
    values = delta_operator_arguments(mixer, rows=3, length=5)
    names = (*delta_cpu.CompiledDelta.given, *delta_cpu.CompiledDelta.options)
    return dict(zip(names, values, strict=True)) | token_order(MASK, None, 3, 5)._asdict()


def letters_call(call: dict, kind: type, letters: dict) -> dict:
    """The same call of another kind of operator, where each token is one of four of the `letters` of its table."""
    index = torch.tensor([[0, 3, 1, 0, 2], [3, 3, 0, 1, 1], [2, 0, 0, 0, 0]])
    call |= {name: call[name].flatten(0, 1)[:4].clone() for name in letters}
    return {name: index if name == "index" else call[name] for name in (*kind.given, *kind.options)}


def mixer_letters_call() -> dict:
    return letters_call(mixer_call(), mixer_cpu.CompiledMixerOfLetters, mixer_cpu.LETTERS)


def delta_letters_call() -> dict:
    return letters_call(delta_call(), delta_cpu.CompiledDeltaOfLetters, delta_cpu.LETTERS)


def backward_call(call: dict, operator, kind) -> dict:
    """The arguments of the gradient's operator: gradients of the outputs, and what the forward pass kept."""
    return dict(zip(kind.for_gradient, operator(*call.values()), strict=True)) | call


OPERATORS = {
    "scan_cpu": scan_call,
    "scan_cpu_backward": lambda: backward_call(scan_call(), scan_cpu.scan_operator, scan_cpu.CompiledScan),
    "mixer_cpu": mixer_call,
    "mixer_cpu_backward": lambda: backward_call(mixer_call(), mixer_cpu.mixer_operator, mixer_cpu.CompiledMixer),
    "mixer_cpu_letters": mixer_letters_call,
    "mixer_cpu_letters_backward": lambda: backward_call(
        mixer_letters_call(), mixer_cpu.letters_operator, mixer_cpu.CompiledMixerOfLetters
    ),
    "delta_cpu": delta_call,
    "delta_cpu_backward": lambda: backward_call(delta_call(), delta_cpu.delta_operator, delta_cpu.CompiledDelta),
    "delta_cpu_letters": delta_letters_call,
    "delta_cpu_letters_backward": lambda: backward_call(
        delta_letters_call(), delta_cpu.letters_operator, delta_cpu.CompiledDeltaOfLetters
    ),
    "scan_triton": scan_call,
    "scan_triton_backward": lambda: backward_call(scan_call(), scan_triton.scan_operator, scan_triton.TritonScan),
}


def without_memory(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


OPTIONAL = ("carry", "k", "reflection", "D", "beta", "A_bias", "B_weight", "B_bias", "norm_weight", "bounds", "order")
OPTIONAL += ("conv_weight", "A_log", "dt_bias")
SPOILED = {
    "dtype": lambda x: x.to(torch.int32 if x.is_floating_point() else torch.float32),
    "axis": lambda x: x[None],
    "size": lambda x: torch.cat([x, x]),
    "memory": without_memory,
    "device": lambda x: x.to("meta"),
}


SCAN_SCHEMA = """Tensor u, Tensor B, Tensor C, Tensor log_decay, Tensor write, Tensor? carry, Tensor? k,
    Tensor? reflection, Tensor? D, Tensor h0, Tensor B0, Tensor u0, Tensor? bounds, Tensor? order"""
MIXER_SCHEMA = """Tensor projected, Tensor? k, Tensor? beta, Tensor dt_bias, Tensor? A_bias, Tensor? B_weight,
    Tensor? B_bias, Tensor C_weight, Tensor C_bias, Tensor D, Tensor? norm_weight, Tensor h0, Tensor B0, Tensor u0,
    Tensor phase0, Tensor? bounds, Tensor? order, bool contractive, bool overwrites, bool heavy_tail, float a_min,
    float epsilon"""
LETTERS_SCHEMA = MIXER_SCHEMA.replace("Tensor? order,", "Tensor? order, Tensor index,")
DELTA_SCHEMA = """Tensor projected, Tensor? conv_weight, Tensor? A_log, Tensor? dt_bias, Tensor norm_weight, Tensor h0,
    Tensor last0, Tensor? bounds, Tensor? order, bool gated, float beta_max, float key_epsilon, float epsilon"""
DELTA_LETTERS_SCHEMA = DELTA_SCHEMA.replace("Tensor? order,", "Tensor? order, Tensor index,")
FOR_THE_DELTA = "Tensor grad_out, Tensor grad_h, Tensor grad_last, Tensor kept"
FOR_THE_MIXER = "Tensor grad_out, Tensor grad_h, Tensor grad_B, Tensor grad_u, Tensor grad_phase, Tensor kept"
SCHEMAS = {
    "scan_cpu": f"({SCAN_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    "scan_cpu_backward": f"(Tensor grad_y, Tensor grad_h, Tensor kept, {SCAN_SCHEMA}) -> Tensor[]",
    "scan_triton": f"({SCAN_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "scan_triton_backward": f"(Tensor grad_y, Tensor grad_h, Tensor kept, Tensor T, {SCAN_SCHEMA}) -> Tensor[]",
    "mixer_cpu": f"({MIXER_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "mixer_cpu_backward": f"({FOR_THE_MIXER}, Tensor kept_phase, {MIXER_SCHEMA}) -> Tensor[]",
    "mixer_cpu_letters": f"({LETTERS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "mixer_cpu_letters_backward": f"({FOR_THE_MIXER}, Tensor kept_phase, {LETTERS_SCHEMA}) -> Tensor[]",
    "delta_cpu": f"({DELTA_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "delta_cpu_backward": f"({FOR_THE_DELTA}, {DELTA_SCHEMA}) -> Tensor[]",
    "delta_cpu_letters": f"({DELTA_LETTERS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "delta_cpu_letters_backward": f"({FOR_THE_DELTA}, {DELTA_LETTERS_SCHEMA}) -> Tensor[]",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_keeps_its_schema(name):
    """Graphs that were saved call it by this name with these arguments."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert str(operator._schema) == f"{NAMESPACE}::{name}" + " ".join(SCHEMAS[name].split())


def test_tables_of_arguments_are_in_the_order_of_the_tuples_that_are_unpacked_into_them():
    assert tuple(SCAN_GIVEN) == (*ScanInputs._fields, "h0", "B0", "u0", *TokenOrder._fields)
    states = [f"{name}0" for name in Mamba3State._fields]
    expected = ("projected", "k", "beta", *mixer_cpu.MixerWeights._fields, *states, *TokenOrder._fields)
    assert tuple(mixer_cpu.CompiledMixer.given) == expected
    assert tuple(mixer_cpu.CompiledMixerOfLetters.given) == (*expected, "index")
    expected = ("projected", *delta_cpu.DeltaWeights._fields, "h0", "last0", *TokenOrder._fields)
    assert len(DeltaState._fields) == 2 and tuple(delta_cpu.CompiledDelta.given) == expected
    assert tuple(delta_cpu.CompiledDeltaOfLetters.given) == (*expected, "index")
    assert tuple(make_delta_mixer().options()) == tuple(delta_cpu.CompiledDelta.options)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_names_the_tensor_that_does_not_fit(name):
    if "triton" in name and not interpreted():
        pytest.skip("on a GPU there is no other device to mix in")
    operator, call = getattr(getattr(torch.ops, NAMESPACE), name), OPERATORS[name]()
    operator(*call.values())
    for argument, (kind, spoil) in ((argument, spoil) for argument in call for spoil in SPOILED.items()):
        if not torch.is_tensor(call[argument]) or not call[argument].numel():
            continue
        if argument not in OPTIONAL:  # torch takes None for a tensor
            with pytest.raises(ValueError, match=f"^{argument} is None"):
                operator(*(call | {argument: None}).values())
        if (kind, argument) == ("size", "projected") and name.startswith("delta_cpu_letters"):
            continue  # a table of more letters is one as well
        # Which of two tensors is too long shows only where they meet.
        messages = {"device": "^The tensors are on cpu, meta", "size": "^[a-zA-Z_0]+ .*must be"}
        with pytest.raises(ValueError, match=messages.get(kind, f"^{argument} ")):
            operator(*(call | {argument: spoil(call[argument])}).values())


@pytest.mark.parametrize("name", [*(name for name in OPERATORS if "cpu" in name), "scan_triton"])
def test_places_of_sequences_outside_of_the_tokens_are_refused(name):
    operator, call = getattr(getattr(torch.ops, NAMESPACE), name), OPERATORS[name]()
    bounds, order = call["bounds"], call["order"]
    for change, message in [
        ({"bounds": bounds - 1}, r"^bounds is \[\[-1"),
        ({"bounds": bounds + 11}, "^bounds is.*to 15 or less"),
        ({"bounds": bounds.flip(0)}, "^bounds is.*rising"),
        ({"bounds": None}, "^order was given without bounds"),
        ({"order": order - 1}, "^order holds -1"),
        ({"order": order + (1 << 40)}, "^order holds.*0 to 14"),
        ({"order": torch.zeros_like(order)}, "^order holds a number twice"),
        ({"order": None}, "^bounds is.*without gaps"),
    ]:
        with pytest.raises(ValueError, match=message):
            operator(*(call | change).values())


def test_options_of_a_mixer_that_belong_together_are_refused_alone():
    for change, message in [
        ({"beta": None}, "k and beta belong together; mixer_cpu was given no beta"),
        ({"B_weight": None}, "B_weight and B_bias belong together"),
        ({"B_weight": None, "B_bias": None}, "^B0 has shape.*carried_state=0"),
        ({"B_weight": None, "B_bias": None, "k": None, "beta": None}, "^k is None"),
        ({"a_min": float("nan")}, "^a_min is nan"),
        ({"epsilon": float("inf")}, "^epsilon is inf"),
        ({"phase0": torch.zeros(3, 6, 4)}, "^phase0 is of 4 pairs; .* 3 at most"),
    ]:
        with pytest.raises(ValueError, match=message):
            mixer_cpu.mixer_operator(*(mixer_call() | change).values())


def test_arguments_of_the_delta_family_that_do_not_belong_together_are_refused():
    call = delta_call()
    rows, before, convolved = call["last0"].shape
    for change, message in [
        ({"dt_bias": None}, "A_log and dt_bias belong together; delta_cpu was given no dt_bias"),
        ({"A_log": None, "dt_bias": None}, "^projected has .* columns; .* by the shape of the state"),
        ({"gated": False}, "^projected has .* columns; .* by the shape of the state"),
        ({"projected": call["projected"][..., :-1]}, "^projected has"),
        ({"projected": torch.zeros(3, 5, call["projected"].shape[2] + 1)}, "^projected has 100 columns; .* 99 or 112"),
        ({"conv_weight": None}, "^last0 holds 2 tokens; .* of 0"),
        ({"conv_weight": call["conv_weight"][:, :0]}, "^conv_weight has 0 columns"),
        ({"last0": torch.zeros(rows, before + 1, convolved)}, "^last0 holds 3 tokens; .* of 2"),
        ({"last0": torch.zeros(rows, before, convolved - 1)}, "^last0 has .* columns; .* for each delta step"),
        ({"last0": torch.zeros(rows, before, 12)}, "^last0 has 12 columns"),
        ({"h0": torch.zeros(3, 0, 4, 6)}, "^last0 has .* columns"),
        ({"beta_max": float("nan")}, "^beta_max is nan"),
        ({"key_epsilon": float("inf")}, "^key_epsilon is inf"),
        ({"epsilon": float("inf")}, "^epsilon is inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            delta_cpu.delta_operator(*(call | change).values())


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 40])
@pytest.mark.parametrize("name", ["mixer_cpu_letters", "delta_cpu_letters"])
def test_letters_that_are_not_there_are_refused(name, wrong):
    operator, call = getattr(getattr(torch.ops, NAMESPACE), name), OPERATORS[name]()
    call["index"][2, 4] = wrong  # padding: nobody would read it
    with pytest.raises(ValueError, match=f"^index holds {wrong}; for {name} it must be of numbers 0 to 3"):
        operator(*call.values())


def mixers(backend: str) -> dict:
    """One of each family, in float64."""
    made = {"mamba3": build(Mamba3NPLRModel), "delta": build_case("gdp_everything"), "ids4": build_case("ids4")}
    for model in made.values():
        model.config.scan_backend = backend
    return {name: model.layers[0].mixer for name, model in made.items()}


@pytest.mark.parametrize("backend", ["auto", "cpu", "chunkwise", "reference"])
@pytest.mark.parametrize("family", ["mamba3", "delta", "ids4"])
def test_a_mask_of_numbers_is_one_of_booleans_or_refused(family, backend):
    mixer, x = mixers(backend)[family], torch.randn(3, 5, 12, dtype=torch.float64)
    expected, _ = mixer(x, mask=MASK)
    for dtype in (torch.float32, torch.int64, torch.uint8, torch.float16):
        assert torch.equal(mixer(x, mask=MASK.to(dtype))[0], expected)
    for other in (2, -1, 0.5, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match=f"mask holds {other}.*booleans, or of 0 at padding and 1 at tokens"):
            mixer(x, mask=torch.where(MASK, 1.0, other))
    for other in (MASK.to(torch.complex64), MASK.tolist()):
        with pytest.raises(ValueError, match="mask is of .*it must be a tensor of booleans"):
            mixer(x, mask=other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scan_takes_the_same_masks(backend):
    inputs = scan_inputs(batch=3, length=5, dtype=torch.float32)
    expected, _ = scan(*inputs[:5], D=inputs.D, mask=MASK, backend=backend)
    found, _ = scan(*inputs[:5], D=inputs.D, mask=MASK.float(), backend=backend)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="mask holds 2"):
        scan(*inputs[:5], D=inputs.D, mask=2 * MASK.int(), backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "chunkwise"])
@pytest.mark.parametrize("family", ["mamba3", "delta", "ids4"])
def test_a_state_of_another_batch_or_mixer_is_refused_by_its_part(family, backend):
    mixer, x = mixers(backend)[family], torch.randn(3, 5, 12, dtype=torch.float64)
    _, state = mixer(x)
    for name, part in state._asdict().items():
        changed = {
            "shape": (part[:2], torch.cat([part, part]), part[..., :1], part[..., None]),
            "is a": (part.to("meta"), part.long(), part.to_sparse(), part.tolist()),
        }
        for words, others in changed.items():
            for other in others:
                if torch.is_tensor(other) and other.shape == part.shape and words == "shape":
                    continue
                with pytest.raises(ValueError, match=f"state.{name} .*{words}"):
                    mixer(x, state._replace(**{name: other}))
    with pytest.raises(ValueError, match="state is a tuple of 1; it must be"):
        mixer(x, (state[0],))
    with pytest.raises(ValueError, match=r"state\.h has shape \(3.*need \(2"):
        mixer(x.view(1, 15, 12), state, cu_seqlens=torch.tensor([0, 7, 15]))


def test_a_state_without_phase_is_refused_by_a_mixer_with_rope():
    mixer, x = mixers("cpu")["mamba3"], torch.randn(3, 5, 12, dtype=torch.float64)
    other = build(Mamba3NPLRModel, "no_rope").layers[0].mixer
    with pytest.raises(ValueError, match=r"state\.phase has shape \(3, 6, 0\).*need \(3, 6, 2\)"):
        mixer(x, other(x)[1])


@pytest.mark.parametrize("name", TARGETS)
def test_random_calls_are_right_or_refused(name):
    """A few calls of each kind here; many more, under the sanitizers, in the slow test."""
    ends = {outcome(list(TARGETS).index(name) + len(TARGETS) * number, seed=1)[1] for number in range(8)}
    assert ends <= {"right", "refused"}


@pytest.mark.slow
def test_no_wrong_call_is_a_fault():
    program = PROGRAMS / "fuzz_operators.py"
    done = subprocess.run([sys.executable, program, "--calls", "1400"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
