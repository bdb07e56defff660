"""The compiled mixer of the delta family: the torch one on fuzzed shapes with every option, and as an operator."""

import ctypes
import itertools
import random

import pytest
import torch
from torch import nn

from helpers.family_cases import DELTA_CASES, build_case, case_config
from helpers.mixer_cases import (
    assert_close,
    delta_operator_arguments,
    make_delta_mixer,
    random_delta_state,
    results_and_gradients,
    run,
)
from helpers.sanitized import SANITIZERS, run_sanitized
from helpers.scan_cases import error
from helpers.vector_widths import run_with_vectors_of
from mamba3_nplr import DeltaFamilyModel
from mamba3_nplr.modeling.mixers import delta, joined_projections
from mamba3_nplr.modeling.mixers.delta import DeltaState
from mamba3_nplr.modeling.mixers.delta_backends import DELTA_BACKENDS
from mamba3_nplr.modeling.mixers.delta_cpu import (
    COLUMNS,
    CompiledDelta,
    DeltaWeights,
    delta_cpu,
    delta_operator,
    kept_slots,
    letters_operator,
)
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.compiled import library as compiled_library
from mamba3_nplr.modeling.scan.sequences import TokenOrder

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")


def fuzzed_cases(count=48):
    """
    All options, with sizes that fill vectors and that do not, lengths around a segment's, more delta steps than a
    segment has, and convolutions that reach over several segments.
    """
    generator = random.Random(0)
    sizes = [(16, 16), (4, 6), (2, 3), (32, 64), (5, 3), (3, 16), (7, 12), (32, 32), (20, 24), (16, 48)]
    for number in range(count):
        keys, values = sizes[number % len(sizes)]
        yield {
            "case": "gdn",
            "batch": generator.randint(1, 3),
            "length": generator.choice([1, 2, 15, 16, 17, 31, 33, 50]),
            "num_heads": generator.choice([1, 2, 3, 5]),
            "head_key_dim": keys,
            "head_value_dim": values,
            "num_householder": generator.choice([1, 1, 2, 3, 4, 5, 16, 17]),
            "conv_size": generator.choice([0, 0, 1, 2, 4, 7, 20]),
            "use_decay": generator.random() < 0.5,
            "use_output_gate": generator.random() < 0.5,
            "beta_max": generator.choice([1, 2, 0.5]),
        }


@pytest.mark.parametrize("case", list(fuzzed_cases()), ids=str)
def test_the_compiled_mixer_is_the_one_in_torch(case):
    sizes = dict(case)
    name, batch, length = (sizes.pop(name) for name in ("case", "batch", "length"))
    mixer = make_delta_mixer(name, **sizes)
    x, state = torch.randn(batch, length, 12, dtype=torch.float64), random_delta_state(mixer, batch)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize(("rows", "heads"), [(33, 6), (33, 18), (600, 1)])
def test_many_rows(case, rows, heads):
    """
    With rows enough for all threads, several heads are one piece of work, and 18 heads are one piece and a rest; of
    more rows, several are one.
    """
    mixer = make_delta_mixer(case, num_heads=heads, head_key_dim=3, head_value_dim=2)
    x, state = torch.randn(rows, 18, 12, dtype=torch.float64), random_delta_state(mixer, rows)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


@pytest.mark.parametrize("case", DELTA_CASES)
def test_padded_and_packed_sequences(case):
    mixer = make_delta_mixer(case)
    x = torch.randn(3, 40, 12, dtype=torch.float64)
    mask = torch.rand(3, 40) < 0.6
    mask[1] = False
    state = random_delta_state(mixer, 3)
    found = run(mixer, x, state, "cpu", mask=mask)
    assert_close(found, run(mixer, x, state, "reference", mask=mask), 1e-10)
    assert torch.equal(found["final_h"][1], state.h[1]) and torch.equal(found["final_tokens"][1], state.tokens[1])
    x, state = x.reshape(1, 120, 12), random_delta_state(mixer, 6)
    packed = {"cu_seqlens": torch.tensor([0, 1, 1, 18, 20, 50, 120])}
    assert_close(run(mixer, x, state, "cpu", **packed), run(mixer, x, state, "reference", **packed), 1e-10)


