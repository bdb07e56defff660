"""The delta family against its papers' equations, one token, step and head at a time; and where its models coincide."""

import pytest
import torch
from torch.nn.functional import softplus

from helpers.family_cases import DELTA_CASES, build_case, case_config
from helpers.scan_cases import error
from mamba3_nplr import DeltaFamilyConfig, DeltaFamilyForBehaviorCloning, DeltaFamilyModel
from mamba3_nplr.configuration.presets import MODELS


def silu(x):
    return x * torch.sigmoid(x)


def unit(x):
    return x / (x @ x + 1e-6).sqrt()


def convolved(proj, conv, x, t):
    """A projection of token t, or its convolution with those before it."""
    if conv is None:
        return proj.weight @ x[t]
    width = conv.weight.shape[-1]
    return sum(conv.weight[:, 0, width - 1 - ago] * (proj.weight @ x[t - ago]) for ago in range(width) if ago <= t)


def equations(mixer, x):
    """The mixer on one sequence x (length, hidden_size), and its last state (heads, keys, values)."""
    config = mixer.config
    H, K, V, N = config.num_heads, config.head_key_dim, config.head_value_dim, config.num_householder
    conv = {name: getattr(mixer, f"{name}_conv1d", None) for name in "qkv"}
    heads, states = [], []
    for head in range(H):
        S = torch.zeros(V, K, dtype=x.dtype)  # as in the papers: values by keys
        outputs = []
        for t in range(len(x)):
            q, k, v = (silu(convolved(getattr(mixer, f"{name}_proj"), conv[name], x, t)) for name in "qkv")
            if config.use_decay:
                rate = mixer.A_log[head].exp() * softplus(mixer.a_proj.weight[head] @ x[t] + mixer.dt_bias[head])
                S = (-rate).exp() * S
            for step in range(N):
                key = unit(k.view(N, H, K)[step, head])
                beta = config.beta_max * torch.sigmoid(mixer.b_proj.weight[step * H + head] @ x[t])
                S = S @ (torch.eye(K, dtype=x.dtype) - beta * torch.outer(key, key))
                S = S + beta * torch.outer(v.view(N, H, V)[step, head], key)
            o = S @ unit(q.view(H, K)[head]) / K**0.5
            o = o / (o.square().mean() + config.norm_eps).sqrt() * mixer.o_norm.weight
            if config.use_output_gate:
                o = o * silu(mixer.g_proj.weight.view(H, V, -1)[head] @ x[t])
            outputs.append(o)
        heads.append(torch.stack(outputs))
        states.append(S.T)
    return torch.cat(heads, -1) @ mixer.o_proj.weight.T, torch.stack(states)


