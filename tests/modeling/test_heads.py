"""The heads: Hugging Face's contracts, prefix supervision, and the loss and policy of behaviour cloning."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.model_cases import build, small_config, tokens
from helpers.scan_cases import error
from mamba3_nplr import (
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
)
from mamba3_nplr.modeling import model_inputs


def classifier(**changes):
    return build(Mamba3NPLRForSequenceClassification, **changes)


@torch.no_grad()
def test_sequence_logits_are_those_of_the_last_valid_position():
    model = classifier()
    ids = tokens(3, 8)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 6 + [1] * 2])
    result = model(ids, attention_mask=mask, output_prefix_logits=True)
    assert result.logits.shape == (3, 5)
    expected = torch.stack([result.prefix_logits[0, 7], result.prefix_logits[1, 4], result.prefix_logits[2, 7]])
    assert error(result.logits, expected) < 1e-12
    assert error(result.logits[1:2], model(ids[1:2, :5]).logits) < 1e-12


@torch.no_grad()
def test_the_pad_token_marks_padding_if_no_mask_does():
    model = classifier(pad_token_id=0)
    ids = torch.tensor([[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]])
    assert error(model(ids).logits[:1], model(ids[:1, :3]).logits) < 1e-12


@torch.no_grad()
def test_a_row_of_padding_gives_zero_logits():
    model = classifier()
    result = model(tokens(2, 4), attention_mask=torch.tensor([[0] * 4, [1] * 4]))
    assert not result.logits[0].any()
    assert result.logits[1].all()


def test_labels_for_the_last_position():
    model = classifier()
    ids, labels = tokens(3, 6), torch.tensor([1, 4, 0])
    result = model(ids, labels=labels)
    assert error(result.loss, F.cross_entropy(result.logits, labels)) < 1e-12
    assert result.prefix_logits is None


def test_labels_for_every_position():
    model = classifier()
    ids, labels = tokens(3, 6), torch.randint(0, 5, (3, 6))
    labels[0, 2] = -100
    mask = torch.tensor([[1] * 6, [1] * 6, [1] * 4 + [0] * 2])
    result = model(ids, labels=labels, attention_mask=mask)
    assert result.logits.shape == (3, 5)
    assert result.prefix_logits.shape == (3, 6, 5)
    counted = (labels != -100) & mask.bool()
    assert error(result.loss, F.cross_entropy(result.prefix_logits[counted], labels[counted])) < 1e-12


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("problem_type", ["regression", "single_label_classification", "multi_label_classification"])
def test_problem_types(problem_type, prefixes):
    model = classifier(problem_type=problem_type)
    ids = tokens(3, 6)
    shape = (3, 6) if prefixes else (3,)
    if problem_type == "single_label_classification":
        labels, expected = torch.randint(0, 5, shape), lambda x, y: F.cross_entropy(x.flatten(0, -2), y.flatten())
    elif problem_type == "regression":
        labels, expected = torch.randn(*shape, 5), F.mse_loss
    else:
        labels, expected = torch.randint(0, 2, (*shape, 5)).double(), F.binary_cross_entropy_with_logits
    result = model(ids, labels=labels)
    logits = result.prefix_logits if prefixes else result.logits
    wanted = expected(logits, labels if problem_type == "single_label_classification" else labels.double())
    assert error(result.loss, wanted) < 1e-12


def test_regression_with_one_label():
    model = classifier(num_labels=1)
    ids = tokens(3, 6)
    for labels in (torch.randn(3), torch.randn(3, 1), torch.randn(3, 6), torch.randn(3, 6, 1)):
        result = model(ids, labels=labels)
        found = result.logits if labels.shape[:2] != (3, 6) else result.prefix_logits
        assert error(result.loss, F.mse_loss(found, labels.double().reshape(found.shape))) < 1e-12


def test_label_smoothing():
    model = classifier(label_smoothing=0.1)
    ids, labels = tokens(3, 6), torch.randint(0, 5, (3, 6))
    result = model(ids, labels=labels)
    wanted = F.cross_entropy(result.prefix_logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert error(result.loss, wanted) < 1e-12


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"labels have shape \(3, 4\).*\(3,\) for the last.*\(3, 6\) for every"):
        classifier()(tokens(3, 6), labels=torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="labels have shape"):
        build(Mamba3NPLRForTokenClassification)(tokens(3, 6), labels=torch.zeros(3, dtype=torch.long))


def test_packed_sequences_have_one_row_of_logits_each():
    model = classifier()
    first, second = tokens(1, 4), tokens(1, 7)
    packed = model(torch.cat([first, second], 1), cu_seqlens=torch.tensor([0, 4, 11]), labels=torch.tensor([2, 3]))
    expected = torch.cat([model(first).logits, model(second).logits])
    assert error(packed.logits, expected) < 1e-12
    assert error(packed.loss, F.cross_entropy(expected, torch.tensor([2, 3]))) < 1e-12


@torch.no_grad()
def test_sequence_classification_reads_observations_too():
    model = classifier(input_type="observations", observation_size=3)
    assert model(observations=torch.randn(2, 5, 3, dtype=torch.float64)).logits.shape == (2, 5)


def test_token_classification():
    model = build(Mamba3NPLRForTokenClassification)
    ids, labels = tokens(2, 6), torch.randint(0, 5, (2, 6))
    labels[1, 3:] = -100
    result = model(ids, labels=labels)
    assert result.logits.shape == (2, 6, 5)
    assert error(result.loss, F.cross_entropy(result.logits.flatten(0, 1), labels.flatten())) < 1e-12


@pytest.mark.parametrize("make", [classifier, lambda: build(Mamba3NPLRForTokenClassification)])
def test_num_items_in_batch_divides_the_sum(make):
    """The sum over parts of a batch, each divided by the number of items in all, is the loss of the batch."""
    model = make()
    ids, labels = tokens(4, 6), torch.randint(0, 5, (4, 6))
    labels[0, 1:] = -100
    items = (labels != -100).sum()
    parts = [model(ids[i:j], labels=labels[i:j], num_items_in_batch=items).loss for i, j in ((0, 1), (1, 4))]
    assert error(sum(parts), model(ids, labels=labels).loss) < 1e-12


def episodes(batch=3, time=7, cue_from=5):
    observations = torch.randn(batch, time, 16, dtype=torch.float64)
    observations[..., -1] = (torch.arange(time) >= cue_from).double()
    return observations, torch.randn(batch, time, 2, dtype=torch.float64)


def policy(**changes):
    return build(Mamba3NPLRForBehaviorCloning, **changes)


def test_behavior_cloning_loss_weighs_the_frames_after_the_cue():
    model = policy(cue_weight=20)
    observations, labels = episodes()
    result = model(observations, labels=labels)
    assert result.actions.shape == (3, 7, 2)
    squared = (result.actions - labels).square()
    expected = (squared[:, :5].sum() + 20 * squared[:, 5:].sum()) / (3 * 7 * 2)
    assert error(result.loss, expected) < 1e-12


@pytest.mark.parametrize("padding", ["mask", "labels"])
def test_padding_is_outside_the_behavior_cloning_loss(padding):
    model = policy(cue_weight=3)
    observations, labels = episodes()
    observations[1, 4:] = float("nan") if padding == "mask" else 0.0
    given = {"attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 7])}
    if padding == "labels":
        given = {}
        labels[1, 4:] = -100
    result = model(observations, labels=labels, **given)
    alone = [model(observations[i : i + 1, :n], labels=labels[i : i + 1, :n]) for i, n in ((0, 7), (1, 4), (2, 7))]
    expected = sum(one.loss * n for one, n in zip(alone, (7, 4, 7), strict=True)) / 18
    assert error(result.loss, expected) < 1e-12


@pytest.mark.parametrize("packed", [False, True])
def test_each_episode_counts_the_same_when_asked(packed):
    model = policy(episode_loss=True)
    observations, labels = episodes(batch=2)
    alone = [model(observations[i : i + 1, :n], labels=labels[i : i + 1, :n]).loss for i, n in ((0, 7), (1, 4))]
    if packed:
        rows = [torch.cat([x[0], x[1, :4]])[None] for x in (observations, labels)]
        result = model(rows[0], labels=rows[1], cu_seqlens=torch.tensor([0, 7, 11]))
    else:
        mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
        result = model(observations, labels=labels, attention_mask=mask)
    assert error(result.loss, sum(alone) / 2) < 1e-12
    assert not model.accepts_loss_kwargs


def test_frames_are_counted_across_parts_of_a_batch():
    model = policy()
    assert model.accepts_loss_kwargs
    observations, labels = episodes()
    labels[0, 3:] = -100
    items = (labels != -100).sum()
    parts = [model(observations[i:j], labels=labels[i:j], num_items_in_batch=items).loss for i, j in ((0, 1), (1, 3))]
    assert error(sum(parts), model(observations, labels=labels).loss) < 1e-12


@torch.no_grad()
def test_the_policy_acts_step_by_step_as_on_the_whole():
    model = policy()
    observations, _ = episodes()
    expected = model(observations).actions
    for _ in range(2):
        model.reset()
        found = torch.stack([model.select_action(frame) for frame in observations.unbind(1)], 1)
        assert error(found, expected) < 1e-10
    model.reset()
    single = [model.select_action(frame.numpy()) for frame in observations[0]]
    assert single[0].shape == (2,)
    assert error(torch.tensor(np.stack(single)), expected[0]) < 1e-10


def test_a_refused_observation_leaves_the_policy_as_it_was():
    model = policy()
    observations, _ = episodes(batch=1)
    model.select_action(observations[0, 0])
    kept = model.policy_states[0].h.clone()
    for bad, message in [
        (np.full(16, np.nan), "not finite"),
        (np.zeros(15), r"shape \(15,\); it must be \(16,\)"),
        (np.zeros((1, 1, 16)), r"must be \(16,\)"),
        (np.zeros((2, 16)), "of 2 environments; this episode has 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.select_action(bad)
        assert torch.equal(model.policy_states[0].h, kept)


def test_labels_need_the_cue_only_where_it_weighs():
    embeddings, labels = torch.randn(1, 3, 12, dtype=torch.float64), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="labels need observations: with cue_weight=20 the cue"):
        policy(cue_weight=20)(inputs_embeds=embeddings, labels=labels)
    result = policy()(inputs_embeds=embeddings, labels=labels)
    assert error(result.loss, result.actions.square().mean()) < 1e-12


def test_all_frames_weigh_alike_by_default():
    observations, labels = episodes()
    result = policy()(observations, labels=labels)
    assert error(result.loss, (result.actions - labels).square().mean()) < 1e-12


def test_labels_of_minus_100_and_padding_are_outside_the_other_losses():
    for problem_type, measure in (
        ("regression", F.mse_loss),
        ("multi_label_classification", F.binary_cross_entropy_with_logits),
    ):
        model = classifier(problem_type=problem_type)
        labels = torch.randint(0, 2, (2, 6, 5)).double()
        labels[0, 2, 1:] = -100
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
        result = model(tokens(2, 6), labels=labels, attention_mask=mask)
        counted = (labels != -100) & mask.bool()[..., None]
        assert error(result.loss, measure(result.prefix_logits[counted], labels[counted])) < 1e-12


def test_token_labels_at_padding_do_not_count():
    model = build(Mamba3NPLRForTokenClassification, label_smoothing=0.1)
    ids, labels = tokens(2, 6), torch.randint(0, 5, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    result = model(ids, labels=labels, attention_mask=mask)
    counted = mask.bool()
    wanted = F.cross_entropy(result.logits[counted], labels[counted], label_smoothing=0.1)
    assert error(result.loss, wanted) < 1e-12


@pytest.mark.parametrize("make", [classifier, lambda: build(Mamba3NPLRForTokenClassification)])
def test_a_batch_without_labels_has_loss_zero(make):
    assert make()(tokens(2, 6), labels=torch.full((2, 6), -100)).loss == 0


def test_episodes_without_frames_do_not_count():
    model = policy(episode_loss=True)
    observations, labels = episodes(batch=2)
    mask = torch.tensor([[1] * 7, [0] * 7])
    alone = model(observations[:1], labels=labels[:1]).loss
    assert error(model(observations, labels=labels, attention_mask=mask).loss, alone) < 1e-12


def test_the_cue_is_on_above_one_half():
    model = policy(cue_weight=20)
    observations, labels = episodes()
    observations[..., -1] = 0.4
    result = model(observations, labels=labels)
    assert error(result.loss, (result.actions - labels).square().mean()) < 1e-12


def test_the_loss_of_half_precision_logits_is_float32():
    model = build(Mamba3NPLRForTokenClassification, dtype=torch.float32).bfloat16()
    ids, labels = tokens(2, 6), torch.randint(0, 5, (2, 6))
    result = model(ids, labels=labels)
    assert result.loss.dtype == torch.float32
    assert error(result.loss, F.cross_entropy(result.logits.float().flatten(0, 1), labels.flatten())) < 1e-6


@torch.no_grad()
def test_the_pad_token_means_nothing_where_a_mask_is_given():
    model = classifier(pad_token_id=0)
    ids = torch.tensor([[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]])
    result = model(ids, attention_mask=torch.tensor([[1] * 5, [1] * 4 + [0]]), output_prefix_logits=True)
    assert error(result.logits[0], result.prefix_logits[0, 4]) < 1e-12


@torch.no_grad()
def test_the_first_components_of_the_output_map_are_the_action():
    model = policy()
    observations, _ = episodes()
    hidden = model.model(observations=observations).last_hidden_state
    assert error(model(observations).actions, hidden @ model.action_head.weight[:2].T) < 1e-12


def test_behavior_cloning_leaves_the_given_configuration_alone():
    config = small_config()
    model = Mamba3NPLRForBehaviorCloning(config)
    assert config.input_type == "tokens" and model.config.input_type == "observations"


@torch.no_grad()
def test_a_nan_observation_is_refused_on_any_device(monkeypatch):
    """The policy checks by itself: the model's own check does not look into tensors of accelerators."""
    monkeypatch.setattr(model_inputs, "can_look_into", lambda x: False)
    with pytest.raises(ValueError, match="observation holds a number that is not finite"):
        policy().select_action(torch.full((16,), float("nan")))


