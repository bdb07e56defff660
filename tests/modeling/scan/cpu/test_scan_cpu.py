"""The compiled scan: the definition on fuzzed shapes, as an operator, and how its library is built."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from helpers.model_cases import build, tokens
from helpers.sanitized import SANITIZERS, run_sanitized
from helpers.scan_cases import FORMS, error, hard_inputs, run, run_with_gradients, scan_inputs, scan_state, with_grad
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.scan.cpu import compiled
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.compiled import SOURCE, library, unavailable
from mamba3_nplr.modeling.scan.cpu.operator import SEGMENT, scan_cpu, scan_operator
from mamba3_nplr.modeling.scan.definition import VECTORS, ScanInputs
from mamba3_nplr.modeling.scan.dispatch import BACKENDS

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")


def fuzzed_shapes(count=24):
    """Sizes with and without a fast path, one head, one channel, lengths around those of segments."""
    generator = random.Random(0)
    sizes = [(16, 16), (32, 32), (32, 64), (64, 64), (128, 64), (1, 1), (3, 7), (16, 5), (40, 24)]
    for number in range(count):
        n, channels = sizes[number % len(sizes)]
        yield {
            "batch": generator.randint(1, 3),
            "length": generator.choice([1, 2, 15, 16, 17, 31, 33, 50]),
            "heads": generator.choice([1, 3, 5]),
            "n": n,
            "channels": channels,
            "form": FORMS[number % len(FORMS)],
        }


@pytest.mark.parametrize("shape", list(fuzzed_shapes()), ids=str)
def test_the_compiled_scan_is_the_definition(shape):
    inputs = scan_inputs(**shape)
    state = scan_state(inputs)
    expected = run_with_gradients(inputs, state, "reference")
    found = run_with_gradients(inputs, state, "cpu")
    for name in expected:
        assert error(found[name], expected[name]) < 1e-10, name


@pytest.mark.parametrize("form", FORMS)
def test_float32_to_length_2048(form):
    inputs = scan_inputs(batch=1, length=2048, heads=2, n=16, channels=16, form=form, dtype=torch.float32)
    if form == "additive":  # which would overflow over this length
        inputs = inputs._replace(reflection=inputs.reflection * inputs.log_decay.exp())
    state = scan_state(inputs)
    exact = [type(x)(*(None if y is None else y.double() for y in x)) for x in (inputs, state)]
    expected = run_with_gradients(*exact, "reference")
    found = run_with_gradients(inputs, state, "cpu")
    for name in expected:
        assert error(found[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("form", ["contractive", "rank0", "delta"])
def test_bfloat16_is_read_and_rounded_but_computed_in_float32(form):
    """To the last bit: it is the same arithmetic of our own, between other reads and writes."""
    inputs = scan_inputs(length=37, heads=3, n=16, channels=5, form=form, dtype=torch.float32)
    state = scan_state(inputs)
    half = {name: getattr(inputs, name) for name in VECTORS if getattr(inputs, name) is not None}
    half = {name: x.bfloat16() for name, x in half.items()}
    expected = run_operator(inputs._replace(**{name: x.float() for name, x in half.items()}), state)
    found = run_operator(inputs._replace(**half), state)
    assert found["y"].dtype == found["grad_u"].dtype == torch.bfloat16
    for name, x in found.items():
        assert torch.equal(x, expected[name].to(x.dtype)), name


def run_operator(inputs, state):
    """Results of the operator itself and, for the gradient of all ones, its gradients."""
    inputs, state = with_grad(inputs), with_grad(state)
    y, h, _ = scan_operator(*inputs, *state, None, None)
    torch.autograd.backward((y, h), (torch.ones_like(y), torch.ones_like(h)))
    leaves = inputs._asdict() | {f"initial_{name}": x for name, x in state._asdict().items()}
    grads = {f"grad_{name}": x.grad for name, x in leaves.items() if x is not None}
    return {"y": y.detach(), "h": h.detach()} | grads


def test_the_scan_hands_bfloat16_on_as_it_is(monkeypatch):
    seen = {}

    def spy(inputs, *others):
        seen.update({name: x.dtype for name, x in inputs._asdict().items()})
        return scan_cpu(inputs, *others)

    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(run=spy))
    inputs = ScanInputs(*(x.bfloat16() for x in scan_inputs(dtype=torch.float32)))
    y, state = run(inputs, backend="cpu")
    assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == {"u", "B", "C", "k"}
    assert y.dtype == torch.bfloat16 and {x.dtype for x in state} == {torch.float32}


def test_full_reflections_along_one_direction_lose_no_more_than_the_definition():
    inputs = hard_inputs(2000)
    exact, _ = run(ScanInputs(*(x.double() for x in inputs)), backend="reference")
    allowed = error(run(inputs, backend="reference")[0], exact)
    assert error(run(inputs, backend="cpu")[0], exact) < 2 * allowed


def test_results_do_not_depend_on_the_number_of_threads():
    """Promised to the last bit by the source: the order of every sum follows from the shape alone."""
    inputs = scan_inputs(batch=3, length=200, heads=5, n=16, channels=16)  # work enough for several threads
    state = scan_state(inputs)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(run_with_gradients(inputs, state, "cpu"))
    torch.set_num_threads(before)
    for name, other in itertools.product(results[0], results[1:]):
        assert torch.equal(results[0][name], other[name]), name


@pytest.mark.parametrize("form", ["contractive", "rank0", "delta"])
def test_the_operator_is_well_behaved(form):
    inputs = with_grad(scan_inputs(batch=1, length=5, heads=2, n=3, channels=2, form=form))
    state = with_grad(scan_state(inputs))
    torch.library.opcheck(scan_operator, (*inputs, *state, None, None))


def test_a_second_derivative_names_the_backend_that_has_one():
    inputs = with_grad(scan_inputs(batch=1, length=3, heads=1, n=2, channels=2))
    first = torch.autograd.grad(run(inputs, backend="cpu")[0].square().sum(), inputs.u, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative.*backend='chunkwise' to scan"):
        torch.autograd.grad(first.square().sum(), inputs.u)


def test_inputs_need_not_be_contiguous():
    inputs = scan_inputs(length=9, heads=4)
    turned = ScanInputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:-1]), D=inputs.D)
    assert not turned.u.is_contiguous()
    assert torch.equal(run(turned, backend="cpu")[0], run(inputs, backend="cpu")[0])


def test_a_model_compiles_with_it():
    model = build(Mamba3NPLRModel, scan_backend="cpu", num_hidden_layers=1)
    ids = tokens(2, 6)
    optimised = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = optimised(ids).last_hidden_state
    found.sum().backward()
    assert error(found, build_like(model, "reference")(ids).last_hidden_state) < 1e-10


def build_like(model, backend):
    other = Mamba3NPLRModel(model.config.__class__(**(model.config.to_dict() | {"scan_backend": backend}))).double()
    other.load_state_dict(model.state_dict())
    return other.eval()


def test_python_and_the_library_agree_on_what_is_kept():
    assert library(torch.float32).scan_segment() == SEGMENT


def test_it_runs_on_processors_only():
    assert "CPU" in unavailable(torch.device("cuda"))
    assert unavailable(torch.device("cpu")) is None


def test_a_missing_or_failing_compiler_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)
    with pytest.raises(OSError, match="no C\\+\\+ compiler was found"):
        cpu_library.build(SOURCE, tmp_path / "missing")
    monkeypatch.undo()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cpu_library.build("this is no C++", tmp_path / "broken")
    assert "error" in failed.value.stderr
    assert not list(tmp_path.iterdir())


WITHOUT_A_COMPILER = """
import torch
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
model = Mamba3NPLRModel(Mamba3NPLRConfig())
for _ in range(2):
    model(torch.zeros(1, 3, dtype=torch.long)).last_hidden_state.sum().backward()
