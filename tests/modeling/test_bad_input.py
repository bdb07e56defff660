"""Bad input is refused with its name, what was given and what is allowed; parameters and states stay as they were."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from helpers.model_cases import build, small_config
from mamba3_nplr import (
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRModel,
)

NAN = torch.full((2, 4, 16), float("nan"), dtype=torch.float64)
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "Exactly one of input_ids, inputs_embeds and observations is needed; given: none"),
        ({"input_ids": IDS, "inputs_embeds": NAN}, "given: input_ids, inputs_embeds"),
        ({"input_ids": IDS[0]}, r"input_ids have shape \(4,\); they must be \(batch, length\)"),
        ({"input_ids": IDS + 6}, "input_ids hold 14; with vocab_size=11 they must be 0 to 10"),
        ({"input_ids": IDS + 3}, "input_ids hold 11; with vocab_size=11 they must be 0 to 10"),
        ({"input_ids": IDS - 2}, "input_ids hold -1"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 4)}, r"attention_mask has shape \(1, 4\).*\(2, 4\)"),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor(4)}, r"cu_seqlens has shape \(\)"),
        ({"input_ids": IDS, "attention_mask": torch.full((2, 4), 2)}, "attention_mask holds 2; it must be of booleans"),
        ({"input_ids": IDS, "attention_mask": NAN[..., 0]}, "attention_mask holds nan"),
        ({"observations": NAN}, "observations need input_type='observations'; this model has input_type='tokens'"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\).*\(2, 4\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask has shape"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 4])}, "needs a batch of 1 that holds all.*the batch is 2"),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens=\[0, 5\].*packed length 4"),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 3, 2, 4])}, "must rise from 0"),
        (
            {"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 4]), "attention_mask": torch.tensor([[0, 1, 1, 1]])},
            "pass only one of them",
        ),
        ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, "packing needs a batch of 1"),
        (
            {
                "input_ids": IDS[:1],
                "position_ids": torch.tensor([[0, 1, 0, 1]]),
                "attention_mask": torch.tensor([[0, 1, 1, 1]]),
            },
            "pass only one of them",
        ),
        *(
            ({"input_ids": IDS[:rows], "position_ids": torch.zeros(shape).long()}, rf"position_ids have shape {named}")
            for rows, shape, named in [
                (2, (2, 3), r"\(2, 3\); they must be \(batch, length\) = \(2, 4\) or \(1, 4\)"),
                (2, (3, 4), r"\(3, 4\)"),
                (1, (1, 6), r"\(1, 6\); they must be \(batch, length\) = \(1, 4\)"),
                (1, (1, 3), r"\(1, 3\)"),
                (1, (4,), r"\(4,\)"),
                (1, (), r"\(\)"),
                (1, (3, 1, 4), r"\(3, 1, 4\)"),
            ]
        ),
        (
            {"input_ids": IDS[:1], "position_ids": torch.zeros(1, 3), "cu_seqlens": torch.tensor([0, 4])},
            r"position_ids have shape \(1, 3\)",
        ),
        ({"input_ids": IDS, "past_key_values": DynamicCache()}, "0 recurrent layers of 0; this model needs 2"),
        ({"input_ids": IDS, "past_key_values": (1, 2)}, "past_key_values is a tuple"),
        ({"input_ids": IDS, "past_key_values": DynamicCache(config=LlamaConfig(num_hidden_layers=2))}, "0 recurrent"),
    ],
)
def test_bad_input_is_named(inputs, message):
    model = build(Mamba3NPLRModel)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        model(**inputs)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'atention_mask'"):
        build(Mamba3NPLRModel)(IDS, atention_mask=torch.ones(2, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'label'"):
        build(Mamba3NPLRForSequenceClassification)(IDS, label=torch.zeros(2))


def test_positions_of_a_wrong_length_are_refused_by_the_heads():
    with pytest.raises(ValueError, match=r"position_ids have shape \(1, 6\)"):
        build(Mamba3NPLRForSequenceClassification)(IDS[:1], position_ids=torch.tensor([[0, 1, 0, 1, 0, 1]]))
    assert build(Mamba3NPLRModel)(IDS, position_ids=torch.arange(4)[None]).last_hidden_state.shape == (2, 4, 12)


@torch.no_grad()
def test_refused_input_leaves_the_cache_as_it_was():
    model = build(Mamba3NPLRModel)
    cache = model(IDS, use_cache=True).past_key_values
    kept = [cache.get_recurrent_state(layer).clone() for layer in range(2)]
    for bad in (
        {"input_ids": IDS + 100},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 3)},
        {"input_ids": IDS[:1]},
    ):
        with pytest.raises(ValueError):
            model(**bad, past_key_values=cache)
        assert all(torch.equal(cache.get_recurrent_state(layer), kept[layer]) for layer in range(2))


@pytest.mark.parametrize(
    "other", [{"state_size": 4}, {"head_dim": 6}, {"num_hidden_layers": 3}, {"use_rope": False}, {"hidden_size": 16}]
)
@torch.no_grad()
def test_a_cache_from_another_configuration_is_refused(other):
    cache = build(Mamba3NPLRModel, **other)(IDS).past_key_values
    with pytest.raises(ValueError, match="past_key_values ha|holds states of shapes"):
        build(Mamba3NPLRModel)(IDS, past_key_values=cache)


@torch.no_grad()
def test_an_empty_sequence_returns_the_state_unchanged():
    model = build(Mamba3NPLRModel, "learned_state")
    cache = model(IDS).past_key_values
    kept = cache.get_recurrent_state(0).clone()
    result = model(IDS[:, :0], past_key_values=cache)
    assert result.last_hidden_state.shape == (2, 0, 12)
    assert torch.equal(cache.get_recurrent_state(0), kept)
    with pytest.raises(ValueError, match="The sequence is empty"):
        build(Mamba3NPLRForSequenceClassification)(IDS[:, :0])


@torch.no_grad()
def test_a_sequence_of_length_one():
    assert build(Mamba3NPLRModel)(IDS[:, :1]).last_hidden_state.isfinite().all()


@torch.no_grad()
def test_a_mask_of_padding_only_keeps_the_state():
    model = build(Mamba3NPLRModel)
    cache = model(IDS).past_key_values
    kept = cache.get_recurrent_state(1).clone()
    result = model(IDS, attention_mask=torch.zeros(2, 4), past_key_values=cache)
    assert not result.last_hidden_state.any()
    assert torch.equal(cache.get_recurrent_state(1), kept)


def test_observations_are_checked():
    model = build(Mamba3NPLRForBehaviorCloning)
    with pytest.raises(ValueError, match="not finite, first in row 0, frame 0"):
        model(NAN)
    with pytest.raises(ValueError, match=r"observations have shape \(2, 4, 15\).*observation_size=16"):
        model(NAN[..., :15])
    with pytest.raises(ValueError, match=r"observations have shape \(4, 16\)"):
        model(NAN[0])


def test_an_unknown_backend_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="scan_backend='tritn' is unknown.*reference, chunkwise"):
        Mamba3NPLRModel(small_config(scan_backend="tritn"))


def test_a_configuration_broken_after_the_fact_is_refused():
    config = small_config()
    config.head_dim = 5
    with pytest.raises(Exception, match="head_dim=5 is not allowed"):
        Mamba3NPLRModel(config)


def test_a_truncated_weights_file_is_refused(tmp_path):
    build(Mamba3NPLRModel).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match="damaged or only partly there"):
        Mamba3NPLRModel.from_pretrained(tmp_path)


def test_keywords_of_transformers_are_tolerated():
    keywords = {"cache_position": torch.arange(4), "logits_to_keep": 1, "output_attentions": False}
    assert build(Mamba3NPLRModel)(IDS, **keywords).last_hidden_state.shape == (2, 4, 12)


@torch.no_grad()
def test_every_layer_of_a_cache_is_checked():
    model = build(Mamba3NPLRModel)
    cache = model(IDS).past_key_values
    cache.layers[1] = model(IDS[:1]).past_key_values.layers[1]
    with pytest.raises(ValueError, match="in layer 1"):
        model(IDS, past_key_values=cache)


def test_a_head_without_input_says_so():
    with pytest.raises(ValueError, match="Exactly one of input_ids"):
        build(Mamba3NPLRForSequenceClassification)(attention_mask=torch.ones(2, 4))


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("option", ["paper", "no_block_norm"])
@torch.no_grad()
def test_embeddings_of_another_width_are_refused(option, length):
    model = build(Mamba3NPLRModel, option)
    for width in (5, 11, 13, 40):
        with pytest.raises(ValueError, match=rf"inputs_embeds have shape \(2, {length}, {width}\).*hidden_size=12"):
            model(inputs_embeds=torch.zeros(2, length, width, dtype=torch.float64))
    with pytest.raises(ValueError, match="inputs_embeds have shape .* dtype torch.int64"):
        model(inputs_embeds=torch.zeros(2, length, 12, dtype=torch.int64))
