"""Letters: what is computed once for each of them is what would be computed for each token."""

import itertools

import pytest
import torch
from torch import nn

from helpers.mixer_cases import make_mixer, operator_arguments, random_state
from helpers.model_cases import OPTIONS, build
from helpers.scan_cases import error
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.mixers.letters import take_tokens
from mamba3_nplr.modeling.mixers.mamba3_cpu import letters_operator, mixer_operator

LETTERS = 5
KINDS = (torch.float32, torch.float64)
MASK = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.6
MASK[1] = False
SEQUENCES = {
    "rows": {},
    "padded": {"mask": MASK},
    "packed": {"cu_seqlens": torch.tensor([0, 1, 1, 18, 50, 120])},
}


def words(batch=3, length=40, letters=LETTERS):
    return torch.randint(letters, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def mixer_results(mixer, letters, index, state, by_letter, **sequences):
    """What comes out, the state after it, and the gradients of all that is given and of every weight."""
    leaves = [letters, *state, *mixer.parameters()]
    tokens = (letters, index) if by_letter else (take_tokens(letters, index), None)
    y, final = mixer(tokens[0], state, sequences.get("mask"), sequences.get("cu_seqlens"), tokens[1])
    outputs = [y, *final]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x) for x in outputs]
    total = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
    return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


def assert_letters_change_nothing(mixer, index, rows=None, letters=LETTERS, **sequences):
    letters = torch.randn(letters, mixer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    state = random_state(mixer, len(index) if rows is None else rows)
    state = type(state)(*(part.requires_grad_() for part in state))
    found, expected = (
        mixer_results(mixer, letters, index, state, by_letter, **sequences) for by_letter in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert not other.numel() or error(one, other) < 1e-10


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("backend, hidden", [("cpu", 12), ("cpu", 32), ("chunkwise", 12)])  # 32: 16 heads, in lanes
@pytest.mark.parametrize("option", OPTIONS)
def test_letters_change_no_result_and_no_gradient(option, backend, hidden, sequences):
    mixer = make_mixer(option, scan_backend=backend, hidden_size=hidden)
    index = words() if sequences != "packed" else words(1, 120)
    rows = 5 if sequences == "packed" else None
    assert_letters_change_nothing(mixer, index, rows, **SEQUENCES[sequences])


@pytest.mark.parametrize("option", ["paper", "rank0", "exact_tracking"])
@pytest.mark.parametrize("batch, length", [(1, 200), (64, 3), (40, 17), (7, 0)])
@pytest.mark.parametrize("hidden, letters", [(32, 5), (256, 5), (256, 70)])
def test_whatever_the_number_of_tokens_for_each_letter(option, batch, length, hidden, letters):
    """
    Rows are grouped so that the sums of all groups together are no larger than the gradients of tokens; and of letters
    in lanes, a few are kept as they enter the scan, many are not.
    """
    mixer = make_mixer(option, hidden_size=hidden, state_size=16, head_dim=16, expand=1, scan_backend="cpu")
    assert_letters_change_nothing(mixer, words(batch, length, letters), letters=letters)


def letters_given(option, heads, length):
    """What both operators take, projections of letters first, and the options."""
    sizes = {"hidden_size": 16 * heads, "state_size": 16, "head_dim": 16, "expand": 1}
    *given, contractive, overwrites, heavy_tail, a_min, epsilon = operator_arguments(
        make_mixer(option, torch.float32, **sizes), rows=3, length=length
    )
    given[:3] = (None if x is None else x[0, :LETTERS].clone() for x in given[:3])
    options = (contractive, overwrites, heavy_tail, a_min, epsilon)
    return [None if x is None else x.requires_grad_() for x in given], options


def operator_results(outputs, leaves):
    return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)]


