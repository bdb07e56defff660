"""Laws of the Mamba-3 models beside those of every family: padding, packing, precision and graphs change no result."""

import copy

import pytest
import torch
from transformers import DynamicCache

from helpers.model_cases import OPTIONS, build, small_config, tokens
from helpers.scan_cases import error
from mamba3_nplr import (
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
    Mamba3NPLRModel,
)


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_the_mixer_hands_its_state_on(option):
    mixer = build(Mamba3NPLRModel, option).layers[0].mixer
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    whole, final = mixer(x)
    state, outputs = None, []
    for piece in x.split([4, 1, 4], dim=1):
        output, state = mixer(piece, state)
        outputs.append(output)
    assert error(torch.cat(outputs, 1), whole) < 1e-10
    for found, wanted, shape in zip(state, final, mixer.state_shapes(2), strict=True):
        assert tuple(found.shape) == shape
        assert found.numel() == 0 or error(found, wanted) < 1e-10


@torch.no_grad()
def test_single_steps_in_float32():
    model = build(Mamba3NPLRModel, dtype=torch.float32, chunk_size=64)
    ids = tokens(2, 300)
    whole = model(ids).last_hidden_state
    cache, outputs = None, []
    for piece in ids.split(1, dim=1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        outputs.append(result.last_hidden_state)
    exact = copy.deepcopy(model).double()(ids).last_hidden_state
    # Two float32 paths may differ by what each of them differs from the exact result.
    assert error(torch.cat(outputs, 1), exact) < 2 * max(error(whole, exact), 1e-5)


def pad(ids, lengths, left, width):
    """Rows of `ids` cut to `lengths`, after `left` positions of padding that hold some other token."""
    padded = torch.full((len(ids), width), 7)
    mask = torch.zeros(len(ids), width, dtype=torch.long)
    for row, (length, start) in enumerate(zip(lengths, left, strict=True)):
        padded[row, start : start + length] = ids[row, :length]
        mask[row, start : start + length] = 1
    return padded, mask


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_left_and_right_padding_change_nothing_exactly(option):
    model = build(Mamba3NPLRModel, option)
    ids, lengths, left = tokens(4, 10), [10, 7, 3, 1], [0, 3, 5, 9]
    padded, mask = pad(ids, lengths, left, width=12)
    found = model(padded, attention_mask=mask)
    for row, (length, start) in enumerate(zip(lengths, left, strict=True)):
        alone = model(ids[row : row + 1, :length])
        inside = found.last_hidden_state[row : row + 1, start : start + length]
        # The scan is exact to the last bit (see test_scan); a projection of another height may round differently.
        assert error(inside, alone.last_hidden_state) < 1e-12
        for layer in range(2):
            state = found.past_key_values.get_recurrent_state(layer)[row : row + 1]
            assert error(state, alone.past_key_values.get_recurrent_state(layer)) < 1e-12
    assert not found.last_hidden_state[mask == 0].any()


@torch.no_grad()
def test_what_stands_in_the_padding_does_not_matter():
    """To the last bit: the calls and their shapes are the same."""
    model = build(Mamba3NPLRModel)
    padded, mask = pad(tokens(3, 8), [8, 5, 2], [0, 1, 6], width=9)
    other = torch.where(mask == 0, 3, padded)
    first, second = model(padded, attention_mask=mask), model(other, attention_mask=mask)
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)
    for layer in range(2):
        first_state = first.past_key_values.get_recurrent_state(layer)
        assert torch.equal(first_state, second.past_key_values.get_recurrent_state(layer))


