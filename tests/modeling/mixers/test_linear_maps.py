"""Linear maps by oneDNN where MKL leaves vectors idle: the same numbers, and who looks at a module sees it called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.family_cases import build_case, case_inputs
from helpers.module_changes import CALLS, Counting, Watching, arrangements, old_weight_norm, weight_norm
from helpers.scan_cases import error
from mamba3_nplr.modeling.mixers import linear_maps
from mamba3_nplr.modeling.mixers.linear_maps import OneDNNProduct, apply_linear, leaves_vectors_idle

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")

SHAPES = [((3, 7), 5), ((2, 9, 64), 130), ((1, 1, 3), 1), ((4, 33, 130), 16), ((5, 1), 9)]


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products by oneDNN, as on a processor where it is always the faster one."""
    monkeypatch.setattr(linear_maps, "FEWEST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(linear_maps, "leaves_vectors_idle", lambda: True)
    seen, apply = [], OneDNNProduct.apply
    monkeypatch.setattr(
        OneDNNProduct, "apply", lambda x, weight: (seen.append((x.shape, weight.shape)), apply(x, weight))[1]
    )
    return seen


def with_gradients(function, x, weight, direction):
    """The product, its gradients in a direction, and the gradients of these."""
    x, weight, direction = (tensor.detach().requires_grad_() for tensor in (x, weight, direction))
    out = function(x, weight)
    first = torch.autograd.grad(out, (x, weight), direction, create_graph=True)
    second = torch.autograd.grad(sum(part.square().sum() for part in first), (x, weight, direction))
    return out, *first, *second


@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_products_and_gradients_of_both_orders_are_those_of_torch(shape, outputs):
    given = torch.randn(shape), torch.randn(outputs, shape[-1]), torch.randn(*shape[:-1], outputs)
    expected = with_gradients(F.linear, *(tensor.double() for tensor in given))
    for one, other in zip(with_gradients(OneDNNProduct.apply, *given), expected, strict=True):
        assert one.dtype is torch.float32 and one.shape == other.shape and error(one, other) < 1e-5


@pytest.mark.parametrize("arrangement", ["scattered", "backwards", "negated", "expanded"])
def test_however_numbers_lie_in_memory(arrangement):
    x, weight = torch.randn(6, 40, 12), torch.randn(20, 12)

    def arranged(tensor):
        if arrangement == "expanded":  # as the gradient of a sum is
            return tensor[:1].expand_as(tensor)
        return arrangements(tensor)[arrangement][0]

    for left, right in ((arranged(x), weight), (x, arranged(weight)), (x, arranged(weight.mT.contiguous()).mT)):
        assert error(OneDNNProduct.apply(left, right), left.double() @ right.double().mT) < 1e-5


def gradients(model, embeddings):
    """By name, of tokens as they are: as letters there would be few of them."""
    model(inputs_embeds=embeddings).last_hidden_state.square().sum().backward()
    return {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("case", ["gdn", "gdp", "paper", "exact_tracking"])
def test_models_learn_the_same(case, products, monkeypatch):
    """Gradients are as near to those of float64 as with the products of torch, or to 1e-5."""
    by_onednn, by_torch, exact = (build_case(case, dtype=dtype) for dtype in (*2 * [torch.float32], torch.float64))
    embeddings = by_torch.get_input_embeddings()(case_inputs("Model", 3, 130)["input_ids"]).detach()
    for model in (by_onednn, exact):
        model.load_state_dict(by_torch.state_dict())
    found = gradients(by_onednn, embeddings)
    assert products
    monkeypatch.setattr(linear_maps, "leaves_vectors_idle", lambda: False)
    others, expected = gradients(by_torch, embeddings), gradients(exact, embeddings.double())
    for name, one in found.items():
        distance, bound = (one - expected[name]).norm(), (others[name] - expected[name]).norm()
        assert distance <= max(1e-5 * expected[name].norm(), 2 * bound), name


def test_few_multiplications_and_other_dtypes_are_left_to_the_module(products, monkeypatch):
    linear, x = nn.Linear(8, 6, bias=False), torch.randn(2, 5, 8)
    assert torch.equal(apply_linear(linear.double(), x.double()), linear(x.double())) and not products
    linear = linear.float()
    apply_linear(linear, x)
    assert len(products) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert apply_linear(linear, x).dtype is torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        apply_linear(linear, x)
    monkeypatch.setattr(linear_maps, "FEWEST_MULTIPLICATIONS", 2 * 5 * 8 * 6 + 1)
    apply_linear(linear, x)
    assert len(products) == 1


@pytest.mark.parametrize("change", [*CALLS, weight_norm, old_weight_norm, "bias", "backward hook"])
def test_a_module_that_does_more_than_multiply_is_called(change, products):
    linear, x = nn.Linear(8, 6, bias=change == "bias"), torch.randn(2, 5, 8)
    if change == "backward hook":
        linear.register_full_backward_hook(lambda *given: None)
    elif change != "bias":
        change(linear)
    torch.testing.assert_close(apply_linear(linear, x), linear(x))
    assert not products


@pytest.mark.parametrize("watch", [Counting, Watching])
def test_who_watches_all_operators_sees_those_of_the_module(watch, products):
    linear, x = nn.Linear(8, 6, bias=False), torch.randn(2, 5, 8)
    with watch():
        apply_linear(linear, x)
    torch.vmap(lambda row: apply_linear(linear, row))(x)
    assert not products


@pytest.mark.parametrize(
    ("found", "width", "expected"),
    [
        ({"cpu_name": "AMD EPYC 9755", "avx512_vp2intersect": True}, "AVX512", True),
        ({"cpu_name": "AMD EPYC 9755", "avx512_vp2intersect": True}, "AVX2", False),  # asked for by ATEN_CPU_CAPABILITY
        ({"cpu_name": "AMD EPYC 9654", "avx512_vp2intersect": False}, "AVX512", False),
        ({"cpu_name": "Intel(R) Core(TM) i7-1165G7", "avx512_vp2intersect": True}, "AVX512", False),
        ({"architecture": "aarch64"}, "DEFAULT", False),
    ],
)
def test_the_processors_for_which_it_is_faster(found, width, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: width)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert leaves_vectors_idle.__wrapped__() is expected