@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize("batch", [0, 2])
def test_without_any_token_the_state_and_its_gradient_pass(case, batch):
    mixer = make_delta_mixer(case)
    x, state = torch.randn(batch, 0, 12, dtype=torch.float64), random_delta_state(mixer, batch)
    found = run(mixer, x, state, "cpu")
    assert_close(found, run(mixer, x, state, "reference"), 1e-10)
    assert torch.equal(found["final_h"], state.h) and torch.equal(found["final_tokens"], state.tokens)
    assert not any(found[f"grad_{name}"].any() for name, _ in mixer.named_parameters())


@pytest.mark.parametrize("case", DELTA_CASES)
@torch.no_grad()
def test_pieces_of_any_length_are_the_whole(case):
    mixer = make_delta_mixer(case)
    mixer.config.scan_backend = "cpu"
    x, start = torch.randn(2, 45, 12, dtype=torch.float64), random_delta_state(mixer, 2)
    expected, final = mixer(x, start)
    outputs, state = [], start
    for piece in x.split([1, 1, 16, 0, 3, 24], dim=1):
        y, state = mixer(piece, state)
        outputs.append(y)
    assert error(torch.cat(outputs, dim=1), expected) < 1e-12
    for found, part in zip(state, final, strict=True):
        assert part.numel() == 0 or error(found, part) < 1e-12


MASK = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.6
MASK[1] = False
SEQUENCES = {
    "rows": (3, 40, 3, {}),
    "many rows": (600, 3, 600, {}),
    "padded": (3, 40, 3, {"mask": MASK}),
    "packed": (1, 120, 5, {"cu_seqlens": torch.tensor([0, 1, 1, 18, 50, 120])}),
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("backend", ["cpu", "chunkwise"])
@pytest.mark.parametrize("case", DELTA_CASES)
def test_letters_change_no_result_and_no_gradient(case, backend, sequences):
    batch, length, rows, named = SEQUENCES[sequences]
    mixer, letters = make_delta_mixer(case), torch.randn(5, 12, dtype=torch.float64)
    index, state = torch.randint(5, (batch, length)), random_delta_state(mixer, rows)
    found = run(mixer, letters, state, backend, index=index, **named)
    expected = run(mixer, letters[index], state, backend, **named)
    by_token = expected.pop("grad_x").flatten(0, 1)
    expected["grad_x"] = torch.zeros_like(letters).index_add(0, index.flatten(), by_token)
    assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("case", ["gdn", "deltaproduct"])
def test_the_first_block_takes_letters(case, monkeypatch):
    model = build_case(case, scan_backend="cpu")
    ids, given = torch.randint(0, 11, (3, 40)), []
    compiled = DELTA_BACKENDS["cpu"]

    def mix(*arguments, **options):
        given.append(arguments[-1])
        return compiled(*arguments, **options)

    monkeypatch.setitem(DELTA_BACKENDS, "cpu", mix)
    found = model(ids).last_hidden_state
    assert torch.equal(given[0], ids) and given[1:] == [None]
    gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    embedded = model.embed_tokens(ids)
    expected = model(inputs_embeds=embedded).last_hidden_state
    assert error(found, expected) < 1e-12
    for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), model.parameters()), strict=True):
        assert error(one, other) < 1e-10


@pytest.mark.parametrize("case", ["gdn", "deltanet", "deltaproduct", "gdp_everything"])
def test_float32_to_length_2048_is_as_exact_as_the_definition(case):
    """The RMS of the deviation is below 1e-5 of that of the result, or no more than twice the definition's own."""
    sizes = {"num_heads": 2, "head_key_dim": 32, "head_value_dim": 32, "hidden_size": 32}
    mixer = DeltaFamilyModel(case_config(case, **sizes)).layers[0].mixer
    x = torch.randn(4, 2048, 32)
    projected = joined_projections.project(mixer, list(mixer.projections), x)
    state = random_delta_state(mixer, 4, torch.float32)
    found, definition = (mix_with_gradients(mixer, projected, state, backend) for backend in ("cpu", "reference"))
    expected = mix_with_gradients(mixer.double(), projected.double(), [part.double() for part in state], "reference")
    for name in expected:
        if expected[name].numel():
            size = expected[name].norm()
            allowed = max(1e-5 * size, 2 * (definition[name] - expected[name]).norm())
            assert (found[name] - expected[name]).norm() < allowed, name