@pytest.mark.parametrize("case", DELTA_CASES)
def test_the_mixer_is_its_equations(case):
    mixer = build_case(case).layers[0].mixer
    x = torch.randn(2, 13, 12, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        beta, _ = mixer.gates(mixer.b_proj(x), None)
        assert (beta.max() > 1.2) == (case != "deltanet_01")
    found, state = mixer(x)
    weight = torch.randn_like(found)
    parameters = [x, *mixer.parameters()]
    found_gradients = torch.autograd.grad((found * weight).sum() + state.h.square().sum(), parameters)
    expected, final = zip(*(equations(mixer, row) for row in x), strict=True)
    expected, final = torch.stack(expected), torch.stack(final)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(state.h, final, rtol=0, atol=1e-10)
    wanted_gradients = torch.autograd.grad((expected * weight).sum() + final.square().sum(), parameters)
    for found_gradient, wanted in zip(found_gradients, wanted_gradients, strict=True):
        assert error(found_gradient, wanted) < 1e-10


@torch.no_grad()
def test_a_block_normalises_adds_and_the_last_norm_follows():
    model = build_case("gdn", num_hidden_layers=1)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    [block] = model.layers
    hidden = x + block.mixer(block.mixer_norm(x))[0]
    normed = block.mlp_norm(hidden)
    hidden = hidden + block.mlp.down_proj(silu(block.mlp.gate_proj(normed)) * block.mlp.up_proj(normed))
    assert error(model(inputs_embeds=x).last_hidden_state, model.norm(hidden)) < 1e-12


@torch.no_grad()
def test_a_gate_of_one_is_no_gate():
    gated, plain = build_case("gdp"), build_case("gdp", use_decay=False)
    plain.load_state_dict(gated.state_dict(), strict=False)
    ids = torch.randint(0, 11, (2, 9))
    assert error(gated(ids).last_hidden_state, plain(ids).last_hidden_state) > 1e-3
    for layer in gated.layers:
        layer.mixer.A_log.fill_(-1e4)
    # A decay of exp(-0) in the same calls: equal to the last bit.
    assert torch.equal(gated(ids).last_hidden_state, plain(ids).last_hidden_state)


@torch.no_grad()
def test_gated_deltaproduct_with_one_step_is_gated_deltanet():
    """Also if it has more steps, but all after the first with strength 0."""
    plain = {"conv_size": 0, "use_output_gate": False}
    product, single = build_case("gdp", num_hidden_layers=1), build_case("gdn", num_hidden_layers=1, **plain)
    mixer, other = product.layers[0].mixer, single.layers[0].mixer
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    x[..., 0] = 1.0
    mixer.b_proj.weight[3:] = 0.0
    mixer.b_proj.weight[3:, 0] = -1e4
    for name, parameter in other.named_parameters():
        parameter.copy_(mixer.get_parameter(name)[: len(parameter)])
    assert error(mixer(x)[0], other(x)[0]) < 1e-12
    expected = torch.stack([equations(other, row)[0] for row in x])
    assert error(mixer(x)[0], expected) < 1e-10


@torch.no_grad()
def test_strength_zero_is_pure_decay():
    mixer = build_case("gdp").layers[0].mixer
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    x[..., 0] = 1.0
    mixer.b_proj.weight.zero_()
    mixer.b_proj.weight[:, 0] = -1e4
    start = mixer.initial_state(x)._replace(h=torch.randn(2, 3, 4, 6, dtype=torch.float64))
    rate = mixer.A_log.exp() * softplus(x @ mixer.a_proj.weight.T + mixer.dt_bias)
    _, state = mixer(x, start)
    assert error(state.h, (-rate).exp().prod(1)[..., None, None] * start.h) < 1e-12


@torch.no_grad()
def test_strength_two_without_values_keeps_the_length_of_the_state():
    """Products of reflections: the case of beta above 1 that state tracking needs."""
    mixer = build_case("deltaproduct").layers[0].mixer
    x = 100 * torch.randn(2, 40, 12, dtype=torch.float64)
    x[..., 0] = 1.0
    # Far from 0, where keys are shorter than one.
    mixer.k_proj.weight[:, 0] = 1000.0
    mixer.b_proj.weight.zero_()
    mixer.b_proj.weight[:, 0] = 1e4
    mixer.v_proj.weight.zero_()
    start = mixer.initial_state(x)._replace(h=torch.randn(2, 3, 4, 6, dtype=torch.float64))
    _, state = mixer(x, start)
    assert error(state.h.square().sum(2), start.h.square().sum(2)) < 1e-8
    assert error(state.h, start.h) > 0.1


@pytest.mark.parametrize(
    ("name", "count", "h", "tokens"),
    [
        ("deltaproduct_2", 299_040, 4096, 0),
        ("deltaproduct_4", 365_600, 4096, 0),
        ("gdp_2", 299_560, 4096, 0),
        ("gdp_4", 366_120, 4096, 0),
        ("gdn", 333_896, 8192, 3 * 512),
        ("deltanet", 265_760, 4096, 0),
    ],
)
def test_sizes_of_the_paper(name, count, h, tokens):
    """The paper counts 4 x 512 tokens of the convolution for Gated DeltaNet; the next step reads only 3 of them."""
    model = DeltaFamilyForBehaviorCloning(DeltaFamilyConfig(**MODELS[name].fields))
    assert model.num_parameters() == count
    shapes = model.model.layers[0].mixer.state_shapes(1)
    assert [torch.Size(shape).numel() for shape in shapes] == [h, tokens]


def test_weight_names_are_those_of_flash_linear_attention():
    shapes = {name: tuple(p.shape) for name, p in build_case("gdp_everything").layers[0].mixer.named_parameters()}
    assert shapes == {
        "q_proj.weight": (12, 12),
        "k_proj.weight": (24, 12),
        "v_proj.weight": (36, 12),
        "b_proj.weight": (6, 12),
        "a_proj.weight": (3, 12),
        "A_log": (3,),
        "dt_bias": (3,),
        "q_conv1d.weight": (12, 1, 3),
        "k_conv1d.weight": (24, 1, 3),
        "v_conv1d.weight": (36, 1, 3),
        "g_proj.weight": (18, 12),
        "o_norm.weight": (6,),
        "o_proj.weight": (12, 18),
    }


def test_initial_values():
    mixer = DeltaFamilyModel(DeltaFamilyConfig(num_heads=64)).layers[0].mixer
    rate, dt = mixer.A_log.exp(), softplus(mixer.dt_bias)
    assert rate.min() > 0 and 8 < rate.max() < 16
    assert dt.min() > 0.00099 and dt.max() < 0.1001 and dt.max() > 4 * dt.min()
    assert (mixer.o_norm.weight == 1).all()
    bound = 2**-2.5 * (6 / (128 + 64 * 32)) ** 0.5
    assert 0.99 * bound < mixer.q_proj.weight.abs().max() < bound


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("beta_max", 0, "above 0 and at most 2"),
        ("beta_max", 2.5, "above 0 and at most 2"),
        ("num_householder", 0, "at least 1"),
        ("head_key_dim", 0, "at least 1"),
        ("conv_size", -1, "at least 0"),
        ("dt_min", 0.5, "at most dt_max=0.1"),
        ("decay_rate_max", 0, "above 0"),
        ("cue_weight", -1, "at least 0"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(Exception, match=f"{field}={value!r} is not allowed: it must be .*{allowed}"):
        case_config("gdn", **{field: value})


def test_an_unknown_backend_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="scan_backend='tritn' is unknown"):
        DeltaFamilyModel(case_config("gdn", scan_backend="tritn"))