@pytest.mark.parametrize("full_mask", [True, False])
@torch.no_grad()
def test_padding_with_a_cache_in_pieces(full_mask):
    """Also piece by piece of size one, and with a mask that covers the past, a padded row waits unchanged."""
    model = build(Mamba3NPLRModel)
    padded, mask = pad(tokens(3, 8), [8, 5, 2], [0, 1, 6], width=9)
    whole = model(padded, attention_mask=mask)
    cache, outputs, start = None, [], 0
    for size in (1, 1, 4, 1, 2):
        seen = mask[:, 0 if full_mask else start : start + size]
        piece = padded[:, start : start + size]
        result = model(piece, attention_mask=seen, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        outputs.append(result.last_hidden_state)
        start += size
    assert error(torch.cat(outputs, 1), whole.last_hidden_state) < 1e-10


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("by", ["cu_seqlens", "position_ids", "cu_seq_lens_q"])
@torch.no_grad()
def test_packed_is_separate(option, by):
    model = build(Mamba3NPLRModel, option)
    lengths = [5, 1, 9]
    sequences = [tokens(1, length) for length in lengths]
    if by == "position_ids":
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    else:
        packing = {by: torch.tensor([0, 5, 6, 15], dtype=torch.int32)}
    packed = model(torch.cat(sequences, 1), **packing)
    alone = [model(ids) for ids in sequences]
    expected = torch.cat([result.last_hidden_state for result in alone], 1)
    assert error(packed.last_hidden_state, expected) < 1e-12
    for layer in range(2):
        state = torch.cat([result.past_key_values.get_recurrent_state(layer) for result in alone])
        assert error(packed.past_key_values.get_recurrent_state(layer), state) < 1e-12


@torch.no_grad()
def test_position_ids_of_padded_rows_are_no_packing():
    model = build(Mamba3NPLRModel)
    ids, mask = pad(tokens(3, 8), [8, 5, 2], [0, 1, 6], width=9)
    expected = model(ids, attention_mask=mask).last_hidden_state
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).last_hidden_state, expected)
    ascending = torch.arange(9)[None]
    assert torch.equal(model(ids, attention_mask=mask, position_ids=ascending).last_hidden_state, expected)


@torch.no_grad()
def test_packed_sequences_continue_from_a_cache():
    model = build(Mamba3NPLRModel)
    first, second = tokens(2, 4), tokens(2, 6)
    cache = model(first, use_cache=True).past_key_values
    expected = model(torch.cat([first, second], 1)).last_hidden_state[:, 4:]
    packed = model(second.reshape(1, 12), cu_seqlens=torch.tensor([0, 6, 12]), past_key_values=cache)
    assert error(packed.last_hidden_state.reshape(2, 6, -1), expected) < 1e-10


@pytest.mark.parametrize("backend", ["chunkwise", "reference"])
def test_gradients_flow_through_the_cache(backend):
    model = build(Mamba3NPLRModel, scan_backend=backend)
    ids = tokens(2, 9)

    def gradients(pieces):
        model.zero_grad()
        cache = DynamicCache(config=model.config)
        outputs = [model(piece, past_key_values=cache).last_hidden_state for piece in ids.split(pieces, 1)]
        torch.cat(outputs, 1).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, pieces = gradients([9]), gradients([3, 1, 5])
    for name in whole:
        assert error(pieces[name], whole[name]) < 1e-10, name


@torch.no_grad()
def test_the_cache_can_be_reset_and_reordered():
    model = build(Mamba3NPLRModel, "learned_state")
    ids = tokens(2, 6)
    cache = DynamicCache(config=model.config)
    first = model(ids, past_key_values=cache).last_hidden_state
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).last_hidden_state, first)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids.flip(0), past_key_values=cache).last_hidden_state
    cache.reset()
    model(ids, past_key_values=cache)
    assert error(swapped.flip(0), model(ids, past_key_values=cache).last_hidden_state) < 1e-12


@torch.no_grad()
def test_use_cache():
    model = build(Mamba3NPLRModel)
    assert model(tokens(1, 3)).past_key_values is not None
    assert model(tokens(1, 3), use_cache=False).past_key_values is None
    assert model.train()(tokens(1, 3)).past_key_values is None


