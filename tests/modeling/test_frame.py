"""What stands around the mixers: the whole model written out, and what the frame lets it learn."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from helpers.mamba3_equations import equations
from helpers.model_cases import SIZES, build, tokens
from helpers.scan_cases import error
from mamba3_nplr import (
    Mamba3NPLRConfig,
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRModel,
)
from mamba3_nplr.modeling.mixers.mamba3_backends import MIXER_BACKENDS

BARE = {"block_norm": "none", "residual": False, "output_norm": True}


def layer_norm(norm, x):
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / (centred.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * norm.weight + norm.bias


def rms_norm(norm, x):
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * norm.weight


def no_norm(norm, x):
    return x


def stack(model, x, norm=layer_norm, residual=True):
    """Blocks and last norm over one sequence x (length, hidden_size)."""
    for block in model.layers:
        x = residual * x + equations(block.mixer, norm(block.mixer_norm, x))
    return norm(model.norm, x)


def norm_after(model, x):
    for block in model.layers:
        x = layer_norm(block.mixer_norm, x + equations(block.mixer, x))
    return layer_norm(model.norm, x)


def norm_of_the_residual(model, x):
    for block in model.layers:
        x = layer_norm(block.mixer_norm, x)
        x = x + equations(block.mixer, x)
    return layer_norm(model.norm, x)


def one_residual_around_all(model, x):
    return layer_norm(model.norm, x + stack(model, x, residual=False))


def no_last_norm(model, x):
    for block in model.layers:
        x = x + equations(block.mixer, layer_norm(block.mixer_norm, x))
    return x


BROKEN = [norm_after, norm_of_the_residual, one_residual_around_all, no_last_norm, partial(stack, residual=False)]
BROKEN += [partial(stack, norm=rms_norm), partial(stack, norm=no_norm)]


def first_embeddings(letters, **changes):
    return Mamba3NPLRModel(Mamba3NPLRConfig(**(SIZES | {"vocab_size": letters} | changes))).embed_tokens.weight.detach()


def test_embeddings_start_as_the_configuration_says():
    assert first_embeddings(25).abs().max() <= 0.2 < 1.01 * first_embeddings(25).abs().max()
    assert torch.equal(first_embeddings(11, embedding_init="orthogonal"), torch.eye(11, 12))
    many = first_embeddings(25, embedding_init="orthogonal")  # of 12 channels, each then orthogonal to the others
    torch.testing.assert_close(many.T @ many, torch.eye(12), rtol=0, atol=1e-5)
    assert many.any(-1).all()


def classify(model, ids, frame):
    """Logits of every prefix, from the embedding to the head without a bias."""
    one_hot = torch.eye(SIZES["vocab_size"], dtype=torch.float64)[ids]
    rows = [frame(model.model, row) for row in one_hot @ model.model.embed_tokens.weight]
    return torch.stack(rows) @ model.score.weight.T


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_classifier_is_its_equations(blocks, rank):
    model = build(Mamba3NPLRForSequenceClassification, num_hidden_layers=blocks, reflection_rank=rank)
    ids = tokens(2, 7)
    found, expected = model(ids, output_prefix_logits=True).prefix_logits, classify(model, ids, stack)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weight = torch.randn_like(found)
    parameters = dict(model.named_parameters())
    found, expected = (torch.autograd.grad((x * weight).sum(), parameters.values()) for x in (found, expected))
    for name, gradient, wanted in zip(parameters, found, expected, strict=True):
        assert error(gradient, wanted) < 1e-10, name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 4])
@torch.no_grad()
def test_a_policy_is_its_equations_in_one_piece_and_frame_by_frame(blocks, rank):
    model = build(Mamba3NPLRForBehaviorCloning, num_hidden_layers=blocks, reflection_rank=rank)
    observations = torch.randn(2, 7, 16, dtype=torch.float64)
    rows = [stack(model.model, row) for row in observations @ model.model.embed_observations.weight.T]
    expected = torch.stack(rows) @ model.action_head.weight[:2].T
    steps = [model.select_action(frame) for frame in observations.unbind(1)]
    for found in (model(observations).actions, torch.stack(steps, dim=1)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("frame", BROKEN)
@torch.no_grad()
def test_other_frames_are_told_apart(frame):
    """Without which the tests above would show little."""
    model = build(Mamba3NPLRForSequenceClassification)
    ids = tokens(2, 7)
    assert error(classify(model, ids, frame), classify(model, ids, stack)) > 0.05


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("block_norm", "norm"), [("layer_norm", layer_norm), ("rms_norm", rms_norm), ("none", no_norm)]
)
@torch.no_grad()
def test_norm_and_residual_are_chosen_apart(block_norm, norm, residual):
    model = build(Mamba3NPLRModel, block_norm=block_norm, residual=residual)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = torch.stack([stack(model, row, norm, residual) for row in x])
    assert error(model(inputs_embeds=x).last_hidden_state, expected) < 1e-10


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("block_norm", ["layer_norm", "rms_norm", "none"])
@torch.no_grad()
def test_a_compiled_step_covers_the_block(block_norm, residual, monkeypatch):
    block = build(Mamba3NPLRModel, block_norm=block_norm, residual=residual, scan_backend="cpu").layers[0]
    x = torch.randn(3, 4, 12, dtype=torch.float64)
    expected, expected_state = block.advance(x, None, None, None)
    calls, backend = [], MIXER_BACKENDS["cpu"]
    monkeypatch.setitem(
        MIXER_BACKENDS, "cpu", backend._replace(step=lambda *a, **k: calls.append(a) or backend.step(*a, **k))
    )
    state, outputs = None, []
    for token in x.unbind(1):
        output, state = block.advance(token[:, None], state, None, None)
        outputs.append(output)
    assert [frame for *_, frame in calls] == [block.frame()] * 4
    assert error(torch.cat(outputs, dim=1), expected) < 1e-12
    assert all(error(found, part) < 1e-12 for found, part in zip(state, expected_state, strict=True))


@pytest.mark.parametrize("change", ["hook", "subclass", "no_weight", "no_eps"])
@torch.no_grad()
def test_a_norm_that_compiled_code_does_not_know_is_run_as_it_is(change):
    block_norm = "rms_norm" if change == "no_eps" else "layer_norm"
    block = build(Mamba3NPLRModel, block_norm=block_norm, scan_backend="cpu").layers[0]
    if change == "hook":
        block.mixer_norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    if change == "subclass":
        block.mixer_norm.__class__ = type("Doubled", (nn.LayerNorm,), {"forward": lambda self, x: 2 * x})
    if change == "no_weight":
        block.mixer_norm = nn.LayerNorm(12, elementwise_affine=False)
    if change == "no_eps":
        block.mixer_norm.eps = None
    x = torch.randn(2, 1, 12, dtype=torch.float64)
    found, _ = block.advance(x, None, None, None)
    assert error(found, x + block.mixer(block.mixer_norm(x))[0]) < 1e-12


def test_inputs_start_as_linear_maps_do_and_norms_change_nothing():
    """Tokens as a linear map of one-hot vectors would."""
    for vocabulary in (5, 120):
        model = Mamba3NPLRModel(Mamba3NPLRConfig(vocab_size=vocabulary, hidden_size=512, head_dim=64))
        assert_uniform(model.embed_tokens.weight, 1 / math.sqrt(vocabulary))
    policy = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig())
    assert_uniform(policy.model.embed_observations.weight, 1 / 4)
    for norm in (policy.model.norm, policy.model.layers[0].mixer_norm):
        assert (norm.weight == 1).all() and not norm.bias.any()


def assert_uniform(weight, bound):
    assert 0.98 * bound < weight.abs().max() <= bound
    assert weight.detach().square().mean().sqrt() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def parity_accuracy(seed, updates=400, length=16, **changes):
    """How often the parity of the number of symbols so far is right, after training on one repeated symbol."""
    torch.manual_seed(seed)
    model = Mamba3NPLRForSequenceClassification(Mamba3NPLRConfig(vocab_size=1, num_labels=2, **changes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    word, parity = torch.zeros(1, length, dtype=torch.long), torch.arange(1, length + 1)[None] % 2
    for _ in range(updates):
        optimizer.zero_grad()
        model(word, labels=parity).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    predicted = model(word, output_prefix_logits=True).prefix_logits.argmax(-1)
    return (predicted == parity).float().mean().item()


@pytest.mark.parametrize("seed", range(4))
def test_the_parity_of_a_repeated_symbol_is_learned(seed):
    assert parity_accuracy(seed) == 1.0


def test_bare_blocks_do_not_learn_it():
    """One repeated symbol leaves nearly the same normalised readout after each: why the frame is the default."""
    assert parity_accuracy(0, **BARE) < 0.7