def test_a_policy_keeps_no_graph():
    model = policy()
    action = model.select_action(torch.zeros(16))
    assert not action.requires_grad
    assert not model.policy_states[0].h.requires_grad


def test_demonstrations_of_another_shape_are_refused():
    observations, labels = episodes()
    with pytest.raises(ValueError, match=r"labels have shape \(3, 7, 1\); they must be \(3, 7, 2\)"):
        policy()(observations, labels=labels[..., :1])


@torch.no_grad()
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q"])
def test_heads_understand_every_way_of_packing(by):
    model = classifier()
    first, second = tokens(1, 4), tokens(1, 7)
    packing = {"cu_seq_lens_q": torch.tensor([0, 4, 11])}
    if by == "position_ids":
        packing = {by: torch.cat([torch.arange(4), torch.arange(7)])[None]}
    expected = torch.cat([model(first).logits, model(second).logits])
    assert error(model(torch.cat([first, second], 1), **packing).logits, expected) < 1e-12


@torch.no_grad()
def test_an_action_may_be_wider_than_an_observation():
    model = policy(observation_size=3, action_size=5)
    assert model(torch.randn(2, 4, 3, dtype=torch.float64)).actions.shape == (2, 4, 5)


def test_floating_labels_are_multi_label_by_default():
    model = classifier()
    labels = torch.randint(0, 2, (3, 5)).double()
    result = model(tokens(3, 6), labels=labels)
    assert error(result.loss, F.binary_cross_entropy_with_logits(result.logits, labels)) < 1e-12