@pytest.mark.parametrize("option", ["paper", "rank0", "exact_tracking"])
@pytest.mark.parametrize("heads", [5, 16])
def test_float32_is_the_same_but_for_the_order_of_sums(option, heads):
    """Results are, to the last bit; gradients are as near to those of float64 as token by token, or to 1e-5."""
    (given, options), index = letters_given(option, heads, 64), words(3, 64)

    def token_by_token(given):
        tokens = [take_tokens(x, index) for x in given[:3]]
        return operator_results(mixer_operator(*tokens, *given[3:], *options)[:5], [x for x in given if x is not None])

    found = operator_results(letters_operator(*given, index, *options)[:5], [x for x in given if x is not None])
    tokens, exact = (token_by_token([None if x is None else x.to(kind) for x in given]) for kind in KINDS)
    assert all(torch.equal(one, other) for one, other in zip(found[:5], tokens[:5], strict=True))
    for one, other, expected in zip(found[5:], tokens[5:], exact[5:], strict=True):
        assert (one - expected).norm() <= max(1e-5 * expected.norm(), 2 * (other - expected).norm())


@pytest.mark.parametrize("heads", [5, 32])
def test_sums_by_letter_do_not_depend_on_the_number_of_threads(heads):
    (given, options), index = letters_given("paper", heads, 200), words(3, 200)  # work enough for several threads
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        outputs = letters_operator(*given, index, *options)[:5]
        results.append(operator_results(outputs, [x for x in given if x is not None]))
    torch.set_num_threads(before)
    for other, (number, first) in itertools.product(results[1:], enumerate(results[0])):
        assert torch.equal(other[number], first)


# In models


@pytest.fixture
def rows_of(monkeypatch):
    """How many rows the input projection of the first block is given."""

    def count(model, *tokens, **inputs):
        seen, linear = [], nn.functional.linear
        weight = model.layers[0].mixer.in_proj.weight

        def watch(x, w, *rest):
            if w is weight:
                seen.append(x[..., 0].numel())
            return linear(x, w, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "linear", watch)
            model(*tokens, **inputs)
        return seen[0]

    return count


def make_model(option="paper", dtype=torch.float64, **changes):
    return build(Mamba3NPLRModel, option, dtype, vocab_size=LETTERS, **changes)


def frames(index):
    """Observations that are the same wherever the index is."""
    return torch.randn(LETTERS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[index]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["tokens", "observations"])
def test_a_model_takes_letters_by_itself(option, padded, kind, rows_of, monkeypatch):
    model = make_model(option, input_type=kind)
    inputs = {"input_ids": words()} if kind == "tokens" else {"observations": frames(words())}
    letters = LETTERS
    if padded:
        inputs["attention_mask"] = MASK
    if padded and kind == "observations":
        inputs["observations"][~MASK] = torch.nan  # what stands at padding is nobody's concern
        letters += 1  # the 0 that is put there

    def results():
        y = model(**inputs).last_hidden_state
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        return [y, *torch.autograd.grad((weight * y).sum(), list(model.parameters()))]

    found = results()
    assert rows_of(model, **inputs) == letters
    monkeypatch.setattr(Mamba3NPLRModel, "find_letters", lambda *_: None)
    assert rows_of(model, **inputs) == words().numel()
    for one, other in zip(found, results(), strict=True):
        assert error(one, other) < 1e-10


def test_observations_that_seldom_repeat_are_taken_one_by_one(rows_of):
    model, seen = make_model(input_type="observations"), frames(words())
    for repeated, rows in ((60, 60), (61, 120)):
        observations = torch.randn(120, 16, dtype=torch.float64)[torch.arange(120) % repeated].view(3, 40, 16)
        assert rows_of(model, observations=observations) == rows
    assert rows_of(model, observations=seen.clone().requires_grad_()) == words().numel()  # each has its own gradient


@pytest.mark.parametrize("part", ["embed_observations", "layers.0", "layers.0.mixer_norm"])
def test_whoever_looks_at_observations_sees_each_of_them(part, rows_of):
    model, observations = make_model(input_type="observations"), frames(words())
    assert rows_of(model, observations=observations) == LETTERS
    hooked(part)(model)
    assert rows_of(model, observations=observations) == words().numel()


