"""IDS4: running products against the sequential definition, and the block against its equations."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.family_cases import build_case
from helpers.scan_cases import error
from mamba3_nplr import IDS4Config, IDS4ForBehaviorCloning, IDS4Model
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.modeling.mixers.matrix_products import ScaledProduct, identity_products, running_products


def sequential(x, A, w, p, lengths=None):
    """P_t w (batch, length, s) and the last product, one matrix after another."""
    outputs = []
    for t in range(x.shape[1]):
        matrix = F.gelu(torch.einsum("bi,ijk->bjk", x[:, t], A))
        product = p @ matrix
        p = product if lengths is None else torch.where((t < lengths)[:, None, None], product, p)
        outputs.append(p @ w)
    return torch.stack(outputs, 1), p


def product_inputs(batch=3, length=11, d=4, s=5):
    shapes = (batch, length, d), (d, s, s), (s,), (batch, s, s)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    # Equal inputs share a matrix; each must get its own gradient all the same.
    inputs[0][:, length // 2] = inputs[0][:, 0]
    inputs[0][-1, :2] = inputs[0][0, 1]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("chunk_elements", [1, 3 * 25 * 4, 10**6])
@pytest.mark.parametrize("lengths", [None, [11, 4, 0]])
def test_running_products_are_the_sequential_ones_with_all_gradients(lengths, chunk_elements):
    inputs = product_inputs()
    lengths = None if lengths is None else torch.tensor(lengths)
    start = ScaledProduct(inputs[3], torch.zeros(3, 1, dtype=torch.float64))
    y, exponents, last = running_products(*inputs[:3], start, lengths, chunk_elements=chunk_elements)
    found = torch.exp2(exponents)[..., None] * y, torch.exp2(last.exponent)[..., None] * last.p
    expected = sequential(*inputs, lengths)
    assert exponents.max() > 3  # or there was nothing to scale
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(results, weights, strict=True)), inputs)
        for results in (found, expected)
    ]
    for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert error(a, b) < 1e-10


def test_gradcheck():
    inputs = product_inputs(batch=2, length=4, d=3, s=3)
    with torch.no_grad():
        inputs[3] /= inputs[3].abs().amax((1, 2), keepdim=True)  # away from where an exponent changes
    zero = torch.zeros(2, 1, dtype=torch.float64)

    def function(x, A, w, p):
        y, exponents, last = running_products(x, A, w, ScaledProduct(p, zero), chunk_elements=20)
        return torch.exp2(exponents)[..., None] * y, torch.exp2(last.exponent)[..., None] * last.p

    assert torch.autograd.gradcheck(function, inputs)


@torch.no_grad()
def test_scaling_by_powers_of_two_changes_no_bit():
    x, A, w, _ = product_inputs()
    start = identity_products(3, 5, x)
    y, exponents, last = running_products(x, A, w, start, chunk_elements=200)
    expected, _ = sequential(x, A, w, start.p)
    # The matrices come from one product of matrices here and from an einsum there: only their own rounding differs.
    assert error(torch.exp2(exponents)[..., None] * y, expected) < 1e-13
    largest = last.p.abs().amax((1, 2))
    assert (largest >= 1).all() and (largest < 2).all()
    assert torch.equal(last.exponent, last.exponent.round())
    halves = running_products(x, A, w, ScaledProduct(start.p, start.exponent - 7), chunk_elements=200)
    assert torch.equal(halves[0], y) and torch.equal(halves[1], exponents - 7)


def equations(mixer, x):
    """The block on one sequence x (length, hidden_size), straight from the definition."""
    P = torch.eye(mixer.config.state_size, dtype=x.dtype)
    outputs = []
    for x_t in x:
        P = P @ F.gelu(sum(value * matrix for value, matrix in zip(x_t, mixer.A, strict=True)))
        read = torch.stack([mixer.proj.weight[0] @ row + mixer.proj.bias[0] for row in P])
        z = x_t + mixer.C.weight @ read + mixer.C.bias + mixer.D.weight @ x_t + mixer.D.bias
        z = (z - z.mean()) / (z.var(correction=0) + mixer.norm.eps).sqrt()
        outputs.append(z * mixer.norm.weight + mixer.norm.bias)
    return torch.stack(outputs)


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_the_block_is_its_equations(scale):
    """With products that vanish, and such that become large."""
    mixer = build_case("ids4").layers[0].mixer
    x = scale * torch.randn(2, 13, 12, dtype=torch.float64)
    found, expected = mixer(x)[0], torch.stack([equations(mixer, row) for row in x])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weight = torch.randn_like(found)
    parameters = list(mixer.parameters())
    found_gradients, wanted_gradients = (
        torch.autograd.grad((result * weight).sum(), parameters) for result in (found, expected)
    )
    for a, b in zip(found_gradients, wanted_gradients, strict=True):
        assert error(a, b) < 1e-10


def test_products_beyond_the_range_of_float32_are_no_problem():
    """At its initial values the paper's model multiplies by about 8 a token: 1e59 after 64."""
    model = IDS4Model(IDS4Config(hidden_size=64, state_size=24, vocab_size=4))
    with torch.no_grad():
        model.embed_tokens.weight.normal_()  # larger than at the start, as this model is smaller
        # All matrices are nearly positive; against weights of both signs their digits would cancel.
        model.layers[0].mixer.proj.weight.abs_()
    ids = torch.randint(0, 4, (2, 100))
    found = model(ids).last_hidden_state
    mixer = copy.deepcopy(model.layers[0].mixer).double()
    with torch.no_grad():
        expected = torch.stack([equations(mixer, row) for row in model.embed_tokens(ids).double()])
    exponent = mixer(model.embed_tokens(ids).double())[1].exponent
    assert exponent.min() > 200 and exponent.max() < 500  # 2^128 is the end of float32, 2^512 of squares in float64
    assert error(found, expected) < 1e-5
    found.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@torch.no_grad()
