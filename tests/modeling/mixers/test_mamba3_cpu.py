"""The compiled mixer: the torch one on fuzzed shapes with every option, and as an operator."""

import ctypes
import itertools
import random

import pytest
import torch

from helpers.family_cases import build_case
from helpers.mixer_cases import (
    assert_close,
    make_delta_mixer,
    make_mixer,
    operator_arguments,
    random_state,
    results_and_gradients,
    run,
)
from helpers.model_cases import OPTIONS, build
from helpers.places import TESTS
from helpers.sanitized import SANITIZERS, run_sanitized
from helpers.scan_cases import error
from helpers.vector_widths import run_with_vectors_of
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
from mamba3_nplr.modeling import fused_policy
from mamba3_nplr.modeling.mixers import mamba3, mamba3_cpu
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State
from mamba3_nplr.modeling.mixers.mamba3_backends import MIXER_BACKENDS
from mamba3_nplr.modeling.mixers.mamba3_cpu import MixerWeights, mixer_cpu, mixer_operator
from mamba3_nplr.modeling.mixers.mamba3_numbers import MixerNumbers
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.compiled import library as compiled_library
from mamba3_nplr.modeling.scan.cpu.operator import CompiledScan
from mamba3_nplr.modeling.scan.sequences import TokenOrder

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")


