"""IDS4: running products against the sequential definition, and the block against its equations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from helpers.family_cases import build_case
from helpers.scan_cases import error
from mamba3_nplr import IDS4Config, IDS4ForBehaviorCloning, IDS4Mixer, IDS4Model
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.modeling.mixers import fused_step, matrix_products
from mamba3_nplr.modeling.mixers.letters import Letters, distinct_rows
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


def letter_inputs(batch=3, length=11, letters=4, s=5):
    """A table, words from it, and the other arguments of `product_inputs`."""
    _, A, w, p = product_inputs(batch, length, s=s)
    table = torch.randn(letters, len(A), dtype=torch.float64, requires_grad=True)
    return table, torch.randint(0, letters, (batch, length)), A, w, p


# With 5 rows in a matrix: matrices only, vectors for the last two steps, and for the last five.
@pytest.mark.parametrize("chunk_elements", [1, 3 * 25, 10**6])
@pytest.mark.parametrize("lengths", [None, [11, 4, 0], [11, 9, 7]])
@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_every_way_to_the_products_gives_the_sequential_ones(shared, keep_last, lengths, chunk_elements):
    table, index, *rest, p = letter_inputs()
    x = Letters(table, index) if shared else table[index]
    lengths = None if lengths is None else torch.tensor(lengths)
    start = ScaledProduct(p, torch.zeros(3, 1, dtype=torch.float64))
    options = {"chunk_elements": chunk_elements, "keep_last": keep_last}
    y, exponents, last = running_products(x, *rest, start, lengths, **options)
    assert (last is None) == (not keep_last)
    expected, _ = sequential(table[index], *rest, p, lengths)
    found, weight = torch.exp2(exponents)[..., None] * y, torch.randn_like(expected)
    assert error(found, expected) < 1e-10
    gradients = [torch.autograd.grad((y * weight).sum(), [table, *rest, p]) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < 1e-10


@pytest.mark.parametrize("rows", [1, 5])
def test_vectors_take_no_more_memory_than_two_chunks(rows):
    count = matrix_products.steps_with_vectors(rows, 64, 16, 1000, torch.device("cpu"))
    assert rows * 16 * count**2 / 2 <= 2 * 1000 < rows * 16 * (count + 1) ** 2 / 2
    x, A, w, _ = product_inputs(batch=rows, length=64, s=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        running_products(x, A, w, identity_products(rows, 16, x), chunk_elements=1000, keep_last=False)
    chunks = math.ceil((64 - count) / max(1, 1000 // (rows * 16 * 16)))
    matrices = rows * 16 * 16 * (chunks + 1) + (64 - count) * rows
    vectors = rows * 16 * (count * (count + 1) // 2 + count) + rows * count * (count + 1) // 2
    assert sum(kept) == x.numel() + 2 * A.numel() + 2 * w.numel() + matrices + vectors


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", ["no direction", "a matrix of zeros"])
def test_vectors_that_vanish_leave_finite_gradients(case, shared):
    """The products before them are beyond the range of float32."""
    table, index, A, w, p = (x.detach().float() if x.is_floating_point() else x for x in letter_inputs(length=64, s=64))
    table = 10 * table.abs()
    with torch.no_grad():
        if case == "no direction":
            w.zero_()
        else:
            table[-1] = 0.0
            index[index == len(table) - 1] = 0
            index[:, 50] = len(table) - 1
    inputs = [x.abs().requires_grad_() for x in (table, A, w)]
    x = Letters(inputs[0], index) if shared else inputs[0][index]
    y, exponents, _ = running_products(
        x, *inputs[1:], ScaledProduct(p, torch.zeros(3, 1)), chunk_elements=10**6, keep_last=False
    )
    assert exponents.max() > 200
    found = torch.autograd.grad((y * torch.randn_like(y)).sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in found)
    if case == "no direction":
        assert found[2].any() and not found[1].any()  # that of w is all there is


def test_threads_change_nothing_but_rounding():
    """Which is that of torch's matrix products: on some processors it depends on the number of threads."""
    table, index, A, w, _ = letter_inputs(batch=16, length=30, s=40)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for x in (Letters(table, index), table[index]):
            y, exponents, _ = running_products(
                x, A, w, identity_products(16, 40, A), chunk_elements=10**5, keep_last=False
            )
            found.append((y, exponents, *torch.autograd.grad(y.square().sum(), [table, A, w])))
    torch.set_num_threads(1)
    for others in found[2:4], found[4:]:
        for a, b in zip(found[:2], others, strict=True):
            assert all(error(x, y) < 1e-12 for x, y in zip(a, b, strict=True))


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


