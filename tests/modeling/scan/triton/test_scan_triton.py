"""The Triton scan, run by Triton's interpreter: the definition on every path, and an operator of torch."""

import os
import random
import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch

from helpers.family_cases import build_case
from helpers.model_cases import build, tokens
from helpers.places import ROOT
from helpers.scan_cases import FORMS, error, run, run_with_gradients, scan_inputs, scan_state, with_grad
from helpers.without_package import BLOCKER
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.scan.chunkwise import scan_chunkwise
from mamba3_nplr.modeling.scan.definition import ScanInputs, ScanState, scan_definition
from mamba3_nplr.modeling.scan.dispatch import BACKENDS, Backend, in_rows, select_backend
from mamba3_nplr.modeling.scan.sequences import token_order
from mamba3_nplr.modeling.scan.triton import launch as triton_launch
from mamba3_nplr.modeling.scan.triton import operator as scan_triton_module
from mamba3_nplr.modeling.scan.triton.operator import scan_operator, scan_triton, unavailable
from mamba3_nplr.modeling.scan.triton.self_check import disagreement

pytestmark = pytest.mark.skipif(not triton_launch.interpreted(), reason="TRITON_INTERPRET is not set")


def as_float64(tensors):
    return type(tensors)(*(None if x is None else x.double() for x in tensors))


def check(inputs, state, tolerance=1e-5, **kwargs):
    """Float32 results of the kernels, and all gradients, against the definition in float64."""
    expected = run_with_gradients(as_float64(inputs), as_float64(state), "reference", **kwargs)
    found = run_with_gradients(inputs, state, "triton", **kwargs)
    assert found.keys() == expected.keys()
    # The gradient of D is one sum of u with random weights for each head, which may come out small beside its terms.
    scale = inputs.u.square().sum((0, 1, 3)).sqrt()
    assert ((found.pop("grad_D") - expected.pop("grad_D")).abs() < tolerance * scale).all()
    for name in expected:
        assert error(found[name], expected[name]) < tolerance, name


@pytest.fixture
def launched(monkeypatch):
    """The tensors of the last forward and backward pass, by name."""
    seen = {}

    def recorded(function):
        def record(settings, tensors):
            seen.update(tensors)
            return function(settings, tensors)

        return record

    for name in ("forward", "backward"):
        monkeypatch.setattr(scan_triton_module, name, recorded(getattr(scan_triton_module, name)))
    return seen


@pytest.fixture
def few_programs(monkeypatch):
    """As on a GPU that the rows and heads do not fill."""
    monkeypatch.setattr(triton_launch, "processors", lambda device: 1000)


def fuzzed_shapes(sizes, count, lengths):
    generator = random.Random(0)
    for number in range(count):
        n, channels = sizes[number % len(sizes)]
        batch, heads = generator.choice([(1, 2), (2, 1)])
        yield {
            "batch": batch,
            "length": generator.choice(lengths),
            "heads": heads,
            "n": n,
            "channels": channels,
            "form": FORMS[number % len(FORMS)],
        }


SMALL = [(16, 16), (32, 16), (5, 7), (16, 32), (3, 20)]
LARGE = [(64, 64), (40, 24), (16, 70), (128, 16), (20, 120)]


@pytest.mark.parametrize("shape", list(fuzzed_shapes(SMALL, 6, [2, 15, 16, 17, 37])), ids=str)
def test_small_states(shape):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("shape", list(fuzzed_shapes(SMALL, 2, [17])), ids=str)
def test_small_states_on_few_programs(shape, few_programs):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("shape", list(fuzzed_shapes(LARGE, 4, [3, 16, 17])), ids=str)
def test_large_states(shape):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.fixture
def long_chunks(monkeypatch):
    """Chunks as for bfloat16, in float32."""
    settings_of = scan_triton_module.settings_of
    monkeypatch.setattr(scan_triton_module, "settings_of", lambda u, B: settings_of(u, B)._replace(CHUNK=32))


@pytest.mark.parametrize("shape", list(fuzzed_shapes(LARGE, 4, [31, 33])), ids=str)
def test_large_states_in_long_chunks(shape, long_chunks):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_single_step(form, n):
    inputs = scan_inputs(batch=1, length=1, heads=2, n=n, channels=n, form=form, dtype=torch.float32)
    check(inputs, scan_state(inputs))