def fuzzed_cases(count=33):
    """Every option with sizes that fill vectors and that do not, one head, one channel, lengths around a segment's."""
    generator = random.Random(0)
    sizes = [(16, 16), (6, 4), (2, 1), (32, 64), (5, 3), (16, 1), (7, 12), (64, 16), (20, 24)]
    for number in range(count):
        n, channels = sizes[number % len(sizes)]
        case = {
            "option": list(OPTIONS)[number % len(OPTIONS)],
            "batch": generator.randint(1, 3),
            "length": generator.choice([1, 2, 15, 16, 17, 31, 33, 50]),
            "hidden_size": generator.choice([1, 2, 3, 5]) * channels,
            "state_size": n,
            "head_dim": channels,
            "num_rope_pairs": generator.randint(1, n // 2),
            "expand": 1,
        }
        # One channel normalised is a sign, whose gradient is nothing but rounding.
        yield case | {"output_norm": False} if channels == 1 else case


@pytest.mark.parametrize("case", list(fuzzed_cases()), ids=str)
def test_the_compiled_mixer_is_the_one_in_torch(case):
    sizes = dict(case)
    option, batch, length = (sizes.pop(name) for name in ("option", "batch", "length"))
    mixer = make_mixer(option, **sizes)
    x, state = torch.randn(batch, length, sizes["hidden_size"], dtype=torch.float64), random_state(mixer, batch)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads", [6, 18])
def test_many_rows(option, heads):
    """With rows enough for all threads, several heads are one piece of work, and 18 heads are one piece and a rest."""
    mixer = make_mixer(option, hidden_size=2 * heads, head_dim=2, expand=1, state_size=3, num_rope_pairs=1)
    x, state = torch.randn(33, 18, 2 * heads, dtype=torch.float64), random_state(mixer, 33)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


# Heads that fill vectors of any width lie in their lanes, where states are small.
LANES = [(16, 16, 16, 4), (16, 6, 4, 2), (32, 5, 3, 1), (16, 17, 9, 8), (48, 2, 1, 1), (16, 64, 16, 5)]


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("option", OPTIONS)
def test_heads_in_lanes(option, length):
    heads, n, channels, pairs = LANES[(list(OPTIONS).index(option) + length) % len(LANES)]
    changes = {"output_norm": False} if channels == 1 else {}  # as in fuzzed_cases
    sizes = {"hidden_size": heads * channels, "state_size": n, "head_dim": channels, "num_rope_pairs": pairs}
    mixer = make_mixer(option, expand=1, **sizes, **changes)
    x, state = torch.randn(2, length, heads * channels, dtype=torch.float64), random_state(mixer, 2)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


@pytest.mark.parametrize("heads", [6, 16])
@pytest.mark.parametrize("option", ["paper", "delta"])
def test_a_k_that_is_nearly_zero_is_not_made_longer(option, heads):
    mixer = make_mixer(option, hidden_size=2 * heads)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(1e-13)
    x, state = torch.randn(2, 20, 2 * heads, dtype=torch.float64), random_state(mixer, 2)
    assert_close(run(mixer, x, state, "cpu"), run(mixer, x, state, "reference"), 1e-10)


@pytest.mark.parametrize("heads", [6, 16])
@pytest.mark.parametrize("option", OPTIONS)
def test_padded_and_packed_sequences(option, heads):
    hidden = 2 * heads
    mixer = make_mixer(option, hidden_size=hidden)
    x = torch.randn(3, 40, hidden, dtype=torch.float64)
    mask = torch.rand(3, 40) < 0.6
    mask[1] = False
    state = random_state(mixer, 3)
    assert_close(run(mixer, x, state, "cpu", mask=mask), run(mixer, x, state, "reference", mask=mask), 1e-10)
    x, state = x.reshape(1, 120, hidden), random_state(mixer, 5)
    packed = {"cu_seqlens": torch.tensor([0, 1, 1, 18, 50, 120])}
    assert_close(run(mixer, x, state, "cpu", **packed), run(mixer, x, state, "reference", **packed), 1e-10)


@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("option", ["paper", "rank0", "contractive", "delta", "overwrite", "exact_tracking"])
def test_float32_to_length_2048_is_as_exact_as_the_definition(option, heads):
    """
    The RMS of the deviation is below 1e-5 of that of the result. Its largest entry is not, in float32, for the
    definition itself: it is at up to 3e-5 where a gradient is many times its RMS. Four sequences, since the largest
    rounding of a few numbers says little: of one, it came to over twice the definition's on one of several processors.
    """
    config = Mamba3NPLRConfig(hidden_size=16 * heads, expand=1, **OPTIONS[option])
    mixer = Mamba3NPLRModel(config).layers[0].mixer
    x = torch.randn(4, 2048, 16 * heads)
    projected = [mixer.in_proj(x), *((mixer.k_proj(x), mixer.beta_proj(x)) if mixer.config.reflection_rank else ())]
    state = random_state(mixer, 4, torch.float32)
    found, definition = (mix_with_gradients(mixer, projected, state, backend) for backend in ("cpu", "reference"))
    projected, state = ([part.double() for part in group] for group in (projected, state))
    expected = mix_with_gradients(mixer.double(), projected, state, "reference")
    for name in expected:
        if expected[name].numel():
            allowed = max(1e-5, 2 * error(definition[name], expected[name]))
            assert error(found[name], expected[name]) < allowed, name
            assert (found[name] - expected[name]).norm() < 1e-5 * expected[name].norm(), name


def mix_with_gradients(mixer, projected, state, backend):
    """What `run` finds, but from given projections."""
    mixer.config.scan_backend = backend
    leaves = {f"projected_{i}": x.detach().clone().requires_grad_() for i, x in enumerate(projected)}
    inputs = [*leaves.values(), None, None][:3]
    state = Mamba3State(*(part.detach().clone().requires_grad_() for part in state))
    leaves |= {f"initial_{name}": part for name, part in state._asdict().items()}
    leaves |= {name: parameter for name, parameter in mixer.named_parameters() if name != "h0" and "proj" not in name}
    if backend == "cpu":
        y, final = mixer_cpu(*inputs, mixer.weights(), state, TokenOrder(), **mixer.options)
    else:
        y, final = mixer.mix(*inputs, state, None, None)
    return results_and_gradients(y, Mamba3State(*final), leaves)


@pytest.mark.parametrize("hidden", [12, 32])  # 6 heads and 16
@pytest.mark.parametrize("option", ["paper", "rank0", "exact_tracking"])
def test_bfloat16_is_read_and_rounded_but_computed_in_float32(option, hidden):
    """To the last bit: it is the same arithmetic of our own, between other reads and writes."""
    mixer = make_mixer(option, torch.float32, head_dim=4, state_size=6, hidden_size=hidden)
    arguments = operator_arguments(mixer, rows=2, length=20)
    halves = [None if x is None else x.bfloat16() for x in arguments[:3]]
    singles = [None if x is None else x.float().requires_grad_() for x in halves]
    halves = [None if x is None else x.requires_grad_() for x in halves]
    found, expected = mixer_operator(*halves, *arguments[3:])[0], mixer_operator(*singles, *arguments[3:])[0]
    assert torch.equal(found, expected.bfloat16())
    weight = torch.randn_like(found)
    found.backward(weight)
    expected.backward(weight.float())
    for half, single in zip(halves, singles, strict=True):
        assert half is None or torch.equal(half.grad, single.grad.bfloat16())


def test_float16_takes_the_same_path():
    mixer = make_mixer("paper", torch.float32)
    projected, k, beta, *rest = operator_arguments(mixer, rows=1, length=9)
    weights, state, options = MixerWeights(*rest[:8]), rest[8:12], mixer.options
    found, _ = mixer_cpu(projected.half(), k.half(), beta.half(), weights, state, TokenOrder(), **options)
    expected, _ = mixer_cpu(projected, k, beta, weights, state, TokenOrder(), **options)
    assert found.dtype == torch.float16
    assert error(found.float(), expected) < 0.02


@pytest.mark.parametrize("option", ["paper", "rank0", "exact_tracking"])
def test_the_operator_is_well_behaved(option):
    arguments = operator_arguments(make_mixer(option), rows=2, length=5)
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(mixer_operator, tuple(arguments))


def tiny_mixer(family):
    if family == "delta":
        return make_delta_mixer("gdn", hidden_size=4, num_heads=1, head_key_dim=2, head_value_dim=3)
    return make_mixer("paper", hidden_size=4, head_dim=4, state_size=2, num_rope_pairs=1, expand=1)


@pytest.mark.parametrize("family", ["mamba3", "delta"])
@pytest.mark.parametrize("backend", ["cpu", "chunkwise"])
def test_a_second_derivative_is_that_of_the_chunkwise_mixer_which_the_compiled_one_names(backend, family):
    mixer = tiny_mixer(family)
    mixer.config.scan_backend = backend
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    if backend == "chunkwise":
        assert torch.autograd.gradgradcheck(lambda x: mixer(x)[0], x)
        return
    (first,) = torch.autograd.grad(mixer(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative.*scan_backend='chunkwise'"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("heads", [5, 16, 32])
def test_results_do_not_depend_on_the_number_of_threads(heads):
    """Promised to the last bit by the source: the order of every sum follows from the shape alone."""
    mixer = make_mixer("paper", torch.float32, hidden_size=16 * heads, state_size=16, head_dim=16, expand=1)
    arguments = operator_arguments(mixer, rows=3, length=200)  # work enough for several threads
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(operator_results(arguments))
    torch.set_num_threads(before)
    for other, (number, first) in itertools.product(results[1:], enumerate(results[0])):
        assert torch.equal(other[number], first)


def operator_results(arguments):
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, *state = mixer_operator(*leaves)[:5]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return [out, *state, *torch.autograd.grad(out.square().sum() + sum(x.sum() for x in state), tensors)]


def test_what_is_not_a_number_stays_in_its_row():
    mixer = make_mixer("paper")
    x, state = torch.randn(3, 20, 12, dtype=torch.float64), random_state(mixer, 3)
    mixer.config.scan_backend = "cpu"
    clean, _ = mixer(x, state)
    x[1, 3] = float("nan")
    found, _ = mixer(x, state)
    # The calls and their shapes are the same, so the other rows are, to the last bit.
    assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])
    assert found[1, 3:].isnan().all()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_compiled_step_is_a_piece_of_length_one(option, rows, monkeypatch):
    mixer = make_mixer(option, hidden_size=15, head_dim=5)
    mixer.config.scan_backend = "cpu"
    x, state = torch.randn(rows, 4, 15, dtype=torch.float64), random_state(mixer, rows)
    expected, expected_state = mixer(x, state)
    calls = count_steps(monkeypatch)
    outputs = []
    for token in x.unbind(1):
        output, state = mixer(token[:, None], state)
        outputs.append(output)
    assert len(calls) == 4
    assert error(torch.cat(outputs, dim=1), expected) < 1e-12
    for found, part in zip(state, expected_state, strict=True):
        assert part.numel() == 0 or error(found, part) < 1e-12


@pytest.mark.parametrize("option", ["paper", "exact_gates"])
def test_compiled_code_has_no_numbers_of_its_own_in_the_gates(option, monkeypatch):
    mixer = make_mixer(option)
    x, state = torch.randn(2, 37, 12, dtype=torch.float64), random_state(mixer, 2)
    expected = run(mixer, x, state, "cpu")
    # Between the lengths of the k here, and far from what else there is.
    others = MixerNumbers(
        beta_max=1.1, beta_stretch=1.7, beta_shift=0.4, rate_shift=0.6, angle_shift=0.3, shortest_k=2.5
    )
    for module in (mamba3, mamba3_cpu):
        monkeypatch.setattr(module, "NUMBERS", others)
    found = run(mixer, x, state, "cpu")
    assert_close(found, run(mixer, x, state, "chunkwise"), 1e-10)
    assert error(found["y"], expected["y"]) > 0.1
    mamba3_cpu.step_template.cache_clear()
    with torch.no_grad():
        mixer.config.scan_backend = "cpu"
        y, _ = mixer(x[:, :1], state)
    mamba3_cpu.step_template.cache_clear()
    assert error(y, found["y"][:, :1]) < 1e-10


def test_python_and_the_library_agree_on_the_structs():
    library = compiled_library(torch.float32)
    assert library.mixer_bytes() == ctypes.sizeof(mamba3_cpu.CompiledMixer.function.struct)
    assert library.mixer_step_bytes() == ctypes.sizeof(mamba3_cpu.step_function.struct)
    assert library.policy_step_bytes() == ctypes.sizeof(fused_policy.PolicyArguments)
    assert library.scan_bytes() == ctypes.sizeof(CompiledScan.scan_forward.struct)


def count_steps(monkeypatch):
    """A list with an entry for each step that compiled code took."""
    calls, backend = [], MIXER_BACKENDS["cpu"]

    def step(*arguments, **options):
        result = backend.step(*arguments, **options)
        return result if result is None else (calls.append(1), result)[1]

    monkeypatch.setitem(MIXER_BACKENDS, "cpu", backend._replace(step=step))
    return calls


@pytest.mark.parametrize("watched", ["gradient", "hook", "mask", "half"])
def test_steps_that_are_more_than_numbers_take_the_usual_path(watched, monkeypatch):
    mixer = make_mixer("paper", torch.float32)
    x, named = torch.randn(2, 1, 12), {}
    if watched == "hook":
        mixer.in_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    if watched == "mask":
        named["mask"] = torch.tensor([[True], [False]])
    if watched == "half":
        mixer, x = mixer.bfloat16(), x.bfloat16()
    calls = count_steps(monkeypatch)
    mixer.config.scan_backend = "cpu"
    with torch.set_grad_enabled(watched == "gradient"):
        found, _ = mixer(x, **named)
        mixer.config.scan_backend = "chunkwise"
        expected, _ = mixer(x, **named)
    assert not calls and found.requires_grad == (watched == "gradient")
    assert error(found.float(), expected.float()) < (0.02 if watched == "half" else 1e-5)


@pytest.mark.parametrize("family", ["mamba3", "delta"])
def test_masked_models_compile_in_one_graph(family):
    options = {"scan_backend": "cpu", "num_hidden_layers": 1}
    model = build(Mamba3NPLRModel, **options) if family == "mamba3" else build_case("gdp_everything", **options)
    ids, mask = torch.randint(0, 11, (2, 6)), torch.tensor([[1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids, attention_mask=mask).last_hidden_state
    found.sum().backward()
    assert error(found, model(ids, attention_mask=mask).last_hidden_state) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 64])
def test_vectors_of_other_widths_give_the_same(width, tmp_path):
    """As on processors with narrower or wider vectors than this one's; the compiler splits or joins them."""
    tests = [f"{__file__}::test_the_compiled_mixer_is_the_one_in_torch"]
    tests += [f"{__file__}::test_heads_in_lanes", f"{TESTS / 'modeling' / 'mixers' / 'test_letters.py'}"]
    tests += [f"{__file__}::test_float32_to_length_2048_is_as_exact_as_the_definition"]
    tests += [f"{TESTS / 'modeling' / 'scan' / 'cpu' / 'test_scan_cpu.py'}::test_the_compiled_scan_is_the_definition"]
    run_with_vectors_of(width, tests, tmp_path)


SANITIZED = """
#include <cstdio>
template <typename S, typename T>
static void fuzz(int64_t n, int64_t p, int64_t m, std::vector<int64_t> lengths, int64_t threads, bool reflects,
                 int64_t H = 5, int64_t letters = 0) {
    Mixer<S, T> a{};
    std::vector<int64_t> bounds;
    for (int64_t length : lengths) bounds.push_back(a.tokens), bounds.push_back(a.tokens += length);
    std::vector<int64_t> order(a.tokens);
    for (int64_t i = 0; i < a.tokens; ++i) order[i] = a.tokens - 1 - i;
    const int64_t rows = lengths.size(), pairs = rows * H, tokens = a.tokens, slots = tokens / kSegment + rows;
    const int64_t sources = letters ? letters : tokens;
    std::vector<int64_t> index(tokens);
    for (int64_t i = 0; letters && i < tokens; ++i) index[i] = i * 7 % letters;
    a.letters = letters, a.index = index.data();
    a.layout = {rows, 0, bounds.data(), order.data()};
    a.width = 2 * H * p + 2 * n + 3 * H + m, a.heads = H, a.state = n, a.channels = p, a.pairs = m;
    a.threads = threads, a.a_min = 1e-4, a.epsilon = 1e-5;
    a.beta_max = 2, a.beta_stretch = 2.2, a.beta_shift = 0.1, a.rate_shift = 0.05, a.angle_shift = 0.1;
    a.shortest_k = 1e-12;
    std::vector<std::vector<T>> memory;
    std::vector<std::vector<S>> stored;
    const auto make = [&](int64_t size) { return memory.emplace_back(size, T(0.1)).data(); };
    const auto make_s = [&](int64_t size) { return stored.emplace_back(size, S{}).data(); };
    a.projected = make_s(sources * a.width), a.out = make_s(tokens * H * p), a.grad_out = make_s(tokens * H * p);
    a.grad_projected = make_s(sources * a.width);
    if (reflects) a.k = make_s(sources * H * n), a.grad_k = make_s(sources * H * n);
    if (reflects) a.beta = make_s(sources * H), a.grad_beta = make_s(sources * H);
    a.dt_bias = make(H), a.C_weight = make(n), a.C_bias = make(H * n), a.D = make(H), a.norm_weight = make(H * p);
    a.B_weight = make(n), a.B_bias = make(H * n), a.grad_B_weight = make(n), a.grad_B_bias = make(H * n);
    a.grad_dt_bias = make(H), a.grad_C_weight = make(n), a.grad_C_bias = make(H * n), a.grad_D = make(H);
    a.grad_norm_weight = make(H * p);
    a.h0 = make(pairs * n * p), a.B0 = make(pairs * n), a.u0 = make(pairs * p), a.phase0 = make(pairs * m);
    a.h = make(pairs * n * p), a.B = make(pairs * n), a.u = make(pairs * p), a.phase = make(pairs * m);
    a.grad_h = make(pairs * n * p), a.grad_B = make(pairs * n), a.grad_u = make(pairs * p);
    a.grad_phase = make(pairs * m), a.grad_h0 = make(pairs * n * p), a.grad_B0 = make(pairs * n);
    a.grad_u0 = make(pairs * p), a.grad_phase0 = make(pairs * m), a.kept = make(slots * H * n * p);
    std::vector<double> kept_phase(slots * H * m);
    a.kept_phase = kept_phase.data();
    run(a, true);
    run(a, false);
}
int main() {
    for (int64_t threads : {1, 4})
        for (bool reflects : {false, true}) {
            fuzz<float, float>(16, 16, 4, {0, 1, 16, 17, 300}, threads, reflects);
            fuzz<float, float>(16, 16, 4, {0, 1, 16, 17, 300}, threads, reflects, 16);
            fuzz<float, float>(16, 16, 4, {0, 1, 16, 17, 300}, threads, reflects, 32, 5);
            fuzz<float, float>(7, 5, 3, {40, 40, 2}, threads, reflects, 16, 70);
            fuzz<double, double>(3, 18, 1, {40, 5}, threads, reflects, 48, 3);
            fuzz<BFloat16, float>(5, 17, 2, {40, 5}, threads, reflects, 16);
            fuzz<BFloat16, float>(5, 17, 2, {40, 5}, threads, reflects, 5, 4);
            fuzz<float, float>(3, 5, 1, {40}, threads, reflects);
            fuzz<float, float>(1, 1, 0, {7, 33}, threads, reflects);
            fuzz<double, double>(6, 7, 3, {18, 0, 5}, threads, reflects);
            fuzz<BFloat16, float>(32, 64, 16, {70, 15}, threads, reflects);
        }
    std::puts("clean");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    run_sanitized(SANITIZED, sanitizer, tmp_path)