def words_model(**fields):
    return build_case("ids4", "Model", vocab_size=3, chunk_elements=10**6, **fields).train()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("padded", ["", "mask", "packed"])
@pytest.mark.parametrize("inputs", ["input_ids", "observations"])
def test_letters_change_nothing(monkeypatch, inputs, padded, layers):
    """Words and episodes, with and without letters."""
    model = words_model(num_hidden_layers=layers, input_type="tokens" if inputs == "input_ids" else "observations")
    ids = torch.randint(0, 3, (1 if padded == "packed" else 4, 20))
    given = {inputs: ids if inputs == "input_ids" else torch.randn(3, 16, dtype=torch.float64)[ids]}
    if padded == "mask":
        given["attention_mask"] = torch.rand(4, 20) < 0.7
    if padded == "packed":
        given["cu_seqlens"] = torch.tensor([0, 3, 3, 12, 20])
    weight, found = torch.randn(*ids.shape, 12, dtype=torch.float64), []
    given_letters = see_letters(monkeypatch)
    for find in (type(model).find_letters, lambda *_: None):
        monkeypatch.setattr(type(model), "find_letters", find)
        result = model(**given).last_hidden_state
        found.append((result, *torch.autograd.grad((result * weight).sum(), list(model.parameters()))))
    assert given_letters == [True, False][:layers] + [False] * layers
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-10


def see_letters(monkeypatch) -> list[bool]:
    """Whether each mixer that is called from now on is given letters."""
    given, forward = [], IDS4Mixer.forward

    def see(mixer, hidden_states, state=None, mask=None, cu_seqlens=None, index=None, **options):
        given.append(index is not None)
        return forward(mixer, hidden_states, state, mask, cu_seqlens, index, **options)

    monkeypatch.setattr(IDS4Mixer, "forward", see)
    monkeypatch.setitem(fused_step.FORWARDS, IDS4Mixer, see)
    return given


def noise(module, inputs, output):
    return output + torch.randn_like(output)


@pytest.mark.parametrize(
    "watch",
    [
        lambda model: model.embed_tokens.register_forward_hook(noise),
        lambda model: model.embed_tokens.register_full_backward_hook(lambda *_: None),
        lambda model: model.layers[0].register_forward_pre_hook(lambda *_: None),
        lambda model: model.layers[0].mixer.register_forward_hook(lambda *_: None),
        lambda model: model.layers[0].mixer.D.register_full_backward_hook(lambda *_: None),
        lambda model: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda model: setattr(model.embed_tokens, "forward", lambda ids: torch.randn(*ids.shape, 12).double()),
        lambda model: setattr(model.embed_tokens, "padding_idx", 1),
        lambda model: setattr(model.embed_tokens, "max_norm", 1.0),
        lambda model: torch.nn.utils.parametrizations.weight_norm(model.embed_tokens),
        lambda model: setattr(model, "embed_tokens", type("Other", (torch.nn.Embedding,), {})(3, 12).double()),
    ],
)
def test_inputs_that_somebody_watches_or_changes_are_not_shared(monkeypatch, watch):
    model, given = words_model(), see_letters(monkeypatch)
    handle = watch(model)
    model(torch.randint(0, 3, (4, 20)))
    if hasattr(handle, "remove"):
        handle.remove()
    assert given == [False, False]


def test_hidden_states_that_are_asked_for_get_their_whole_gradient():
    model, ids = words_model(num_hidden_layers=1), torch.randint(0, 3, (4, 20))
    outputs = model(ids, output_hidden_states=True)
    first = outputs.hidden_states[0]
    found = torch.autograd.grad(outputs.last_hidden_state.square().sum(), first)[0]
    embeds = model.embed_tokens(ids).detach().requires_grad_()
    expected = torch.autograd.grad(model(inputs_embeds=embeds).last_hidden_state.square().sum(), embeds)[0]
    assert error(found, expected) < 1e-10


def test_distinct_rows():
    rows = torch.randn(5, 3)[torch.tensor([4, 1, 1, 0, 4, 3])]
    distinct, index = distinct_rows(rows)
    assert len(distinct) == 4 and torch.equal(distinct[index], rows)
    # Rows that differ with equal sums.
    weights = torch.linspace(1.0, 2.0, 2, dtype=torch.float64).exp()
    rows = torch.stack([weights.flip(0), torch.zeros(2).double(), -weights.flip(0), weights * torch.tensor([1, -1])])
    rows[1] = torch.tensor([1.0, 0.0]) * (weights[0] * weights[1] * 2) / weights[0]
    distinct, index = distinct_rows(rows)
    assert torch.equal(distinct[index], rows)


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