BOUNDS = [0, 0, 4, 4, 21, 22, 22]


@pytest.mark.parametrize(("n", "form"), [(16, "contractive"), (64, "additive"), (64, "rank0")])
def test_packed(n, form):
    heads = 2 if n == 16 else 1
    inputs = scan_inputs(batch=1, length=22, heads=heads, n=n, channels=16, form=form, dtype=torch.float32)
    check(inputs, scan_state(inputs, rows=6), cu_seqlens=torch.tensor(BOUNDS))


@pytest.mark.parametrize("n", [16, 64])
def test_padded(n):
    inputs = scan_inputs(batch=3, length=19, heads=1, n=n, channels=16, dtype=torch.float32)
    mask = torch.rand(3, 19) < 0.85
    mask[1] = False
    check(inputs, scan_state(inputs), mask=mask)


def test_packed_and_padded_on_few_programs(few_programs):
    inputs = scan_inputs(batch=1, length=22, heads=1, n=16, channels=5, dtype=torch.float32)
    check(inputs, scan_state(inputs, rows=6), cu_seqlens=torch.tensor(BOUNDS))
    check(inputs, scan_state(inputs), mask=torch.rand(1, 22) < 0.5)


@pytest.mark.parametrize("n", [3, 40])
def test_packing_and_padding_do_not_even_change_the_rounding(n):
    bounds = [0, 0, 4, 4, 21]  # no single step, which has a kernel of its own
    packed = scan_inputs(batch=1, length=21, heads=1, n=n, channels=16, dtype=torch.float32)
    state = scan_state(packed, rows=4)
    y, final = run(packed, state, "triton", cu_seqlens=torch.tensor(bounds))
    tokens = torch.rand(1, 40).argsort() < 17
    for row, (start, end) in enumerate(pairwise(bounds)):
        one = ScanInputs(*(x[:, start:end] for x in packed[:-1]), D=packed.D)
        first = ScanState(*(x[row : row + 1] for x in state))
        y_alone, final_alone = run(one, first, "triton")
        assert torch.equal(y[:, start:end], y_alone)
        assert torch.equal(final.h[row : row + 1], final_alone.h)
        if end - start == 17:
            padded = ScanInputs(*(spread_out(x, tokens) for x in one[:-1]), D=packed.D)
            y_padded, final_padded = run(padded, first, "triton", mask=tokens)
            assert torch.equal(y_padded[tokens], y_alone[0]) and not y_padded[~tokens].any()
            assert torch.equal(final_padded.h, final_alone.h)


def spread_out(x, mask):
    """x at the tokens of a mask, and NaN elsewhere."""
    wide = torch.full((*mask.shape, *x.shape[2:]), float("nan"))
    wide[mask] = x[0]
    return wide


@pytest.mark.parametrize("n", [16, 64])
def test_packed_and_padded_sequences_are_read_where_they_lie(n, launched):
    """No copy is made, and chunks are kept for the tokens there are: 8 rows as long as the longest would have 24."""
    length, rows = 40, 8
    inputs = scan_inputs(batch=1, length=length, heads=1, n=n, channels=16, dtype=torch.float32)
    bounds = torch.tensor([*range(rows), length])
    for sequences in ({"cu_seqlens": bounds}, {"mask": torch.rand(1, length) < 0.5}):
        with torch.no_grad():
            run(inputs, backend="triton", **sequences)
        for name in ("u", "B", "C", "k", "log_decay", "write", "carry", "reflection"):
            assert launched[name].data_ptr() == getattr(inputs, name).data_ptr()
        assert len(launched["kept"]) <= length // 16 + rows


def test_without_carry_and_skip_connection():
    inputs = scan_inputs(batch=1, length=20, heads=1, dtype=torch.float32)._replace(carry=None)
    check(inputs, scan_state(inputs))
    found, _ = run(inputs._replace(D=None), backend="triton")
    expected, _ = run(inputs._replace(D=None), backend="reference")
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("n", [16, 64])
def test_repeated_directions_and_full_reflections(n):
    """The worst case of the triangular solve; a series in M reaches 1e18 here."""
    inputs = scan_inputs(batch=1, length=64, heads=1, n=n, channels=16, form="additive", dtype=torch.float32)
    inputs = inputs._replace(
        k=inputs.k[:, :1].expand_as(inputs.k),
        reflection=torch.full_like(inputs.reflection, 2.0),
        log_decay=torch.zeros_like(inputs.log_decay),
    )
    exact, _ = run(as_float64(inputs), backend="reference")
    allowed = error(run(inputs, backend="reference")[0], exact)
    assert error(run(inputs, backend="triton")[0], exact) < 2 * max(allowed, 1e-5)