def test_pieces_with_a_cache_take_letters_too(rows_of):
    model, ids = make_model(), words(12, 40)
    whole = model(ids).last_hidden_state
    first = model(ids[:, :25], use_cache=True)
    rest = [model(ids[:, t : t + 1], past_key_values=first.past_key_values) for t in range(25, 40)]
    found = torch.cat([first.last_hidden_state, *(x.last_hidden_state for x in rest)], dim=1)
    assert error(found, whole) < 1e-10
    assert rows_of(model, ids[:, :1]) == LETTERS  # a step of many rows


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    """It hooks the embedding, or runs the first block a second time, with its letters."""
    model, ids = make_model().train(), words()
    model(ids).last_hidden_state.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.disable_input_require_grads()
    model(ids).last_hidden_state.square().sum().backward()
    for found, other in zip(model.parameters(), expected, strict=True):
        assert error(found.grad, other) < 1e-10


def hooked(part):
    def change(model):
        model.get_submodule(part).register_forward_hook(lambda module, args, output: None)

    return change


def hooked_backward(part):
    def change(model):
        model.get_submodule(part).register_full_backward_hook(lambda module, grad_input, grad_output: None)

    return change


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def replaced(make):
    def change(model):
        embedding = make(LETTERS, model.config.hidden_size, dtype=torch.float64)
        model.set_input_embeddings(embedding)

    return change


WATCHED = {
    **{part: hooked(part) for part in ("embed_tokens", "layers.0", "layers.0.mixer_norm", "layers.0.mixer")},
    **{f"{part}, backward": hooked_backward(part) for part in ("embed_tokens", "layers.0", "layers.0.mixer")},
    **{part: hooked(f"layers.0.mixer.{part}") for part in ("in_proj", "k_proj", "beta_proj")},
    "subclass": replaced(Doubled),
    "padding_idx": replaced(lambda *sizes, **kind: nn.Embedding(*sizes, padding_idx=0, **kind)),
    "max_norm": replaced(lambda *sizes, **kind: nn.Embedding(*sizes, max_norm=0.1, **kind)),
    "by frequency": replaced(lambda *sizes, **kind: nn.Embedding(*sizes, scale_grad_by_freq=True, **kind)),
    "sparse": replaced(lambda *sizes, **kind: nn.Embedding(*sizes, sparse=True, **kind)),
}


@pytest.mark.parametrize("name", WATCHED)
def test_whoever_looks_at_tokens_sees_each_of_them(name, rows_of):
    model, ids = make_model(), words()
    WATCHED[name](model)
    assert rows_of(model, ids) == ids.numel()


def test_global_hooks_see_each_token(rows_of):
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert rows_of(make_model(), words()) == words().numel()
    finally:
        handle.remove()


def test_few_tokens_are_taken_one_by_one(rows_of):
    model = make_model()
    assert rows_of(model, words(1, 9)) == 9
    assert rows_of(model, words(1, 10)) == LETTERS


def test_a_transformed_or_exported_model_takes_each_token():
    model, ids = make_model(use_cache=False), words()
    expected = model(ids).last_hidden_state
    by_row = torch.vmap(lambda row: model(row[None]).last_hidden_state[0])(ids)
    assert error(by_row, expected) < 1e-10
    batches = ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(model, (ids,), dynamic_shapes=batches).module()
    assert error(exported(words(7, 40)).last_hidden_state, model(words(7, 40)).last_hidden_state) < 1e-10


def test_an_index_needs_letters():
    mixer = make_mixer()
    with pytest.raises(ValueError, match=r"hidden_states have shape .*\(letters, hidden_size=12\)"):
        mixer(torch.randn(2, 5, 12, dtype=torch.float64), index=words(2, 5))