def test_products_that_vanish_leave_the_rest():
    mixer = build_case("ids4").layers[0].mixer
    x = 1e-3 * torch.randn(2, 40, 12, dtype=torch.float64)
    expected = torch.stack([equations(mixer, row) for row in x])
    found, state = mixer.float()(x.float())
    assert state.exponent.max() < -200
    assert error(found, expected) < 1e-5


def test_sizes_of_the_paper():
    model = IDS4ForBehaviorCloning(IDS4Config(**MODELS["ids4"].fields))
    assert model.num_parameters() == 3_184_553
    assert torch.Size(model.model.layers[0].mixer.state_shapes(1).h).numel() == 12_100


def test_initial_values():
    mixer = IDS4Model(IDS4Config(state_size=50)).layers[0].mixer
    away = mixer.A - torch.eye(50)
    assert away.mean().abs() < 1e-3 and abs(away.std() * 50**0.5 - 1) < 0.01
    assert mixer.D.bias.abs().max() <= 255**-0.5 and mixer.D.bias.std() > 0.02
    assert (mixer.norm.weight == 1).all() and not mixer.norm.bias.any()


def test_memory_is_bounded_by_the_chunks():
    """The pieces that live at one time do not grow with the length, but for the product before each chunk."""
    x, A, w, _ = product_inputs(batch=2, length=64, d=4, s=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        running_products(x, A, w, identity_products(2, 16, x), chunk_elements=2 * 16 * 16 * 8)
    # Inputs, 8 products of 16 x 16 for 2 rows, and one power of two for each row and step.
    assert sum(kept) == x.numel() + A.numel() + w.numel() + 8 * 2 * 16 * 16 + 64 * 2


@pytest.mark.parametrize(("field", "value"), [("state_size", 0), ("chunk_elements", 0), ("norm_eps", -1.0)])
def test_a_wrong_value_names_field_value_and_what_is_allowed(field, value):
    with pytest.raises(Exception, match=f"{field}={value!r} is not allowed: it must be at least"):
        IDS4Config(**{field: value})