def mix_with_gradients(mixer, projected, state, backend):
    """What `run` finds, but from given projections."""
    mixer.config.scan_backend = backend
    projected = projected.detach().clone().requires_grad_()
    state = DeltaState(*(part.detach().clone().requires_grad_() for part in state))
    leaves = {"projected": projected} | {f"initial_{name}": part for name, part in state._asdict().items()}
    leaves |= {name: parameter for name, parameter in mixer.named_parameters() if "proj" not in name}
    if backend == "cpu":
        y, final = delta_cpu(projected, mixer.weights(), state, TokenOrder(), **mixer.options())
    else:
        y, final = mixer.mix(projected, state, None, None)
    return results_and_gradients(y, DeltaState(*final), leaves)


@pytest.mark.parametrize("rate", [0.0, 3.0, 40.0])
def test_gradients_of_decays_keep_their_precision_however_strong_they_are(rate):
    """Of a decay to 1e-17 the gradient is as small; it is no difference of others, with their rounding."""
    mixer = make_delta_mixer("gdp", torch.float32)
    with torch.no_grad():
        mixer.A_log.zero_()
    _, *rest = delta_operator_arguments(mixer, 2, 40)
    projected = torch.randn(2, 40, sum(mixer.projections.values()))
    projected[..., -mixer.config.num_heads :] += rate
    found, expected = (
        mix_with_gradients(mixer.to(dtype), projected.to(dtype), [x.to(dtype) for x in rest[4:6]], backend)
        for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64))
    )
    for name in ("grad_A_log", "grad_dt_bias"):
        assert error(found[name], expected[name]) < 1e-4, name


@pytest.mark.parametrize("case", ["gdn", "deltaproduct"])
def test_bfloat16_is_read_and_rounded_but_computed_in_float32(case):
    """To the last bit: it is the same arithmetic of our own, between other reads and writes."""
    mixer = make_delta_mixer(case, torch.float32)
    projected, *rest = delta_operator_arguments(mixer, rows=2, length=20)
    half = projected.bfloat16()
    single, half = half.float().requires_grad_(), half.requires_grad_()
    found, expected = delta_operator(half, *rest)[0], delta_operator(single, *rest)[0]
    assert torch.equal(found, expected.bfloat16())
    weight = torch.randn_like(found)
    found.backward(weight)
    expected.backward(weight.float())
    assert torch.equal(half.grad, single.grad.bfloat16())


def test_float16_takes_the_same_path():
    mixer = make_delta_mixer("gdn", torch.float32)
    projected, *rest = delta_operator_arguments(mixer, rows=1, length=9)
    weights, state, options = DeltaWeights(*rest[:4]), rest[4:6], mixer.options()
    found, _ = delta_cpu(projected.half(), weights, state, TokenOrder(), **options)
    expected, _ = delta_cpu(projected, weights, state, TokenOrder(), **options)
    assert found.dtype == torch.float16
    assert error(found.float(), expected) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_are_near_the_torch_path(dtype):
    mixer, x = make_delta_mixer("gdn", torch.float32), torch.randn(2, 20, 12)
    outputs = {}
    for backend in ("cpu", "chunkwise"):
        mixer.config.scan_backend = backend
        with torch.autocast("cpu", dtype=dtype):
            outputs[backend], state = mixer(x)
        assert state.h.dtype == torch.float32
    assert error(outputs["cpu"].float(), outputs["chunkwise"].float()) < 0.03
    mixer, x = mixer.to(dtype), x.to(dtype)
    for backend in ("cpu", "chunkwise"):
        mixer.config.scan_backend = backend
        outputs[backend], _ = mixer(x)
        assert outputs[backend].dtype == dtype
    assert error(outputs["cpu"].float(), outputs["chunkwise"].float()) < 0.03


@pytest.mark.parametrize("case", ["gdn", "deltanet", "gdp_everything"])
def test_the_operator_is_well_behaved(case):
    # Sequences so short that there is no place for a kept state which is not used, and holds anything.
    arguments = delta_operator_arguments(make_delta_mixer(case), rows=2, length=3)
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(delta_operator, tuple(arguments))


def test_columns_that_nobody_reads_have_no_gradient():
    projected, *rest = delta_operator_arguments(make_delta_mixer("gdn"), rows=2, length=20)
    more = -projected.shape[2] % COLUMNS
    wide = torch.cat([projected, torch.full((2, 20, more), torch.nan, dtype=torch.float64)], dim=-1)
    found, expected = delta_operator(wide.requires_grad_(), *rest)[0], delta_operator(projected, *rest)[0]
    assert more and torch.equal(found, expected)
    found.sum().backward()
    assert not wide.grad[..., -more:].any() and wide.grad[..., :-more].all()