def test_rank_0_is_the_reflection_switched_off():
    with_reflection = build(Mamba3NPLRModel)
    with torch.no_grad():
        for layer in with_reflection.layers:
            layer.mixer.beta_proj.weight.zero_()
            layer.mixer.beta_proj.bias.fill_(-1e4)
    plain = build(Mamba3NPLRModel, "rank0")
    plain.load_state_dict(with_reflection.state_dict(), strict=False)
    ids = tokens(2, 11)
    assert error(plain(ids).last_hidden_state, with_reflection(ids).last_hidden_state) < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
@torch.no_grad()
def test_chunk_size_and_backend_change_nothing(chunk_size):
    model = build(Mamba3NPLRModel)
    ids = tokens(2, 17)
    expected = model(ids).last_hidden_state
    for backend in ("chunkwise", "reference"):
        for layer in model.layers:
            layer.mixer.config.chunk_size, layer.mixer.config.scan_backend = chunk_size, backend
        assert error(model(ids).last_hidden_state, expected) < 1e-10


@pytest.mark.parametrize("option", ["paper", "exact_tracking"])
@torch.no_grad()
def test_half_precision_weights_keep_the_gates_in_float32(option, tmp_path):
    build(Mamba3NPLRForTokenClassification, option, dtype=torch.float32).save_pretrained(tmp_path)
    model = Mamba3NPLRForTokenClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"dt_bias", "C_bias", "D", "B_bias" if option == "paper" else "A_bias"}
    assert model.dtype == model.model.dtype == torch.bfloat16
    result = model(tokens(2, 9))
    assert result.logits.dtype == torch.bfloat16
    assert result.past_key_values.get_recurrent_state(0).dtype == torch.float32


HEADS = [
    Mamba3NPLRModel,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
    Mamba3NPLRForBehaviorCloning,
]


def head_inputs(model_class, batch=2, length=6):
    if model_class is Mamba3NPLRForBehaviorCloning:
        return {"observations": torch.randn(batch, length, 16, dtype=torch.float64)}
    return {"input_ids": tokens(batch, length)}


def check_compiled(model_class, backend):
    model = build(model_class, num_hidden_layers=1)
    inputs = head_inputs(model_class)
    masked = inputs | {"attention_mask": torch.tensor([[0] * 2 + [1] * 4, [1] * 6])}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for given in (inputs, masked):
        model.zero_grad()
        model(**given)[0].square().sum().backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        result = compiled(**given)[0]
        result.square().sum().backward()
        assert error(result, model(**given)[0]) < 1e-10
        for name, parameter in model.named_parameters():
            assert error(parameter.grad, expected[name]) < 1e-10, name
    with torch.no_grad():
        first = {name: x[:, :5] for name, x in inputs.items()}
        last = {name: x[:, 5:] for name, x in inputs.items()}
        cache = model(**first, use_cache=True).past_key_values
        found = compiled(**last, past_key_values=cache)[0]
        whole = model(**inputs)[0]
    assert error(found, whole if whole.dim() == 2 else whole[:, 5:]) < 1e-10


@pytest.mark.parametrize("model_class", HEADS)
def test_torch_compile_without_graph_breaks(model_class):
    check_compiled(model_class, backend="aot_eager")