def test_one_label_for_a_sequence_of_one_position():
    """(batch, 1) is then both shapes; it is read as one label for each sequence."""
    result = classifier(num_labels=1)(tokens(3, 1), labels=torch.randn(3, 1))
    assert result.prefix_logits is None


@pytest.mark.parametrize("where", ["observations", "labels"])
def test_gradients_are_finite_whatever_stands_in_the_padding(where):
    model = policy()
    observations, labels = episodes(batch=2)
    (observations if where == "observations" else labels)[1, 4:] = float("nan")
    model(observations, labels=labels, attention_mask=torch.tensor([[1] * 7, [1] * 4 + [0] * 3])).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_a_mask_without_padding_is_a_mask():
    model = classifier(pad_token_id=0)
    ids = torch.tensor([[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]])
    result = model(ids, attention_mask=torch.ones(2, 5), output_prefix_logits=True)
    assert error(result.logits[0], result.prefix_logits[0, 4]) < 1e-12


@torch.no_grad()
def test_an_empty_packed_sequence_has_zero_logits():
    for bounds in ([0, 0, 6], [0, 4, 4, 6]):
        logits = classifier()(tokens(1, 6), cu_seqlens=torch.tensor(bounds)).logits
        assert not logits[-2 if len(bounds) == 4 else 0].any()


def test_the_configuration_may_ask_for_tuples():
    model = classifier(return_dict=False)
    assert isinstance(model(tokens(2, 3)), tuple)
    acting = policy(return_dict=False)
    assert acting.select_action(torch.zeros(16)).shape == (2,)


@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_no_items_at_all_give_a_loss_of_zero(items):
    labels = torch.full((2, 6), -100)
    assert classifier()(tokens(2, 6), labels=labels, num_items_in_batch=items).loss == 0
