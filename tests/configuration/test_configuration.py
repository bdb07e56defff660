"""The configuration: defaults of the paper, and errors that name the field, the value and what is allowed."""

import inspect
import json
from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

from helpers.family_cases import FAMILY_SIZES
from mamba3_nplr import (
    Mamba3NPLRConfig,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRModel,
)
from mamba3_nplr.configuration.configuration_sequence_model import FORMAT_VERSION
from mamba3_nplr.modeling.auto import AutoModelForBehaviorCloning

# Fields whose names are those of other rules: the version, and tokens, which lie in the vocabulary.
OTHER_RULES = {"format_version", "pad_token_id", "bos_token_id", "eos_token_id"}


def numbers_of(config_class) -> dict[str, type]:
    """The fields of this package that hold numbers, and whether they are whole ones."""
    inherited = {field.name for field in fields(PreTrainedConfig)} | OTHER_RULES
    kinds = {int: int, float | int: float}
    return {x.name: kinds[x.type] for x in fields(config_class) if x.name not in inherited and x.type in kinds}


NUMBERS = [(config_class, *item) for config_class in FAMILY_SIZES for item in numbers_of(config_class).items()]

PAPER = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "state_size": 16,
    "head_dim": 16,
    "expand": 4,
    "num_rope_pairs": 4,
    "use_rope": True,
    "rope_per_head": False,
    "reflection_rank": 1,
    "reflection_form": "additive",
    "injection": "trapezoid",
    "gate_form": "smooth",
    "initial_state": "zero",
    "decay_activation": "softplus",
    "a_min": 1e-4,
    "chunk_size": 64,
    "block_norm": "layer_norm",
    "norm_eps": 1e-5,
    "residual": True,
    "output_norm": False,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "beta_bias_init": 0,
    "observation_size": 16,
    "action_size": 2,
    "scan_backend": "auto",
}


def test_defaults_are_the_model_of_the_paper():
    config = Mamba3NPLRConfig()
    assert {name: getattr(config, name) for name in PAPER} == PAPER
    assert config.model_type == "mamba3_nplr"
    assert config.num_heads == 16
    assert config.layer_types == ["linear_attention"]


def test_every_field_is_documented():
    inherited = {field.name for field in fields(PreTrainedConfig)}
    for field in fields(Mamba3NPLRConfig):
        if field.name not in inherited:
            assert f"\n    {field.name} (" in inspect.getdoc(Mamba3NPLRConfig), field.name


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("hidden_size", "64", "expected int"),
        ("hidden_size", 0, "at least 1"),
        ("vocab_size", -3, "at least 1"),
        ("use_rope", 1, "expected bool"),
        ("cue_weight", "heavy", "float"),
        ("cue_weight", -1, "at least 0"),
        ("reflection_rank", 2, r"\(0, 1\)"),
        ("reflection_form", "contracting", r"\('additive', 'contractive'\)"),
        ("injection", "euler", r"\('trapezoid', 'delta', 'overwrite'\)"),
        ("gate_form", "hard", r"\('smooth', 'exact'\)"),
        ("initial_state", "random", r"\('zero', 'learned'\)"),
        ("decay_activation", "relu", r"\('softplus', 'heavy_tail'\)"),
        ("block_norm", "batch_norm", r"\('layer_norm', 'rms_norm', 'none'\)"),
        ("norm_eps", -1e-5, "at least 1e-12 and at most 1"),
        ("norm_eps", 0, "at least 1e-12 and at most 1"),
        ("input_type", "images", r"\('tokens', 'observations', 'pixels', 'embeddings'\)"),
        ("embedding_init", "normal", r"\('uniform', 'orthogonal'\)"),
        ("num_rope_pairs", 9, "1 to 8"),
        ("num_rope_pairs", 0, "1 to 8"),
        ("head_dim", 24, "divisor of expand \\* hidden_size = 256"),
        ("dt_min", 0.5, "at most dt_max=0.1"),
        ("chunk_size", 0, "at least 1"),
        ("label_smoothing", 1.0, "below 1"),
        ("label_smoothing", -0.1, "at least 0"),
        ("a_min", -0.1, "at least 0"),
        ("dt_min", 0, "at least 1e-12 and at most 1000"),
        *((name, 0, "at least 1") for name in ("num_hidden_layers", "state_size", "head_dim", "expand")),
        *((name, 0, "at least 1") for name in ("observation_size", "action_size")),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(Exception, match=allowed) as caught:
        Mamba3NPLRConfig(**{field: value})
    assert field in str(caught.value)
    assert str(value) in str(caught.value)