@pytest.mark.parametrize("rows", [3, 300])
def test_results_do_not_depend_on_the_number_of_threads(rows):
    """Promised to the last bit by the source: the order of every sum follows from the shape alone."""
    mixer = make_delta_mixer("gdn", torch.float32, num_heads=5, head_key_dim=32, head_value_dim=32)
    arguments = delta_operator_arguments(mixer, rows=rows, length=600 // rows)  # work enough for several threads
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(operator_results(arguments))
    torch.set_num_threads(before)
    for other, (number, first) in itertools.product(results[1:], enumerate(results[0])):
        assert torch.equal(other[number], first)


def test_sums_for_letters_do_not_depend_on_the_number_of_threads():
    mixer = make_delta_mixer("gdn", torch.float32, num_heads=5, head_key_dim=32, head_value_dim=32)
    projected, *rest = delta_operator_arguments(mixer, rows=40, length=30)
    index, before, results = torch.randint(5, (40, 30)), torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        letters = projected[0, :5].clone().requires_grad_()
        letters_operator(letters, *rest[:8], index, *rest[8:])[0].square().sum().backward()
        results.append(letters.grad)
    torch.set_num_threads(before)
    assert all(torch.equal(other, results[0]) for other in results[1:])


def operator_results(arguments):
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, *state = delta_operator(*leaves)[:3]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return [out, *state, *torch.autograd.grad(out.square().sum() + sum(x.sum() for x in state), tensors)]


@pytest.mark.parametrize("keys", [4, 5])
@pytest.mark.parametrize("case", ["gdn", "deltaproduct", "gdp_everything"])
def test_what_is_not_a_number_stays_in_its_row(case, keys):
    """And in its gradients, though a thread works on one row after another in the same memory."""
    mixer = make_delta_mixer(case, head_key_dim=keys)
    x, state = torch.randn(3, 21, 12, dtype=torch.float64), random_delta_state(mixer, 3)
    mixer.config.scan_backend = "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in (float("nan"), float("inf")):
        results = []
        for value in (1.0, number):
            changed = x.clone()
            changed[1, 3] *= value
            changed.requires_grad_()
            y, _ = mixer(changed, state)
            (grad,) = torch.autograd.grad(y.sum(), changed)
            results.append((y, grad))
        # The calls and their shapes are the same, so the other rows are, to the last bit.
        for clean, found in zip(*results, strict=True):
            assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])
        assert not results[1][0][1, 3:].isfinite().any()
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", ["deltanet", "gdp"])
def test_later_tokens_too_large_to_multiply_leave_gradients_alone(case):
    """Products of what is read at a token with what later ones write are not even made: they would not be finite."""
    projected, *rest = delta_operator_arguments(make_delta_mixer(case, torch.float32), rows=1, length=12)
    gradients = []
    for size in (1.0, 1e30):
        given = projected.clone()
        given[:, 9:, : rest[5].shape[2]] *= size  # queries, keys and values
        out = delta_operator(given.requires_grad_(), *rest)[0]
        gradients.append(torch.autograd.grad(1e15 * out[:, :9].sum(), given)[0][:, :9])
    assert gradients[0].abs().max() > 1e10
    assert error(gradients[1], gradients[0]) < 1e-5


def test_compiled_code_has_no_numbers_of_its_own(monkeypatch):
    mixer = make_delta_mixer("gdn")
    x, state = torch.randn(2, 37, 12, dtype=torch.float64), random_delta_state(mixer, 2)
    before = run(mixer, x, state, "cpu")
    monkeypatch.setattr(delta, "KEY_EPSILON", 0.7)
    mixer.o_norm.eps, mixer.config.beta_max = 0.3, 1.3
    found = run(mixer, x, state, "cpu")
    assert_close(found, run(mixer, x, state, "reference"), 1e-10)
    assert error(found["y"], before["y"]) > 0.1


def test_python_and_the_library_agree_on_the_struct():
    assert compiled_library(torch.float32, "delta").delta_bytes() == ctypes.sizeof(CompiledDelta.function.struct)


def test_python_and_the_library_agree_on_the_places_of_kept_states():
    """The library writes to them unseen."""
    library = compiled_library(torch.float32, "delta")
    for steps in (*range(1, 20), 100):
        assert kept_slots(3, 1000, steps) == 1000 // library.delta_segment(steps) + 3


def count_calls(monkeypatch) -> list:
    """A list with an entry for each call of the compiled mixer."""
    calls, mix = [], DELTA_BACKENDS["cpu"]
    monkeypatch.setitem(DELTA_BACKENDS, "cpu", lambda *given, **options: calls.append(1) or mix(*given, **options))
    return calls