@pytest.mark.parametrize("by", ["position_ids", "cu_seqlens"])
@torch.no_grad()
def test_packing_is_never_ignored_by_compiled_models(by):
    model = build(Mamba3NPLRModel, num_hidden_layers=1)
    ids = tokens(1, 7)
    packing = {"cu_seqlens": torch.tensor([0, 3, 7]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}[by]
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager")(ids, **{by: packing}).last_hidden_state
    assert error(found, model(ids, **{by: packing}).last_hidden_state) < 1e-10
    assert error(found, model(ids).last_hidden_state) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model_class", HEADS)
def test_torch_compile_with_inductor(model_class):
    check_compiled(model_class, backend="inductor")


@pytest.mark.parametrize("model_class", HEADS)
@torch.no_grad()
def test_torch_export(model_class):
    model = build(model_class, use_cache=False)
    inputs = head_inputs(model_class)
    exported = torch.export.export(model, (), inputs)
    assert error(exported.module()(**inputs)[0], model(**inputs)[0]) < 1e-10


def test_peft_adapts_the_projections():
    from peft import LoraConfig, get_peft_model

    base = build(Mamba3NPLRForSequenceClassification, dtype=torch.float32)
    ids = tokens(2, 6)
    expected = base(ids).logits
    model = get_peft_model(base, LoraConfig(target_modules=["in_proj", "out_proj"], r=2, init_lora_weights=False))
    adapted = model(ids, labels=torch.tensor([0, 1]))
    assert error(adapted.logits, expected) > 1e-3
    adapted.loss.backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


def test_blocks_are_kept_whole_by_device_maps():
    from accelerate import infer_auto_device_map

    model = Mamba3NPLRForSequenceClassification(small_config(num_hidden_layers=4))
    block = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    limits = {"cpu": int(2.5 * block), "disk": 10**9}
    device_map = infer_auto_device_map(model, limits, no_split_module_classes=model._no_split_modules)
    assert len(set(device_map.values())) == 2
    assert not any(".mixer" in name for name in device_map)


def test_initialisation_does_not_depend_on_the_meta_device(tmp_path):
    """Values set in a constructor are lost when a model is first built on meta, as from_pretrained does."""
    model = Mamba3NPLRForSequenceClassification(small_config("exact_tracking"))
    model.model.save_pretrained(tmp_path)
    loaded = Mamba3NPLRForSequenceClassification.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all() and parameter.std() < 10, name
    assert torch.equal(loaded.model.layers[0].mixer.h0, model.model.layers[0].mixer.h0)


def test_no_cache_under_gradient_checkpointing():
    model = build(Mamba3NPLRModel).train()
    assert model(tokens(1, 3), use_cache=True).past_key_values is not None
    model.gradient_checkpointing_enable()
    assert model(tokens(1, 3), use_cache=True).past_key_values is None
    assert model.eval()(tokens(1, 3), use_cache=True).past_key_values is not None


def test_the_configuration_can_switch_the_cache_off():
    model = build(Mamba3NPLRModel, use_cache=False)
    assert model(tokens(1, 3)).past_key_values is None
    assert model(tokens(1, 3), use_cache=True).past_key_values is not None


@pytest.mark.parametrize("option", ["paper", "no_residual", "bare_blocks"])
@torch.no_grad()
def test_every_hidden_state_is_zero_at_padding(option):
    model = build(Mamba3NPLRModel, option)
    mask = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
    result = model(tokens(2, 5), attention_mask=mask, output_hidden_states=True)
    assert len(result.hidden_states) == 3
    assert not any(x[mask == 0].any() for x in result.hidden_states)


def test_the_dtype_is_that_of_the_projections(tmp_path):
    """Without embeddings and norms the first parameter is dt_bias, which stays float32."""
    build(Mamba3NPLRModel, "bare_blocks", input_type="embeddings", dtype=torch.float32).save_pretrained(tmp_path)
    model = Mamba3NPLRModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32
    assert model.dtype == torch.bfloat16


def test_cu_seqlens_win_over_the_bounds_of_a_collator():
    model = build(Mamba3NPLRModel)
    ids, mine, other = tokens(1, 9), torch.tensor([0, 4, 9]), torch.tensor([0, 2, 9])
    found = model(ids, cu_seqlens=mine, cu_seq_lens_q=other).last_hidden_state
    assert torch.equal(found, model(ids, cu_seqlens=mine).last_hidden_state)


def test_a_given_cache_is_refused_under_gradient_checkpointing():
    """transformers would leave it out with a warning, and the state would be lost."""
    model = build(Mamba3NPLRModel).train()
    cache = model(tokens(1, 3), use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="past_key_values cannot be used with gradient checkpointing"):
        model(tokens(1, 3), past_key_values=cache)
