"""The configuration: defaults of the paper, and errors that name the field, the value and what is allowed."""

import inspect
import json
from dataclasses import fields

import pytest
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
from mamba3_nplr.configuration.configuration_sequence_model import FORMAT_VERSION
from transformers import AutoConfig, AutoModel, PreTrainedConfig

PAPER = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "state_size": 16,
    "head_dim": 16,
    "expand": 4,
    "num_rope_pairs": 4,
    "use_rope": True,
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
        ("injection", "euler", r"\('trapezoid', 'delta'\)"),
        ("gate_form", "hard", r"\('smooth', 'exact'\)"),
        ("initial_state", "random", r"\('zero', 'learned'\)"),
        ("decay_activation", "relu", r"\('softplus', 'heavy_tail'\)"),
        ("block_norm", "batch_norm", r"\('layer_norm', 'rms_norm', 'none'\)"),
        ("norm_eps", -1e-5, "at least 0"),
        ("input_type", "images", r"\('tokens', 'observations', 'embeddings'\)"),
        ("num_rope_pairs", 9, "1 to 8"),
        ("num_rope_pairs", 0, "1 to 8"),
        ("head_dim", 24, "divisor of expand \\* hidden_size = 256"),
        ("dt_min", 0.5, "at most dt_max=0.1"),
        ("chunk_size", 0, "at least 1"),
        ("label_smoothing", 1.0, "below 1"),
        ("label_smoothing", -0.1, "at least 0"),
        ("a_min", -0.1, "at least 0"),
        ("dt_min", 0, "above 0"),
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