def hook_of(kind, module, seen):
    watch = {
        "forward": module.register_forward_hook,
        "forward_pre": module.register_forward_pre_hook,
        "backward": module.register_full_backward_hook,
        "backward_pre": module.register_full_backward_pre_hook,
    }[kind]
    return watch(lambda *arguments: seen.append(kind))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "backward_pre"])
@pytest.mark.parametrize("name", ["q_proj", "b_proj", "a_proj", "g_proj", "o_proj", "o_norm"])
def test_whoever_hooks_a_submodule_sees_it_called(name, kind, monkeypatch):
    monkeypatch.setattr(joined_projections, "FEWEST_TOKENS", 1)
    mixer, x = make_delta_mixer("gdn"), torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    mixer.config.scan_backend = "cpu"
    expected, _ = mixer(x)
    calls, seen = count_calls(monkeypatch), []
    hook_of(kind, getattr(mixer, name), seen)
    found, _ = mixer(x)
    found.sum().backward()
    assert seen == [kind]
    assert error(found, expected) < 1e-12
    assert len(calls) == (name != "o_norm")


@pytest.mark.parametrize("change", ["replaced", "subclass", "bias", "forward", "weight_norm"])
def test_projections_that_do_more_than_multiply_are_called(change, monkeypatch):
    monkeypatch.setattr(joined_projections, "FEWEST_TOKENS", 1)
    mixer, x = make_delta_mixer("gdn"), torch.randn(2, 7, 12, dtype=torch.float64)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    projection = mixer.k_proj
    if change == "replaced":
        mixer.k_proj = nn.Sequential(projection, nn.Tanh())
    elif change == "subclass":
        mixer.k_proj.__class__ = Doubled
    elif change == "bias":
        mixer.k_proj.bias = nn.Parameter(torch.randn(projection.out_features, dtype=torch.float64))
    elif change == "forward":
        mixer.k_proj.forward = lambda x: torch.tanh(x @ projection.weight.T)
    else:
        nn.utils.parametrizations.weight_norm(mixer.k_proj)
    outputs = {}
    for backend in ("cpu", "chunkwise"):
        mixer.config.scan_backend = backend
        outputs[backend], _ = mixer(x)
    assert error(outputs["cpu"], outputs["chunkwise"]) < 1e-10