def test_strong_decay_loses_no_digits():
    inputs = scan_inputs(batch=1, heads=1, length=40, n=16, channels=40, dtype=torch.float32)
    inputs = inputs._replace(log_decay=-20 * torch.rand_like(inputs.log_decay))
    check(inputs, scan_state(inputs))
    inputs.log_decay[:, ::7] = float("-inf")
    exact, _ = run(as_float64(inputs), backend="reference")
    assert error(run(inputs, backend="triton")[0], exact) < 1e-5


@pytest.fixture
def rounded_products(monkeypatch):
    """
    Matrix products with the operands rounded to bfloat16, to the nearest, as they are on a GPU. The interpreter cannot:
    it truncates, and multiplies the bits. The products of the solve, which are exact ones, are left alone.
    """
    from mamba3_nplr.modeling.scan.triton import backward, chunk, forward

    plain = chunk.dot

    def rounded(x):
        data = torch.from_numpy(x.handle.data.copy()).to(torch.bfloat16).float().numpy()
        return chunk.tl.core.tensor(type(x.handle)(data, x.handle.dtype), x.type)

    def dot(a, b, settings, acc=None):
        return plain(rounded(a), rounded(b), settings, acc)

    for module in (chunk, backward, forward):
        monkeypatch.setattr(module, "dot", dot)


def bfloat16_results(function, inputs, state):
    """y and all gradients of a function of bfloat16 inputs and a state of any dtype."""
    inputs, state = with_grad(inputs), with_grad(state)
    y, h = function(inputs, state, 16)
    leaves = [x for x in (*inputs, *state) if x is not None]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, h, *torch.autograd.grad((y.float() * weights).sum() + h.float().sum(), leaves)]


@pytest.mark.parametrize("n", [16, 64])
def test_bfloat16_is_no_worse_than_torch(n, rounded_products):
    exact = scan_inputs(batch=1, length=50, heads=2, n=n, channels=n, dtype=torch.float32)
    state = scan_state(exact)
    half = ScanInputs(*(x.to(torch.bfloat16) for x in exact))
    expected = bfloat16_results(scan_definition, as_float64(half), as_float64(state))
    plain = bfloat16_results(scan_chunkwise, half, ScanState(*(x.to(torch.bfloat16) for x in state)))
    found = bfloat16_results(through_scan, half, state)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for one, other, wanted in zip(found, plain, expected, strict=True):
        assert error(one, wanted) < 2 * error(other, wanted)


def through_scan(inputs, state, chunk_size):
    y, final = run(inputs, state, "triton")
    return y, final.h


