"""The compiled part of a SwiGLU network: what torch computes, in one pass."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.family_cases import build_case
from helpers.scan_cases import error
from mamba3_nplr.modeling import modeling_delta_family
from mamba3_nplr.modeling.mixers import joined_projections
from mamba3_nplr.modeling.mixers.swiglu_cpu import CompiledSwiGLU, swiglu_cpu, swiglu_operator
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.compiled import library as compiled_library

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")


def in_torch(projected):
    gate, up = projected.chunk(2, dim=-1)
    return F.silu(gate) * up


def with_gradient(function, projected):
    projected = projected.detach().clone().requires_grad_()
    out = function(projected)
    # In bfloat16, so that it is the same in every dtype.
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), projected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 10), (1, 1, 2), (3, 40, 64), (5, 1, 70), (0, 4, 6), (2, 0, 6)], ids=str)
def test_the_compiled_product_is_the_one_in_torch(shape, dtype, tolerance):
    projected = 5 * torch.randn(shape, dtype=torch.float64).to(dtype)
    for found, expected in zip(
        with_gradient(swiglu_cpu, projected), with_gradient(in_torch, projected.double()), strict=True
    ):
        assert found.dtype == dtype and found.shape == expected.shape
        assert not found.numel() or error(found.double(), expected) < tolerance


def test_large_numbers_and_what_is_none():
    projected = torch.tensor([[[-1e4, 1e4, float("nan"), 1.0, 2.0, 3.0, 4.0, float("inf")]]])
    assert torch.equal(swiglu_cpu(projected).isnan(), in_torch(projected).isnan())
    torch.testing.assert_close(swiglu_cpu(projected)[..., :2], in_torch(projected)[..., :2], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_rounded_but_computed_in_float32(dtype):
    projected = torch.randn(2, 9, 20).to(dtype)
    for found, expected in zip(
        with_gradient(swiglu_cpu, projected), with_gradient(swiglu_cpu, projected.float()), strict=True
    ):
        assert torch.equal(found, expected.to(dtype))


def test_the_operator_is_well_behaved():
    torch.library.opcheck(swiglu_operator, (torch.randn(2, 3, 10, requires_grad=True),))


def test_results_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    projected = torch.randn(3, 100, 90)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(with_gradient(swiglu_cpu, projected))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="^projected has 5 columns; for swiglu_cpu it must be of an even number"):
        swiglu_operator(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match=r"^projected has shape \(2, 4\)"):
        swiglu_operator(torch.randn(2, 4))
    with pytest.raises(ValueError, match="^projected has dtype torch.float16"):
        swiglu_operator(torch.randn(2, 3, 4).half())


def test_python_and_the_library_agree_on_the_struct():
    assert compiled_library(torch.float32, "delta").swiglu_bytes() == ctypes.sizeof(
        CompiledSwiGLU.swiglu_forward.struct
    )


def count_calls(monkeypatch) -> list:
    """A list with an entry for each call of the compiled product."""
    calls = []
    monkeypatch.setattr(joined_projections, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(modeling_delta_family, "swiglu_cpu", lambda x: calls.append(1) or swiglu_cpu(x))
    return calls


@pytest.mark.parametrize("change", ["none", "chunkwise", "hook", "gradient hook", "replaced", "bias", "transform"])
def test_a_network_is_the_same_either_way(change, monkeypatch):
    """And takes the compiled way only where nobody looks at its projections."""
    network = build_case("gdn").layers[0].mlp
    network.config.scan_backend = "chunkwise" if change == "chunkwise" else "cpu"
    x, seen = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True), []
    if change == "hook":
        network.up_proj.register_forward_hook(lambda *_: seen.append(1))
    if change == "gradient hook":
        network.gate_proj.register_full_backward_hook(lambda *_: seen.append(1))
    if change == "replaced":
        network.up_proj = nn.Sequential(network.up_proj, nn.Tanh())
    if change == "bias":
        network.gate_proj.bias = nn.Parameter(torch.randn(10, dtype=torch.float64))
    expected = network.down_proj(F.silu(network.gate_proj(x)) * network.up_proj(x))
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    seen.clear()
    calls = count_calls(monkeypatch)
    if change == "transform":
        gradient = torch.func.grad(lambda x: network(x).square().sum())(x)
    else:
        (gradient,) = torch.autograd.grad(network(x).square().sum(), x)
    assert error(gradient, expected_gradient) < 1e-12
    assert len(calls) == (change == "none") and len(seen) == ("hook" in change)