def test_one_product_stands_for_the_projections(monkeypatch):
    """To rounding, with its gradients, and with global hooks it does not."""
    mixer = make_delta_mixer("gdn")
    x, state = torch.randn(2, 9, 12, dtype=torch.float64), random_delta_state(mixer, 2)
    apart = run(mixer, x, state, "cpu")
    monkeypatch.setattr(joined_projections, "FEWEST_TOKENS", 1)
    widths, linear = [], torch.nn.functional.linear

    def counted(x, weight, bias=None):
        widths.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    assert_close(run(mixer, x, state, "cpu"), apart, 1e-12)
    assert widths == [-(-sum(mixer.projections.values()) // COLUMNS) * COLUMNS, 12]
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    assert_close(run(mixer, x, state, "cpu"), apart, 1e-12)
    hook.remove()
    assert {mixer.q_proj, mixer.g_proj, mixer.o_norm, mixer.o_proj} <= set(seen)


def test_a_norm_that_was_replaced_is_called():
    mixer, x = make_delta_mixer("gdn"), torch.randn(2, 7, 12, dtype=torch.float64)
    mixer.config.scan_backend = "cpu"
    before, _ = mixer(x)
    mixer.o_norm = nn.Identity()
    found, _ = mixer(x)
    mixer.config.scan_backend = "reference"
    assert error(found, mixer(x)[0]) < 1e-10 and error(found, before) > 0.1


def test_transforms_of_torch_are_those_of_the_chunkwise_mixer():
    mixer, x = make_delta_mixer("gdn"), torch.randn(3, 2, 7, 12, dtype=torch.float64)
    mixer.config.scan_backend = "cpu"

    def total(x):
        return mixer(x)[0].square().sum()

    gradients = torch.func.vmap(torch.func.grad(total))(x)
    mixer.config.scan_backend = "chunkwise"
    for found, part in zip(gradients, x, strict=True):
        (expected,) = torch.autograd.grad(total(part.requires_grad_()), part)
        assert error(found, expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 64])
def test_vectors_of_other_widths_give_the_same(width, tmp_path):
    """As on processors with narrower or wider vectors than this one's; the compiler splits or joins them."""
    names = ["the_compiled_mixer_is_the_one_in_torch", "float32_to_length_2048_is_as_exact_as_the_definition"]
    run_with_vectors_of(width, [f"{__file__}::test_{name}" for name in names], tmp_path)


SANITIZED = """
#include <cstdio>
template <typename S, typename T>
static void fuzz(int64_t n, int64_t p, int64_t steps, int64_t conv, std::vector<int64_t> lengths, int64_t threads,
                 int64_t letters = 0) {
    Delta<S, T> a{};
    std::vector<int64_t> bounds;
    for (int64_t length : lengths) bounds.push_back(a.tokens), bounds.push_back(a.tokens += length);
    std::vector<int64_t> order(a.tokens);
    for (int64_t i = 0; i < a.tokens; ++i) order[i] = a.tokens - 1 - i;
    const int64_t rows = lengths.size(), H = 5, tokens = a.tokens, size = rows * H * n * p;
    const int64_t slots = tokens / delta_segment_tokens(steps) + rows, convolved = H * (n + steps * (n + p));
    const int64_t last = rows * (conv ? conv - 1 : 0) * convolved;
    a.layout = {rows, 0, bounds.data(), order.data()};
    a.width = convolved + H * (steps + 1 + p) + 3, a.heads = H, a.state = n, a.channels = p, a.threads = threads;
    a.steps = steps, a.conv_width = conv, a.gated = 1, a.beta_max = 2, a.key_epsilon = 1e-6, a.epsilon = 1e-5;
    std::vector<std::vector<T>> memory;
    std::vector<std::vector<S>> stored;
    const auto make = [&](int64_t size) { return memory.emplace_back(size, T(0.1)).data(); };
    const auto make_s = [&](int64_t size) { return stored.emplace_back(size, S{}).data(); };
    std::vector<int64_t> index(tokens);
    for (int64_t i = 0; i < tokens; ++i) index[i] = i % std::max<int64_t>(letters, 1);
    a.letters = letters, a.index = index.data();
    const int64_t sources = letters ? letters : tokens;
    a.projected = make_s(sources * a.width), a.out = make_s(tokens * H * p);
    if (conv) a.conv_weight = make(convolved * conv), a.grad_conv_weight = make(convolved * conv);
    a.A_log = make(H), a.dt_bias = make(H), a.norm_weight = make(p), a.h0 = make(size), a.last0 = make(last);
    a.h = make(size), a.last = make(last), a.kept = make(slots * H * n * p);
    run(a, true);
    a.grad_out = make_s(tokens * H * p), a.grad_h = make(size), a.grad_last = make(last);
    a.grad_projected = make_s(sources * a.width), a.grad_A_log = make(H), a.grad_dt_bias = make(H);
    a.grad_norm_weight = make(p), a.grad_h0 = make(size), a.grad_last0 = make(last);
    run(a, false);
}
template <typename S, typename T>
static void fuzz_swiglu(int64_t tokens, int64_t size, int64_t threads) {
    std::vector<S> projected(2 * tokens * size), out(tokens * size), grad(2 * tokens * size);
    SwiGLU<S, T> a{{}, tokens, size, threads, projected.data(), out.data(), out.data(), grad.data()};
    run(a, true);
    run(a, false);
}
int main() {
    for (int64_t threads : {1, 4}) {
        fuzz<float, float>(32, 32, 4, 0, {0, 1, 4, 5, 70}, threads);
        fuzz<float, float>(32, 64, 1, 4, {40, 3, 0, 200}, threads);
        fuzz<float, float>(32, 64, 1, 4, {40, 3, 0, 200}, threads, 5);
        fuzz<BFloat16, float>(5, 6, 2, 0, std::vector<int64_t>(300, 2), threads, 7);
        fuzz<float, float>(3, 5, 3, 7, {40, 1}, threads);
        fuzz<float, float>(1, 1, 17, 1, std::vector<int64_t>(300, 2), threads);
        fuzz<double, double>(6, 7, 2, 20, {18, 0, 5}, threads);
        fuzz<BFloat16, float>(16, 48, 1, 2, {70, 15}, threads);
        fuzz_swiglu<float, float>(100, 35, threads);
        fuzz_swiglu<BFloat16, float>(33, 16, threads);
        fuzz_swiglu<double, double>(1, 1, threads);
    }
    std::puts("clean");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    run_sanitized(SANITIZED, sanitizer, tmp_path)
