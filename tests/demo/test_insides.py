"""Pictures of the inside: what the mixers compute themselves, and no less, without a trace left in the models."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from browser import in_sentences
from helpers.made_players import MODELS_OF_PAGE
from insides import LONGEST_PICTURE, Inside, Insides, listen
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification

LETTERS = torch.tensor([[0, 1, 1, 3, 2, 0, 3, 3, 1, 0]])


@pytest.fixture(params=MODELS_OF_PAGE)
def model(request, models):
    return models.of_task("s5_generators")[request.param]


def test_numbers_are_those_of_the_equations(model):
    """Of the first layer, from its weights: beta, decay and phase, and directions of length 1."""
    inside, mixer = listen(model, input_ids=LETTERS), model.model.layers[0].mixer
    kept = []
    hook = mixer.in_proj.register_forward_hook(lambda module, inputs, output: kept.append((inputs[0], output)))
    with torch.no_grad():
        model(LETTERS)
    hook.remove()
    hidden, projected = kept[0]
    *_, dt, A, _, angle = projected.split(mixer.split_sizes, dim=-1)
    exact = model.config.gate_form == "exact"
    dt = F.softplus(dt + mixer.dt_bias)
    rate = F.relu(F.softplus(A + mixer.A_bias) - 0.05) if exact else F.softplus(A).clamp(min=model.config.a_min)
    assert np.allclose(inside.decay, (-rate * dt).exp()[0].detach(), atol=1e-5)
    if model.config.use_rope:
        speed = F.softshrink(angle.tanh(), 0.1) / 0.9 if exact else angle.tanh()
        speed = speed.unflatten(-1, (-1, model.config.num_rope_pairs))
        theta = (dt[..., None] * torch.pi * speed).cumsum(1)[0].detach().numpy()
        assert np.allclose(np.exp(1j * inside.phase), np.exp(1j * theta), atol=1e-4)
    else:
        assert inside.phase.shape[-1] == 0
    if model.config.reflection_rank == 0:
        assert inside.beta is None and inside.k is None
        return
    gate = mixer.beta_proj(hidden).sigmoid()[0].detach()
    assert np.allclose(inside.beta, (2.2 * gate - 0.1).clamp(0, 2) if exact else 2 * gate, atol=1e-5)
    assert np.allclose(np.linalg.norm(inside.k, axis=-1), 1, atol=1e-5)
    cosines = inside.cosines(0)
    assert np.allclose(cosines, cosines.T) and np.allclose(np.diag(cosines), 1)


def test_a_prefix_looks_the_same_whatever_follows(model):
    whole, prefix = listen(model, input_ids=LETTERS), listen(model, input_ids=LETTERS[:, :4])
    for name in ("beta", "decay", "phase", "k"):
        if getattr(whole, name) is not None:
            assert np.allclose(getattr(whole, name)[:4], getattr(prefix, name), atol=1e-6)


def test_listening_leaves_no_trace(model):
    before = model(LETTERS).logits
    listen(model, input_ids=LETTERS)
    assert model.config.scan_backend == "auto" and "reflection" not in model.model.layers[0].mixer.__dict__
    assert torch.equal(model(LETTERS).logits, before)


def test_heads_of_all_layers_are_side_by_side():
    sizes = {"hidden_size": 16, "head_dim": 8, "state_size": 8, "num_rope_pairs": 2, "num_hidden_layers": 2}
    deep = Mamba3NPLRForSequenceClassification(Mamba3NPLRConfig(vocab_size=4, num_labels=120, **sizes)).eval()
    inside = listen(deep, input_ids=LETTERS)
    assert inside.heads == 16 and inside.beta.shape == (10, 16) and inside.k.shape == (10, 16, 8)
    deep.model.layers = deep.model.layers[:1]
    assert np.allclose(inside.decay[:, :8], listen(deep, input_ids=LETTERS).decay, atol=1e-6)


def test_the_head_with_the_most_to_see_is_shown_first(models):
    insides = Insides(models)
    chosen = insides.of_word("nplr", "s5_generators", "0123012")
    named = insides.of_word("nplr", "s5_generators", "0123012", head=chosen["head"])
    assert chosen == named
    inside = listen(models.of_task("s5_generators")["nplr"], input_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]))
    assert chosen["head"] == inside.liveliest_head() + 1


@pytest.mark.parametrize("speed", [0.1, 1.0, 3.0])
def test_a_direction_that_turns_evenly_has_less_to_show_than_one_that_answers(speed):
    still, turning = np.zeros(40), speed * np.arange(40)
    answering = np.where(np.isin(np.arange(40), [9, 10, 24]), 1.5, 0.0)
    for order in ([still, turning, answering], [answering, turning, still]):
        angles = np.stack(order, axis=1)
        k = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        inside = Inside(beta=np.ones((40, 3)), decay=np.ones((40, 3)), phase=np.zeros((40, 3, 0)), k=k)
        assert order[inside.liveliest_head()] is answering


@pytest.mark.parametrize("text", ["0", "01"])
def test_the_shortest_words_have_an_inside(text, model, models):
    [name] = [name for name, one in models.of_task("s5_generators").items() if one is model]
    assert Insides(models).of_word(name, "s5_generators", text)["length"] == len(text)


def test_long_episodes_come_in_parts(models):
    insides = Insides(models)
    first = insides.of_episode("nplr", "fixed", 100, 5)
    second = insides.of_episode("nplr", "fixed", 100, 5, start=first["stop"])
    assert first["start"] == 0 and first["stop"] == LONGEST_PICTURE and second["start"] == LONGEST_PICTURE
    assert first["length"] == second["length"] > 2 * LONGEST_PICTURE
    assert sum(mark["kind"] == "swap" for mark in first["marks"]) == 100


BAD = [
    ({"model": "gdn"}, "model is 'gdn'; it must be one of nplr_exact, nplr, mamba3."),
    ({"head": 0}, "head is 0; it must be a whole number from 1 to 8."),
    ({"head": 9}, "head is 9;"),
    ({"start": 3}, "start is 3; it must be a whole number from 0 to 2."),
    ({"text": "s7"}, "Letter 1 of the word, 's7', is unknown."),
    ({"task": "shell"}, "task is 'shell';"),
]


@pytest.mark.parametrize(("changed", "sentence"), BAD)
def test_bad_requests_get_a_sentence(changed, sentence, models):
    request = {"model": "nplr", "task": "s5_generators", "text": "s0 s1 s2"} | changed
    assert in_sentences(Insides(models).of_word)(request)["error"].startswith(sentence)