"""


def test_without_a_compiler_the_chunkwise_scan_takes_over_with_one_warning(tmp_path):
    environment = {"PATH": str(tmp_path), "MAMBA3_NPLR_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_A_COMPILER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fall back to the slower chunkwise scan: no C++ compiler was found") == 1


FIRST_USE = """
import sys, torch
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
model = Mamba3NPLRModel(Mamba3NPLRConfig())
for name in sys.argv[1:]:
    model.to(getattr(torch, name))(torch.zeros(1, 3, dtype=torch.long))
"""


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "float64"]])
def test_only_what_is_used_is_compiled(dtypes, tmp_path):
    quick = tmp_path / "compiler"
    quick.write_text(f'#!/bin/sh\nexec {cpu_library.compiler()} "$@" -O0\n')
    quick.chmod(0o755)
    cache = tmp_path / "cache"
    environment = os.environ | {"CXX": str(quick), "MAMBA3_NPLR_CACHE": str(cache)}
    command = [sys.executable, "-c", FIRST_USE, *dtypes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kinds = [{"float32": "scan_float", "float64": "scan_double"}[name] for name in dtypes]
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == sorted(kinds)
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("Compiling")] == kinds
    assert f"kept as {cache}" in done.stderr


def test_a_compilation_is_announced_before_it_begins(monkeypatch, tmp_path):
    events, run = [], cpu_library.run_compiler
    monkeypatch.setattr(cpu_library.logger, "warning", lambda message: events.append(message.split()[0]))
    monkeypatch.setattr(cpu_library, "run_compiler", lambda command: events.append("run") or run(command))
    cpu_library.build('extern "C" int answer() { return 42; }', tmp_path / "tiny")
    assert events == ["Compiling", "run"]


def test_a_library_that_cannot_be_built_later_is_an_error_with_advice(monkeypatch):
    def refuse(dtype, part):
        raise OSError("the disk is full")

    monkeypatch.setattr(compiled, "library", refuse)
    function = compiled.CompiledFunction("scan_forward", {})
    with pytest.raises(RuntimeError, match="float64 is not available: the disk is full; scan_backend='chunkwise'"):
        function.function(torch.float64)


BUILD = """
import sys
from mamba3_nplr.modeling.scan.cpu.library import load_library
library = load_library("tiny", 'extern "C" int answer() { return 42; }')
assert library.answer() == 42
"""


def test_several_processes_may_build_at_once(tmp_path):
    environment = os.environ | {"MAMBA3_NPLR_CACHE": str(tmp_path / "cache")}
    processes = [subprocess.Popen([sys.executable, "-c", BUILD], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    (built,) = (tmp_path / "cache").iterdir()
    assert built.suffix == ".so"


def test_other_source_is_another_library():
    assert cpu_library.library_key(SOURCE) != cpu_library.library_key(SOURCE + "// changed")


SANITIZED = """
#include <cstdio>
template <typename S, typename T>
static int fuzz(int64_t n, int64_t p, int64_t length, int64_t threads) {
    Scan<S, T> s{};
    const int64_t rows = 2;
    s.layout = {rows, length, nullptr, nullptr};
    s.heads = 3, s.state = n, s.channels = p, s.threads = threads;
    const int64_t tokens = rows * length * s.heads, pairs = rows * s.heads, slots = rows * length / kSegment + rows;
    std::vector<std::vector<T>> memory;
    std::vector<std::vector<S>> vectors;
    S tenth;
    put(T(0.1), tenth);
    const auto make = [&](int64_t size) { memory.emplace_back(size, T(0.1)); return memory.back().data(); };
    const auto rows_of = [&](int64_t size) {
        vectors.emplace_back(tokens * size, tenth);
        return vectors.back().data();
    };
    s.u = rows_of(p), s.B = rows_of(n), s.C = rows_of(n), s.k = rows_of(n), s.y = rows_of(p), s.grad_y = rows_of(p);
    s.grad_u = rows_of(p), s.grad_B = rows_of(n), s.grad_C = rows_of(n), s.grad_k = rows_of(n);
    s.log_decay = make(tokens), s.write = make(tokens), s.carry = make(tokens), s.reflection = make(tokens);
    s.h0 = make(pairs * n * p), s.B0 = make(pairs * n), s.u0 = make(pairs * p);
    s.h = make(pairs * n * p), s.kept = make(slots * s.heads * n * p), s.grad_h = make(pairs * n * p);
    s.grad_log_decay = make(tokens), s.grad_write = make(tokens), s.grad_carry = make(tokens);
    s.grad_reflection = make(tokens);
    s.D = make(s.heads), s.grad_D = make(pairs);
    s.grad_h0 = make(pairs * n * p), s.grad_B0 = make(pairs * n), s.grad_u0 = make(pairs * p);
    run(s, true);
    run(s, false);
    return 0;
}
int main() {
    for (int64_t length : {0, 1, 16, 17, 40, 300})
        for (int64_t threads : {1, 4}) {
            fuzz<float, float>(16, 16, length, threads), fuzz<double, double>(3, 5, length, threads);
            fuzz<float, float>(1, 1, length, threads), fuzz<float, float>(32, 64, length, threads);
            fuzz<BFloat16, float>(16, 5, length, threads);
        }
    std::puts("clean");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    run_sanitized(SANITIZED, sanitizer, tmp_path)


WITHOUT_MEMORY = """
import resource, torch
from mamba3_nplr.modeling.scan.cpu.operator import scan_backward_operator, scan_operator

n, limits = 1024, resource.getrlimit(resource.RLIMIT_AS)
inputs = [torch.zeros(1, 1, 2, n)] * 3 + [torch.zeros(1, 1, 2)] * 2 + [None] * 4
inputs += [torch.zeros(1, 2, n, n), torch.zeros(1, 2, n), torch.zeros(1, 2, n), None, None]
outputs = scan_operator(*inputs)
for threads in (1, 2):
    torch.set_num_threads(threads)
    scan_backward_operator(*outputs, *inputs)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), limits[1]))  # for the results, but not for the work
    try:
        scan_backward_operator(*outputs, *inputs)
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    scan_backward_operator(*outputs, *inputs)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit memory otherwise")
def test_memory_that_cannot_be_had_is_an_error_after_which_all_goes_on():
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = "ran out of memory for rows=1, heads=2, state=1024, channels=1024"
    assert done.stdout.splitlines() == [f"scan_backward {sizes} on {threads} threads." for threads in (1, 2)]


ALLOCATIONS_FAIL = """
#include <cstdio>
#include <cstdlib>
static std::atomic<int64_t> left{INT64_MAX};
void* operator new(size_t size) {
    void* made = left.fetch_sub(1) > 0 ? std::malloc(size) : nullptr;
    return made ? made : throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }

// Calls with memory for `allowed` allocations, for one more each time until they suffice.
template <typename Function>
static bool fails_until_it_works(const Function& function) {
    for (int64_t allowed = 0; allowed < 1000; ++allowed) {
        left = allowed;
        const int result = function();
        left = INT64_MAX;
        if (result == 0) return allowed > 0;
        if (result != 1) return false;
    }
    return false;
}
int main() {
    const int64_t rows = 4, heads = 4, n = 16, p = 16, length = 70, tokens = rows * length, pairs = rows * heads;
    std::vector<std::vector<float>> memory;
    const auto make = [&](int64_t size) { return memory.emplace_back(size, 0.1f).data(); };
    Scan<float, float> s{};
    s.layout = {rows, length, nullptr, nullptr};
    s.heads = heads, s.state = n, s.channels = p;
    const int64_t slots = tokens / kSegment + rows;
    s.u = make(tokens * heads * p), s.B = s.C = s.k = make(tokens * heads * n), s.y = make(tokens * heads * p);
    s.log_decay = s.write = s.carry = s.reflection = make(tokens * heads), s.grad_y = s.u;
    s.h0 = make(pairs * n * p), s.B0 = make(pairs * n), s.u0 = make(pairs * p), s.h = make(pairs * n * p);
    s.kept = make(slots * heads * n * p), s.grad_h = make(pairs * n * p);
    s.grad_u = make(tokens * heads * p), s.grad_B = make(tokens * heads * n), s.grad_C = make(tokens * heads * n);
    s.grad_k = make(tokens * heads * n), s.grad_log_decay = make(tokens * heads), s.grad_write = make(tokens * heads);
    s.grad_carry = make(tokens * heads), s.grad_reflection = make(tokens * heads);
    s.grad_h0 = make(pairs * n * p), s.grad_B0 = make(pairs * n), s.grad_u0 = make(pairs * p);
    bool good = true;
    for (int64_t threads : {1, 4}) {
        s.threads = threads;
        good = good && fails_until_it_works([&] { return scan_forward(&s); });
        good = good && fails_until_it_works([&] { return scan_backward(&s); });
    }
    std::puts(good ? "clean" : "wrong result");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_any_allocation_may_fail_on_any_thread(sanitizer, tmp_path):
    run_sanitized(ALLOCATIONS_FAIL, sanitizer, tmp_path)