def test_impossible_combinations():
    with pytest.raises(Exception, match="injection='delta' is not allowed.*reflection_rank=0"):
        Mamba3NPLRConfig(injection="delta", reflection_rank=0)
    assert Mamba3NPLRConfig(use_rope=False, state_size=3, head_dim=8).num_rope_pairs == 4


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("hiden_size", "Did you mean `hidden_size`"),
        ("reflexion_rank", "`reflection_rank`"),
        ("foo", "The fields are: .*"),
    ],
)
def test_an_unknown_keyword_is_refused(keyword, hint):
    with pytest.raises(ValueError, match=f"no field `{keyword}` \\(given: 7\\).*{hint}"):
        Mamba3NPLRConfig(**{keyword: 7})


@pytest.mark.parametrize(
    ("version", "advice"),
    [(FORMAT_VERSION + 1, "a newer mamba3_nplr.*Upgrade the package"), (1, "an older mamba3_nplr.*Train .* again")],
)
def test_a_checkpoint_of_another_format_is_refused(version, advice, tmp_path):
    Mamba3NPLRModel(Mamba3NPLRConfig()).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["format_version"] == FORMAT_VERSION
    written |= {"format_version": version, "field_of_that_format": 1}
    (tmp_path / "config.json").write_text(json.dumps(written))
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained, Mamba3NPLRModel.from_pretrained):
        with pytest.raises(ValueError, match=f"format_version={version} was written by {advice}"):
            load(tmp_path)


def test_round_trip(tmp_path):
    config = Mamba3NPLRConfig(
        hidden_size=32, gate_form="exact", injection="delta", cue_weight=3, num_labels=120, problem_type="regression"
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is Mamba3NPLRConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


def test_rope_pairs_without_rope():
    with pytest.raises(Exception, match="num_rope_pairs=-1 is not allowed: it must be at least 0"):
        Mamba3NPLRConfig(use_rope=False, num_rope_pairs=-1)


def test_defaults_of_training():
    config = Mamba3NPLRConfig()
    assert (config.cue_weight, config.episode_loss, config.label_smoothing, config.use_cache) == (1, False, 0, True)
    assert config.input_type == "tokens" and config.vocab_size == 128
    assert config.keys_to_ignore_at_inference == ["past_key_values"]


def test_keywords_that_transformers_keeps_in_configurations_are_accepted():
    config = Mamba3NPLRConfig(max_length=7, _attn_implementation="eager", _some_private_mark=1)
    assert config.num_heads == 16


@pytest.mark.parametrize(("config_class", "field", "kind"), NUMBERS)
def test_every_number_has_a_range_and_nothing_outside_is_accepted(config_class, field, kind):
    sizes, allowed = FAMILY_SIZES[config_class], config_class.ranges[field]
    wrong = [allowed.low - 1, allowed.high + 1, 10**30, -(10**30), 10**400]
    wrong += [float("nan"), float("inf"), -float("inf"), 1e300, -1e300] if kind is float else []
    wrong += [allowed.low] * allowed.above + [allowed.high] * allowed.below
    for value in wrong:
        with pytest.raises(
            ValueError, match=f"^{field}={value!r} is not allowed: it must be {allowed}.$".replace("+", ".")
        ):
            config_class(**sizes | {field: value})
        config = config_class(**sizes)
        setattr(config, field, value)
        with pytest.raises(Exception, match=f"{field}={value!r} is not allowed".replace("+", ".")):
            config.validate()
    for value in (None, "1", True, [1], 1j, *((1.0, 1e300) if kind is int else ())):
        with pytest.raises(Exception, match=f"(?s)'{field}'.*(expected|match)"):
            config_class(**sizes | {field: value})


def test_the_tables_hold_the_fields_and_no_others():
    assert len(NUMBERS) > 40
    for config_class in FAMILY_SIZES:
        assert config_class.ranges.keys() == numbers_of(config_class).keys()


ENDS = [(config_class, name) for config_class, name, kind in NUMBERS if kind is float]


@pytest.mark.parametrize(("config_class", "field"), ENDS)
@pytest.mark.parametrize("end", ["low", "high"])
def test_at_the_ends_of_a_range_losses_and_gradients_are_finite(config_class, field, end):
    allowed = config_class.ranges[field]
    value = allowed.low if end == "low" else allowed.high
    value += 1e-9 if value == allowed.low and allowed.above else -1e-3 if value == allowed.high and allowed.below else 0
    changes = {"dt_min": value, "dt_max": value} if field in ("dt_min", "dt_max") else {field: value}
    config = config_class(**FAMILY_SIZES[config_class] | changes)
    classifier, policy = (
        x.from_config(config) for x in (AutoModelForSequenceClassification, AutoModelForBehaviorCloning)
    )
    words, frames = torch.randint(0, 11, (2, 9)), torch.randn(2, 9, 16)
    frames[0, 0] = 0
    for model, inputs, labels in ((classifier, words, words % 5), (policy, frames, torch.randn(2, 9, 2))):
        loss = model(inputs, labels=labels).loss
        loss.backward()
        assert loss.isfinite()
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all() and (parameter.grad is None or parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("number", [0, -1, 2.5, "3", True, None, 10**30])
@pytest.mark.parametrize("config_class", FAMILY_SIZES)
def test_a_wrong_number_of_labels_is_refused(config_class, number, tmp_path):
    with pytest.raises(
        ValueError, match=f"num_labels={number!r} is not allowed: it must be a whole number, at least 1"
    ):
        config_class(num_labels=number)
    config_class().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"num_labels={number!r} is not allowed"):
        AutoConfig.from_pretrained(tmp_path, num_labels=number)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({0: "a", 2: "b"}, "id2label has the keys 0, 2; with 2 labels they must be the whole numbers 0 to 1"),
        ({1: "a", 2: "b"}, "id2label has the keys 1, 2"),
        ({-1: "a", 0: "b"}, "id2label has the keys -1, 0"),
        ({"0": "a", "2": "b"}, "id2label has the keys '?0'?, '?2'?;"),
        ({2 * i: "a" for i in range(13)}, "id2label has the keys 0, 2, .* 22, ...; with 13 labels"),
        ({}, "id2label is empty, which makes num_labels=0"),
        ({0: 1}, "'id2label' with value {0: 1}"),
        (["a", "b"], r"'id2label' with value \['a', 'b'\]"),
    ],
)
def test_labels_are_numbered_without_gaps(labels, message):
    with pytest.raises(Exception, match=message):
        Mamba3NPLRConfig(id2label=labels)
    config = Mamba3NPLRConfig()
    with pytest.raises(Exception, match=message):
        config.id2label = labels
        Mamba3NPLRForSequenceClassification(config)


