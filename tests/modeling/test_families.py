"""Laws that every family obeys: pieces, padding, packing, precision and graphs change no result."""

import copy
import inspect
from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedConfig

import mamba3_nplr
from helpers.family_cases import ALL_CASES, CASES, build_case, case_class, case_config, case_inputs
from helpers.model_cases import tokens
from helpers.scan_cases import error
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.modeling.families import FAMILIES, HEADS, load


def states(cache):
    """All parts of the states of all layers."""
    return [part for layer in range(2) for part in (cache.get_recurrent_state(layer), cache.get_conv_state(layer))]


def assert_same_states(found, expected, tolerance):
    for a, b in zip(states(found), states(expected), strict=True):
        assert a.shape == b.shape
        assert a.numel() == 0 or not b.any() or error(a, b) < tolerance


def test_every_family_is_tested_here():
    assert {config_class for config_class, _ in ALL_CASES.values()} == {load(family.config) for family in FAMILIES}


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("pieces", [[1] * 14, [5, 1, 8], [2, 12], [14]])
@torch.no_grad()
def test_pieces_with_a_cache_are_the_whole(case, pieces):
    model = build_case(case)
    ids = tokens(3, 14)
    whole = model(ids)
    cache, outputs = None, []
    for piece in ids.split(pieces, dim=1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        outputs.append(result.last_hidden_state)
    assert error(torch.cat(outputs, 1), whole.last_hidden_state) < 1e-10
    assert_same_states(cache, whole.past_key_values, 1e-10)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_padding_anywhere_changes_nothing(case):
    model = build_case(case)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0], [1] * 9, [0] * 8 + [1], [0] * 9]).bool()
    ids = tokens(4, 9)
    found = model(ids, attention_mask=mask)
    for row in range(3):
        alone = model(ids[row, mask[row]][None])
        assert error(found.last_hidden_state[row, mask[row]][None], alone.last_hidden_state) < 1e-12
        for a, b in zip(states(found.past_key_values), states(alone.past_key_values), strict=True):
            assert a.numel() == 0 or not b.any() or error(a[row : row + 1], b) < 1e-12
    assert not found.last_hidden_state[~mask].any()
    # With other numbers in the padding the calls and their shapes are the same: equal to the last bit.
    other = model(torch.where(mask, ids, 3), attention_mask=mask)
    assert torch.equal(other.last_hidden_state, found.last_hidden_state)
    assert all(torch.equal(a, b) for a, b in zip(states(other[1]), states(found[1]), strict=True))


@pytest.mark.parametrize("case", ["gdn", "ids4"])
@torch.no_grad()
def test_every_hidden_state_is_zero_at_padding(case):
    mask = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
    result = build_case(case)(tokens(2, 5), attention_mask=mask, output_hidden_states=True)
    assert len(result.hidden_states) == 3
    assert not any(x[mask == 0].any() for x in result.hidden_states)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_padded_row_waits_unchanged(case):
    model = build_case(case)
    ids, mask = tokens(3, 9), torch.tensor([[1] * 8 + [0], [0] + [1] * 5 + [0] * 3, [0] * 6 + [1] * 2 + [0]])
    whole = model(ids, attention_mask=mask)
    cache, outputs, start = None, [], 0
    for size in (1, 1, 4, 1, 2):
        piece = slice(start, start + size)
        result = model(ids[:, piece], attention_mask=mask[:, piece], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        outputs.append(result.last_hidden_state)
        start += size
    assert error(torch.cat(outputs, 1), whole.last_hidden_state) < 1e-10
    assert_same_states(cache, whole.past_key_values, 1e-10)
    kept = [part.clone() for part in states(cache)]
    model(ids, attention_mask=torch.zeros_like(mask), past_key_values=cache)
    model(ids[:, :0], past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), kept, strict=True))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_packed_is_separate_and_continues(case):
    model = build_case(case)
    sequences = [tokens(1, length) for length in (5, 1, 9)]
    bounds = torch.tensor([0, 5, 6, 15])
    packed = model(torch.cat(sequences, 1), cu_seqlens=bounds)
    alone = [model(ids) for ids in sequences]
    expected = torch.cat([result.last_hidden_state for result in alone], 1)
    assert error(packed.last_hidden_state, expected) < 1e-12
    again = model(torch.cat(sequences, 1), cu_seqlens=bounds, past_key_values=packed.past_key_values)
    expected = [
        model(ids, past_key_values=result.past_key_values).last_hidden_state
        for ids, result in zip(sequences, alone, strict=True)
    ]
    assert error(again.last_hidden_state, torch.cat(expected, 1)) < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_every_parameter_also_through_the_cache(case):
    """DDP fails on a parameter that the loss does not use: none may exist."""
    model = build_case(case)
    ids = tokens(2, 9)

    def gradients(pieces):
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        outputs = [model(piece, past_key_values=cache).last_hidden_state for piece in ids.split(pieces, 1)]
        (torch.cat(outputs, 1) * torch.linspace(-1, 1, 12, dtype=torch.float64)).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, pieces = gradients([9]), gradients([3, 1, 5])
    assert not [name for name, gradient in whole.items() if not gradient.any()]
    for name in whole:
        assert error(pieces[name], whole[name]) < 1e-10, name


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_backend_and_chunks_change_nothing(case):
    model = build_case(case)
    ids = tokens(2, 17)
    expected = model(ids).last_hidden_state
    changes = [{"chunk_elements": 1}, {"chunk_elements": 10**6}] if case == "ids4" else []
    if case != "ids4":
        changes = [
            {"scan_backend": name, "chunk_size": size} for name in ("reference", "chunkwise") for size in (3, 64)
        ]
    for change in changes:
        for name, value in change.items():
            setattr(model.config, name, value)
        assert error(model(ids).last_hidden_state, expected) < 1e-10