VECTORS = ("u", "B", "C", "k", "y", "dy", "du", "dB", "dC", "dk")
GATES = ("log_decay", "write", "carry", "reflection", "D", "h0", "B0", "u0", "h", "dh", "dwrite", "dh0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reaches_the_kernels_as_it_is(dtype, launched):
    exact = scan_inputs(batch=1, length=20, heads=2, n=16, channels=16, dtype=torch.float32)
    half = exact._replace(**{name: getattr(exact, name).to(dtype) for name in VECTORS[:4]})
    state = scan_state(exact)
    found = run_with_gradients(half, state, "triton")
    assert {launched[name].dtype for name in VECTORS} == {dtype}
    assert {launched[name].dtype for name in GATES} == {torch.float32}
    assert found["y"].dtype == found["grad_k"].dtype == dtype
    assert found["grad_write"].dtype == found["final_h"].dtype == torch.float32
    expected = run_with_gradients(as_float64(half), as_float64(state), "reference")
    # Rounding a result costs half a unit in the last place of its largest values, which are a few times the RMS.
    digits = {torch.bfloat16: 2**-9, torch.float16: 2**-12}[dtype]
    for name in ("y", "grad_u", "grad_B", "grad_C", "grad_k"):
        assert error(found[name], expected[name]) < 8 * digits, name
    assert error(found["final_h"], expected["final_h"]) < 1e-5


def rounded_chunkwise(inputs, initial, chunk_size):
    """The chunkwise scan of vectors that were rounded to bfloat16."""
    assert {x.dtype for x in (inputs.u, inputs.B, inputs.C) if x is not None} == {torch.bfloat16}
    return scan_chunkwise(ScanInputs(*(None if x is None else x.float() for x in inputs)), initial, chunk_size)


@pytest.mark.parametrize(("option", "autocast"), [("paper", False), ("rank0", True), ("delta", True), ("gdn", False)])
@torch.no_grad()
def test_a_half_precision_model_runs_in_half_precision_kernels(option, autocast, launched, monkeypatch):
    make = build_case if option == "gdn" else partial(build, Mamba3NPLRModel)
    model, ids = make(option, num_hidden_layers=1), tokens(1, 18)
    model = model.float() if autocast else model.to(torch.bfloat16)
    rounds = Backend(in_rows(rounded_chunkwise), half=(torch.bfloat16,))
    monkeypatch.setitem(BACKENDS, "chunkwise", rounds)
    results = []
    for backend in ("triton", "chunkwise"):
        model.config.scan_backend = backend
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(model(ids).last_hidden_state)
    vectors = [launched[name] for name in ("u", "B", "C", "k", "y")]
    assert {x.dtype for x in vectors if x is not None} == {torch.bfloat16}
    assert {launched[name].dtype for name in ("log_decay", "write", "h0", "h")} == {torch.float32}
    # Results that are nearly equal may still be rounded to different neighbours, now and then.
    found, expected = results
    assert error(found, expected) < 8 * 2**-8
    assert (found != expected).float().mean() < 0.05


def test_half_precision_that_no_kernel_can_do_runs_chunkwise():
    half = ScanInputs(*(x.to(torch.bfloat16) for x in scan_inputs(batch=1, length=3, heads=1, n=130)))
    found, expected = (run(half, backend=backend) for backend in ("triton", "chunkwise"))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1].h, expected[1].h)


@pytest.mark.parametrize(("form", "n"), [("contractive", 3), ("rank0", 3), ("delta", 40)])
def test_the_operator_is_well_behaved(form, n):
    inputs = with_grad(scan_inputs(batch=1, length=5, heads=1, n=n, channels=2, form=form, dtype=torch.float32))
    torch.library.opcheck(scan_operator, (*inputs, *with_grad(scan_state(inputs)), None, None))


def test_the_operator_is_well_behaved_with_sequences():
    inputs = with_grad(scan_inputs(batch=1, length=5, heads=1, n=3, channels=2, dtype=torch.float32))
    order = token_order(torch.tensor([[1, 0, 1, 1, 0]]), None, 1, 5)
    torch.library.opcheck(scan_operator, (*inputs, *with_grad(scan_state(inputs)), *order))


def test_a_second_derivative_names_the_backend_that_has_one():
    inputs = with_grad(scan_inputs(batch=1, length=2, heads=1, n=16, channels=16, dtype=torch.float32))
    first = torch.autograd.grad(run(inputs, backend="triton")[0].square().sum(), inputs.u, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative.*scan_backend='chunkwise'"):
        torch.autograd.grad(first.square().sum(), inputs.u)


def test_a_model_compiles_with_it():
    model = build(Mamba3NPLRModel, scan_backend="triton", num_hidden_layers=1).float()
    ids = tokens(1, 5)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids).last_hidden_state
    found.sum().backward()
    model.config.scan_backend = "reference"
    assert error(found, model(ids).last_hidden_state) < 1e-5


