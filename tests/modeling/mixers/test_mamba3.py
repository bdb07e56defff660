"""The mixer against its equations, and what follows from them."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from helpers.mamba3_equations import equations
from helpers.model_cases import OPTIONS, build, small_config
from helpers.scan_cases import error
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning, Mamba3NPLRModel
from mamba3_nplr.modeling.mixers import mamba3 as mixer_mamba3
from mamba3_nplr.modeling.mixers.mamba3 import accumulate_phase


@pytest.mark.parametrize("backend", ["auto", "chunkwise"])
@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_the_mixer_is_its_equations(option, backend):
    mixer = build(Mamba3NPLRModel, option, scan_backend=backend).layers[0].mixer
    x = torch.randn(2, 13, 12, dtype=torch.float64)
    found, _ = mixer(x)
    for row in range(2):
        torch.testing.assert_close(found[row], equations(mixer, x[row]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_reach_every_parameter(option):
    """DDP fails on a parameter that the loss does not use: none may exist."""
    model = build(Mamba3NPLRModel, option)
    model(inputs_embeds=torch.randn(2, 9, 12, dtype=torch.float64)).last_hidden_state.square().sum().backward()
    unused = [name for name, p in model.layers.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


@pytest.mark.parametrize("backend", ["auto", "chunkwise"])
def test_gradcheck_of_the_mixer(backend):
    sizes = {"hidden_size": 4, "state_size": 4, "head_dim": 4, "expand": 1}
    mixer = build(Mamba3NPLRModel, **sizes, scan_backend=backend).layers[0].mixer
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    _, state = mixer(torch.randn(1, 3, 4, dtype=torch.float64))
    state = [part.detach().requires_grad_() for part in state]

    def function(x, *state):
        output, final = mixer(x, type(final_state)(*state))
        return (output, *final)

    _, final_state = mixer(x)
    assert torch.autograd.gradcheck(function, (x, *state))


def test_weight_names_are_those_of_the_official_module():
    names = {"in_proj.weight", "dt_bias", "B_bias", "C_bias", "B_norm.weight", "C_norm.weight", "D", "out_proj.weight"}
    reflection = {"k_proj.weight", "beta_proj.weight", "beta_proj.bias"}
    shapes = {name: tuple(p.shape) for name, p in Mamba3NPLRModel(small_config()).layers[0].mixer.named_parameters()}
    assert set(shapes) == names | reflection
    assert shapes["B_bias"] == shapes["C_bias"] == (6, 1, 6)
    assert shapes["k_proj.weight"] == (36, 12)
    assert set(Mamba3NPLRModel(small_config("rank0")).layers[0].mixer.state_dict()) == names
    assert set(Mamba3NPLRModel(small_config("rank0", output_norm=True)).layers[0].mixer.state_dict()) == names | {
        "norm.weight"
    }
    exact = set(Mamba3NPLRModel(small_config("exact_tracking")).layers[0].mixer.state_dict())
    assert exact == (names | reflection | {"A_bias", "h0"}) - {"B_bias", "B_norm.weight"}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"reflection_rank": 0}, 57_408),
        ({"reflection_rank": 0, "num_hidden_layers": 2}, 112_640),
        ({"reflection_rank": 0, "num_hidden_layers": 4}, 223_104),
        ({}, 74_832),
    ],
)
def test_parameter_counts_of_the_paper(changes, count):
    model = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(**changes))
    assert model.num_parameters() == count
    state = model.model.layers[0].mixer.state_shapes(1)
    assert torch.Size(state.h).numel() == 4096


def test_initial_values():
    config = Mamba3NPLRConfig(beta_bias_init=2, gate_form="exact", initial_state="learned", output_norm=True)
    mixer = Mamba3NPLRModel(config).layers[0].mixer
    dt = softplus(mixer.dt_bias)
    assert dt.min() > 0.00099 and dt.max() < 0.1001 and dt.max() > 4 * dt.min()
    for ones in (mixer.B_bias, mixer.C_bias, mixer.D, mixer.B_norm.weight, mixer.norm.weight):
        assert (ones == 1).all()
    assert (mixer.A_bias == -2).all() and (mixer.beta_proj.bias == 2).all() and not mixer.beta_proj.weight.any()
    assert mixer.h0.std() > 0.1


def test_exact_gates_reach_their_ends():
    mixer = build(Mamba3NPLRModel, "exact_gates").layers[0].mixer
    x = 30 * torch.randn(1, 50, 12, dtype=torch.float64)
    _, beta, _ = mixer.reflection(mixer.k_proj(x), mixer.beta_proj(x), torch.zeros(1), None)
    assert beta.min() == 0 and beta.max() == 2
    assert mixer.decay_rate(torch.full((6,), -20.0)).max() == 0
    speed = mixer.angular_speed(torch.tensor([-30.0, -0.1, 0.0, 0.1, 30.0], dtype=torch.float64))
    assert speed.tolist() == [-math.pi, 0, 0, 0, math.pi]


def test_a_plane_at_rest_can_begin_to_turn():
    mixer = build(Mamba3NPLRModel, "exact_gates").layers[0].mixer
    angle = torch.tensor([-0.5, -0.05, 0.0, 0.05, 0.5], dtype=torch.float64, requires_grad=True)
    [slope] = torch.autograd.grad(mixer.angular_speed(angle).sum(), angle)
    wanted = math.pi / 0.9 * (1 - angle.tanh().square())
    assert (slope - wanted).abs().max() < 1e-12


def test_the_phase_loses_no_digits_over_long_sequences():
    increment = torch.rand(1, 10_000, 1, 2)
    start = torch.zeros(1, 1, 2)
    theta, last = accumulate_phase(increment, start, None, None)
    turns = (increment.double().cumsum(1) - theta) / (2 * math.pi)
    assert (turns - turns.round()).abs().max() < 1e-7
    assert turns.max() > 700
    assert torch.equal(theta[:, -1], last)


def test_smooth_decay_has_a_lower_bound():
    mixer = build(Mamba3NPLRModel, a_min=0.01).layers[0].mixer
    rates = mixer.decay_rate(torch.tensor([-50.0, 50.0]))
    assert torch.equal(rates, torch.tensor([0.01, 50.0]))


@torch.no_grad()
def test_the_mixer_skips_padding_whatever_stands_there():
    mixer = build(Mamba3NPLRModel).layers[0].mixer
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]]).bool()
    found, state = mixer(x, mask=mask)
    expected, expected_state = mixer(x[mask][None])
    assert error(found[mask][None], expected) < 1e-12
    assert not found[~mask].any()
    assert all(error(a, b) < 1e-12 for a, b in zip(state, expected_state, strict=True))


@torch.no_grad()
def test_an_empty_piece_keeps_every_part_of_the_state():
    mixer = build(Mamba3NPLRModel).layers[0].mixer
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    _, state = mixer(x)
    output, after = mixer(x[:, :0], state)
    assert output.shape == (2, 0, 12)
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))


@torch.no_grad()
def test_gates_of_a_half_precision_mixer_are_float32(monkeypatch):
    model = build(Mamba3NPLRModel, "learned_state", dtype=torch.bfloat16, scan_backend="chunkwise")
    mixer, seen = model.layers[0].mixer, {}

    def record(*positional, initial_state, **named):
        seen.update(named, initial_h=initial_state.h)
        return scan(*positional, initial_state=initial_state, **named)

    scan = mixer_mamba3.scan
    monkeypatch.setattr(mixer_mamba3, "scan", record)
    mixer(torch.randn(1, 6, 12, dtype=torch.bfloat16))
    assert all(seen[name].dtype == torch.float32 for name in ("carry", "k", "reflection", "initial_h"))
    # Normalised in bfloat16 the length of k would be off by 2^-9.
    assert (seen["k"].norm(dim=-1) - 1).abs().max() < 1e-6
    assert seen["chunk_size"] == 4 and seen["backend"] == "chunkwise"


@torch.no_grad()
def test_mixed_options_of_the_decay():
    mixer = build(Mamba3NPLRModel, gate_form="exact", decay_activation="heavy_tail").layers[0].mixer
    rate = torch.zeros(6, dtype=torch.float64) - mixer.A_bias
    assert error(mixer.decay_rate(rate), torch.full((6,), 0.95, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("backend", ["auto", "chunkwise"])
@torch.no_grad()
def test_a_full_mirror_writes_nothing_and_half_of_one_overwrites(backend):
    mixer = build(Mamba3NPLRModel, "overwrite", scan_backend=backend).layers[0].mixer
    mixer.A_bias.fill_(-100.0)  # no decay
    mixer.beta_proj.weight.zero_()
    x = torch.randn(3, 1, 12, dtype=torch.float64)
    values = mixer.in_proj.weight[24:48]
    mixer.beta_proj.bias.fill_(100.0)
    _, state = mixer(x)
    torch.testing.assert_close(state.h.norm(dim=2), mixer.h0.norm(dim=1).expand(3, -1, -1))
    mixer.beta_proj.bias.zero_()  # beta = 1
    _, state = mixer(x)
    k = (x[:, 0] @ mixer.k_proj.weight.T).unflatten(-1, (6, 6))
    k = mixer_mamba3.rotate(k / k.norm(dim=-1, keepdim=True), (state.phase.cos(), state.phase.sin()))
    u = (x[:, 0] @ values.T).unflatten(-1, (6, 4))
    torch.testing.assert_close(torch.einsum("rhn,rhnp->rhp", k, state.h), u)


@torch.no_grad()
def test_the_length_of_k_before_normalisation_does_not_matter():
    mixer = build(Mamba3NPLRModel).layers[0].mixer
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    expected, _ = mixer(x)
    mixer.k_proj.weight.mul_(1e-6)
    assert error(mixer(x)[0], expected) < 1e-10


def test_step_sizes_start_where_the_configuration_says():
    mixer = Mamba3NPLRModel(small_config(dt_min=0.5, dt_max=0.5)).layers[0].mixer
    torch.testing.assert_close(softplus(mixer.dt_bias), torch.full((6,), 0.5))


def test_the_learned_state_starts_with_columns_of_length_one():
    h0 = Mamba3NPLRModel(Mamba3NPLRConfig(initial_state="learned")).layers[0].mixer.h0
    assert 0.9 < h0.square().sum(1).mean() < 1.1
