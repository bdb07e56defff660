"""The Triton scan, run by Triton's interpreter where there is no GPU: the definition on every path, and as an operator."""

import random

import pytest
import torch
from mamba3_nplr.modeling import triton_launch
from mamba3_nplr.modeling.scan_definition import ScanInputs, ScanState
from mamba3_nplr.modeling.scan_triton import scan_operator, unavailable
from scan_cases import error, hard_inputs, scan_inputs, scan_state, with_grad
from test_scan import FORMS, run, run_with_gradients

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
def few_programs(monkeypatch):
    """As on a GPU that the rows and heads do not fill."""
    monkeypatch.setattr(triton_launch, "processors", lambda device: 1000)


def fuzzed_shapes(sizes, count, lengths):
    generator = random.Random(0)
    for number in range(count):
        n, channels = sizes[number % len(sizes)]
        batch, heads = generator.choice([(1, 2), (2, 1), (1, 3)])
        yield {
            "batch": batch,
            "length": generator.choice(lengths),
            "heads": heads,
            "n": n,
            "channels": channels,
            "form": FORMS[number % len(FORMS)],
        }


SMALL = [(16, 16), (32, 16), (5, 7), (16, 32), (3, 20)]
LARGE = [(64, 64), (40, 24), (16, 70), (128, 16), (20, 130)]


@pytest.mark.parametrize("shape", list(fuzzed_shapes(SMALL, 8, [2, 15, 16, 17, 37])), ids=str)
def test_small_states(shape):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("shape", list(fuzzed_shapes(SMALL, 4, [17, 33])), ids=str)
def test_small_states_on_few_programs(shape, few_programs):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("shape", list(fuzzed_shapes(LARGE, 6, [3, 31, 32, 33, 67])), ids=str)
def test_large_states(shape):
    inputs = scan_inputs(**shape, dtype=torch.float32)
    check(inputs, scan_state(inputs))


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_single_step(form, n):
    inputs = scan_inputs(length=1, n=n, channels=n, form=form, dtype=torch.float32)
    check(inputs, scan_state(inputs))