def scans_in(module):
    """The operators of ours that a traced module calls, in its inner graphs, too."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    calls = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [name for name in calls if name.startswith("mamba3_nplr.")]


@torch.no_grad()
def test_tracing_sees_one_operator():
    model = build(Mamba3NPLRModel, scan_backend="triton", num_hidden_layers=1, use_cache=False).float()
    ids, traced = tokens(1, 5), []

    def keep(module, example_inputs):
        traced.append(module)
        return module

    expected = torch.compile(model, fullgraph=True, backend=keep)(ids).last_hidden_state
    exported = torch.export.export(model, (ids,))
    assert scans_in(traced[0]) == scans_in(exported.graph_module) == ["mamba3_nplr.scan_triton.default"]
    assert error(exported.module()(ids).last_hidden_state, expected) < 1e-5


def test_inputs_need_not_be_contiguous():
    inputs = scan_inputs(length=9, heads=2, batch=1, dtype=torch.float32)
    turned = ScanInputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:-1]), D=inputs.D)
    assert not turned.u.is_contiguous()
    assert torch.equal(run(turned, backend="triton")[0], run(inputs, backend="triton")[0])


@pytest.mark.parametrize(
    ("n", "channels", "dtype"), [(130, 2, torch.float32), (2, 130, torch.float32), (2, 2, torch.float64)]
)
def test_what_no_kernel_can_do_runs_chunkwise(n, channels, dtype):
    inputs = scan_inputs(batch=1, length=3, heads=1, n=n, channels=channels, dtype=dtype)
    assert torch.equal(run(inputs, backend="triton")[0], run(inputs, backend="chunkwise")[0])


def test_where_it_runs(monkeypatch):
    assert unavailable(torch.device("cpu")) is None
    assert "on meta" in unavailable(torch.device("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "CUDA and ROCm" in unavailable(torch.device("cpu"))


def test_it_is_the_choice_on_a_gpu(monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(unavailable=lambda device: None))
    assert select_backend("auto", torch.device("cuda", 0)) == "triton"
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(unavailable=lambda device: "it is broken"))
    assert select_backend("auto", torch.device("cuda", 0)) == "chunkwise"


def test_the_self_check_passes_here():
    assert disagreement(scan_triton, torch.device("cpu"), [(1, 16)]) is None


def wrong_gradient(inputs, initial, sequences, chunk_size):
    return scan_chunkwise(
        inputs._replace(write=inputs.write.detach() + 0.9 * (inputs.write - inputs.write.detach())), initial, 4
    )


def not_a_number(inputs, initial, sequences, chunk_size):
    y, h = scan_chunkwise(inputs, initial, 4)
    return y * float("nan"), h


def wrong_in_half_precision(inputs, initial, sequences, chunk_size):
    y, h = scan_chunkwise(ScanInputs(*(x.float() for x in inputs)), initial, 4)
    return (y if inputs.u.dtype == torch.float32 else 1.2 * y), h


def raises(inputs, initial, sequences, chunk_size):
    raise RuntimeError("out of resource")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (wrong_gradient, "the gradient of write is off"),
        (not_a_number, "y is off by nan"),
        (wrong_in_half_precision, "bfloat16 example"),
        (raises, "RuntimeError"),
    ],
)
def test_the_self_check_finds_what_is_broken_and_warns_once(broken, reason, monkeypatch):
    warnings = []
    monkeypatch.setattr(scan_triton_module, "scan_triton", broken)
    monkeypatch.setattr(scan_triton_module.logger, "warning", warnings.append)
    assert reason in scan_triton_module.self_check(torch.device("cpu"))
    assert len(warnings) == 1 and reason in warnings[0] and "MAMBA3_NPLR_SELF_CHECK=0" in warnings[0]


def test_results_are_the_same_in_every_run():
    inputs = scan_inputs(batch=1, length=17, heads=1, n=16, channels=40, dtype=torch.float32)
    state = scan_state(inputs)
    first, second = (run_with_gradients(inputs, state, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


WITHOUT_THE_PACKAGE = (
    BLOCKER
    + """
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.tensor([[1, 2, 3]])).last_hidden_state.detach(), sys.argv[2])
assert any(name.endswith("scan_triton_kernels") for name in sys.modules)
"""
)


def test_checkpoints_carry_the_kernels(tmp_path):
    model = build(Mamba3NPLRModel, scan_backend="triton", num_hidden_layers=1).float()
    model.save_pretrained(tmp_path / "checkpoint_triton")
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path / "checkpoint_triton"), str(tmp_path / "found")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = model(torch.tensor([[1, 2, 3]])).last_hidden_state
    assert error(torch.load(tmp_path / "found", weights_only=True), expected) < 1e-5


COMPILE = """
import sys
sys.path.insert(0, "benchmarks")
from compile_kernels import TARGETS, Configuration, compile_kernel, resources
found = resources(compile_kernel(Configuration("forward_kernel", 16, 16, "bf16"), TARGETS["sm_90"]), TARGETS["sm_90"])
assert found["spill_bytes"] == 0, found
"""


def test_a_kernel_compiles_for_a_gpu():
    """What the interpreter accepts a compiler may refuse; `make kernels` tries all kernels."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