@pytest.mark.parametrize("case", ["gdn", "gdp", "ids4"])
@torch.no_grad()
def test_a_policy_runs_step_by_step(case):
    policy = build_case(case, "ForBehaviorCloning")
    frames = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = policy(observations=frames).actions
    for _ in range(2):
        policy.reset()
        found = torch.stack([policy.select_action(frame) for frame in frames.unbind(1)], 1)
        assert error(found, expected) < 1e-10


@pytest.mark.parametrize("case", ["gdp_everything", "deltanet", "ids4"])
@torch.no_grad()
def test_half_precision_keeps_states_and_exponents_in_float32(case, tmp_path):
    build_case(case, "ForTokenClassification", dtype=torch.float32).save_pretrained(tmp_path)
    model = case_class(case, "ForTokenClassification").from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == ({"A_log", "dt_bias"} if case == "gdp_everything" else set())
    assert model.dtype == model.model.dtype == torch.bfloat16
    result = model(tokens(2, 9))
    assert result.logits.dtype == torch.bfloat16 and result.logits.isfinite().all()
    assert all(part.dtype == torch.float32 for part in states(result.past_key_values))


def linear_in_bfloat16(linear, x):
    bias = None if linear.bias is None else linear.bias.bfloat16()
    return torch.nn.functional.linear(x.bfloat16(), linear.weight.bfloat16(), bias)


@pytest.mark.parametrize("head", ["Model", "ForBehaviorCloning"])
@pytest.mark.parametrize("case", ["contractive", "gdp_everything", "ids4"])
def test_bf16_autocast_rounds_the_projections_and_nothing_else(case, head, monkeypatch):
    model = build_case(case, head, dtype=torch.float32).train()
    inputs = case_inputs(head, 4, 40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**inputs)[0]
    assert error(found, model(**inputs)[0]) > 1e-3
    found.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    monkeypatch.setattr(torch.nn.Linear, "forward", linear_in_bfloat16)
    # To the last bit: these are the calls that autocast makes.
    assert torch.equal(found, model(**inputs)[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["paper", "gdp_everything", "ids4"])
def test_gradient_checkpointing_changes_no_gradient(case, reentrant):
    model = build_case(case).train()
    ids, mask = tokens(3, 9), torch.tensor([[1] * 9, [0] + [1] * 5 + [0] * 3, [0] * 7 + [1] * 2])
    weight = torch.randn(12, dtype=torch.float64)

    def gradients():
        model.zero_grad()
        (model(ids, attention_mask=mask).last_hidden_state * weight).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients()
    for name in expected:
        assert error(found[name], expected[name]) < 1e-12, name


@pytest.mark.parametrize("case", ["gdp_everything", "ids4"])
def test_torch_compile_without_graph_breaks(case):
    model = build_case(case, num_hidden_layers=1)
    inputs = {"input_ids": tokens(2, 4), "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    weight = torch.randn(12, dtype=torch.float64)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        found = run(**inputs).last_hidden_state
        (found * weight).square().sum().backward()
        results.append([found.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(error(a, b) < 1e-10 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("case", ["gdp_everything", "ids4"])
@torch.no_grad()
def test_torch_export(case):
    model = build_case(case, "ForSequenceClassification", use_cache=False)
    inputs = case_inputs("ForSequenceClassification", 2, 6)
    exported = torch.export.export(model, (), inputs)
    assert error(exported.module()(**inputs)[0], model(**inputs)[0]) < 1e-10


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_case_survives_a_round_trip(case, tmp_path):
    model = build_case(case, "ForBehaviorCloning")
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is CASES[case][0]
    loaded = mamba3_nplr.AutoModelForBehaviorCloning.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    inputs = case_inputs("ForBehaviorCloning", 2, 7)
    assert error(loaded(**inputs).actions, model(**inputs).actions) < 1e-10


@pytest.mark.parametrize("case", ["gdn", "ids4"])
def test_initialisation_does_not_depend_on_the_meta_device(case, tmp_path):
    head = case_class(case, "ForSequenceClassification")
    case_class(case)(case_config(case)).save_pretrained(tmp_path)
    for name, parameter in head.from_pretrained(tmp_path).named_parameters():
        assert parameter.isfinite().all() and (parameter.numel() == 1 or parameter.std() < 10), name


@pytest.mark.parametrize("case", ["gdn", "ids4"])
def test_every_field_is_documented(case):
    inherited = {field.name for field in fields(PreTrainedConfig)}
    for field in fields(CASES[case][0]):
        if field.name not in inherited:
            assert f"\n    {field.name} (" in inspect.getdoc(CASES[case][0]), field.name


@pytest.mark.parametrize("case", ["gdn", "ids4"])
def test_misspelled_names_and_foreign_caches_are_refused(case):
    with pytest.raises(ValueError, match="has no field `hiden_size`.*Did you mean `hidden_size`"):
        case_config(case, hiden_size=3)
    other = "ids4" if case == "gdn" else "gdn"
    with pytest.raises(ValueError, match="holds states of shapes"):
        build_case(case)(tokens(2, 3), past_key_values=build_case(other)(tokens(2, 3)).past_key_values)


@pytest.mark.parametrize("name", [name for name, preset in MODELS.items() if preset.model_type != "mamba3_nplr"])
@pytest.mark.parametrize("head", HEADS)
def test_every_preset_makes_every_model(name, head):
    config = AutoConfig.for_model(MODELS[name].model_type, **MODELS[name].fields, vocab_size=11)
    model = getattr(mamba3_nplr, type(config).__name__.removesuffix("Config") + head)(copy.deepcopy(config))
    result = model(**case_inputs(head, 1, 2, dtype=torch.float32))
    assert result[0].isfinite().all()