def test_no_labels_after_the_fact_are_refused_by_the_model():
    config = Mamba3NPLRConfig()
    config.num_labels = 0
    with pytest.raises(Exception, match="id2label is empty, which makes num_labels=0: there must be at least one"):
        Mamba3NPLRForSequenceClassification(config)


@pytest.mark.parametrize("config_class", FAMILY_SIZES)
@pytest.mark.parametrize("field", ["pad_token_id", "bos_token_id", "eos_token_id"])
def test_special_tokens_are_of_the_vocabulary(config_class, field):
    for token in (11, -1, 10**30):
        with pytest.raises(Exception, match=f"{field}={token} is not allowed: .* at least 0 and at most 10"):
            config_class(**FAMILY_SIZES[config_class] | {field: token})
        # What reads no tokens has no vocabulary.
        assert getattr(config_class(**{field: token, "input_type": "observations"}), field) == token
    for token in (None, 0, 10):
        assert getattr(config_class(**FAMILY_SIZES[config_class] | {field: token}), field) == token


@pytest.mark.parametrize("config_class", FAMILY_SIZES)
@pytest.mark.parametrize("value", ["foo", "", 1, ["regression"]])
def test_an_unknown_problem_type_is_refused(config_class, value):
    with pytest.raises(Exception, match="(?s)'problem_type' with value .* doesn't match any type.*'regression'"):
        config_class(problem_type=value)
    config = config_class()
    with pytest.raises(Exception, match="'problem_type' with value"):
        config.problem_type = value


def test_labels_and_tokens_that_transformers_sets_are_accepted(tmp_path):
    names = {"id2label": {0: "off", 1: "on"}, "label2id": {"off": 0, "on": 1}}
    Mamba3NPLRForSequenceClassification(
        Mamba3NPLRConfig(**FAMILY_SIZES[Mamba3NPLRConfig] | names | {"num_labels": 2})
    ).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).id2label == names["id2label"]
    assert AutoConfig.from_pretrained(tmp_path, num_labels=3).id2label == {i: f"LABEL_{i}" for i in range(3)}
    more = {"id2label": {0: "a", 1: "b", 2: "c"}, "pad_token_id": 10, "problem_type": "multi_label_classification"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **more, ignore_mismatched_sizes=True)
    assert model.num_labels == 3 and model.config.problem_type == "multi_label_classification"
