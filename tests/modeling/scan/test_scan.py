"""Laws of the scan: every backend computes the definition, in whole, in pieces, padded and packed."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from helpers.scan_cases import FORMS, error, hard_inputs, run, run_with_gradients, scan_inputs, scan_state, with_grad
from mamba3_nplr.modeling.scan.definition import ScanInputs, ScanState
from mamba3_nplr.modeling.scan.dispatch import BACKENDS, Backend, select_backend


def step_formula(inputs, h, B_previous, u_previous, b, t, head):
    """One step for one head as an explicit matrix product, written apart from the package."""
    n = inputs.B.shape[-1]
    d = inputs.log_decay[b, t, head].exp()
    transition = d * torch.eye(n, dtype=h.dtype)
    if inputs.k is not None:
        k = inputs.k[b, t, head]
        transition = transition - inputs.reflection[b, t, head] * torch.outer(k, k)
    h = transition @ h + inputs.write[b, t, head] * torch.outer(inputs.B[b, t, head], inputs.u[b, t, head])
    if inputs.carry is not None:
        h = h + inputs.carry[b, t, head] * d * torch.outer(B_previous, u_previous)
    return h, inputs.C[b, t, head] @ h + inputs.D[head] * inputs.u[b, t, head]


@pytest.mark.parametrize("form", FORMS)
def test_definition_is_the_recurrence(form):
    inputs = scan_inputs(form=form)
    state = scan_state(inputs)
    y, final = run(inputs, state, "reference")
    batch, length, heads = inputs.log_decay.shape
    for b in range(batch):
        for head in range(heads):
            h, B, u = (x[b, head] for x in state)
            for t in range(length):
                h, expected = step_formula(inputs, h, B, u, b, t, head)
                B, u = inputs.B[b, t, head], inputs.u[b, t, head]
                torch.testing.assert_close(y[b, t, head], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(final.h[b, head], h, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("length", "chunk_size"), [(1, 8), (7, 8), (8, 8), (9, 8), (37, 8), (37, 1), (37, 64), (29, 5)]
)
def test_chunkwise_is_the_definition(form, length, chunk_size):
    inputs = scan_inputs(length=length, form=form)
    state = scan_state(inputs)
    expected = run_with_gradients(inputs, state, "reference")
    found = run_with_gradients(inputs, state, "chunkwise", chunk_size=chunk_size)
    assert found.keys() == expected.keys()
    for name in expected:
        assert error(found[name], expected[name]) < 1e-10, name


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_float32_holds_for_repeated_directions_and_full_reflections(length):
    inputs = hard_inputs(length)
    state = scan_state(inputs)
    exact = run_with_gradients(
        ScanInputs(*(x.double() for x in inputs)), ScanState(*(x.double() for x in state)), "reference"
    )
    found = run_with_gradients(inputs, state, "chunkwise", chunk_size=64)
    for name in exact:
        assert error(found[name], exact[name]) < 1e-5, name


def test_strong_decay_loses_no_digits():
    inputs = scan_inputs(length=100, dtype=torch.float32, form="contractive")
    inputs = inputs._replace(log_decay=-20 * torch.rand_like(inputs.log_decay))
    exact, _ = run(ScanInputs(*(x.double() for x in inputs)), backend="reference")
    found, _ = run(inputs)
    assert error(found, exact) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(form, backend):
    inputs = with_grad(scan_inputs(batch=1, length=5, heads=1, n=3, channels=2, form=form))
    state = with_grad(scan_state(inputs))
    tensors = [x for x in (*inputs, *state) if x is not None]
    present = [x is not None for x in (*inputs, *state)]

    def function(*tensors):
        values = iter(tensors)
        every = [next(values) if there else None for there in present]
        y, final = run(ScanInputs(*every[:-3]), ScanState(*every[-3:]), backend, chunk_size=3)
        return (y, *final)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [[10, 1, 12], [1] * 23, [0, 23], [22, 1]])
def test_pieces_continue_each_other(form, pieces):
    inputs = scan_inputs(length=23, form=form)
    first = scan_state(inputs)
    expected, expected_final = run(inputs, first, chunk_size=8)
    outputs, state, start = [], first, 0
    for length in pieces:
        piece = ScanInputs(*(None if x is None else x[:, start : start + length] for x in inputs[:-1]), D=inputs.D)
        y, state = run(piece, state, chunk_size=8)
        outputs.append(y)
        start += length
    assert error(torch.cat(outputs, 1), expected) < 1e-12
    for found, wanted in zip(state, expected_final, strict=True):
        assert error(found, wanted) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_anywhere_changes_nothing_exactly(backend):
    """To the last bit: every backend sees the tokens alone, in the same calls (see SequenceRows)."""
    alone = scan_inputs(batch=1, length=13)
    state = scan_state(alone)
    y, final = run(alone, state, backend, chunk_size=4)
    positions = torch.tensor([2, 3, 4, 7, 8, 9, 10, 11, 15, 16, 17, 18, 19])
    mask = torch.zeros(1, 21, dtype=torch.bool)
    mask[:, positions] = True
    padded = []
    for x in alone[:-1]:
        wide = torch.full((1, 21, *x.shape[2:]), float("nan"), dtype=x.dtype)
        wide[:, positions] = x
        padded.append(wide)
    y_padded, final_padded = run(ScanInputs(*padded, D=alone.D), state, backend, chunk_size=4, mask=mask)
    assert torch.equal(y_padded[:, positions], y)
    assert not y_padded[~mask].any()
    assert all(torch.equal(a, b) for a, b in zip(final_padded, final, strict=True))


def test_all_padding_keeps_the_state():
    inputs = scan_inputs(batch=2, length=5)
    state = scan_state(inputs)
    y, final = run(inputs, state, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert not y.any()
    assert all(torch.equal(a, b) for a, b in zip(final, state, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_separate(backend):
    packed = scan_inputs(batch=1, length=20)
    bounds = [0, 6, 6, 7, 20]
    state = scan_state(packed, rows=4)
    cu_seqlens = torch.tensor(bounds)
    found = run_with_gradients(packed, state, backend, chunk_size=4, cu_seqlens=cu_seqlens)
    for row, (start, end) in enumerate(pairwise(bounds)):
        one = ScanInputs(*(x[:, start:end] for x in packed[:-1]), D=packed.D)
        y, final = run(one, ScanState(*(x[row : row + 1] for x in state)), backend, chunk_size=4)
        torch.testing.assert_close(found["y"][:, start:end], y, rtol=0, atol=1e-13)
        for name, x in final._asdict().items():
            torch.testing.assert_close(found[f"final_{name}"][row : row + 1], x, rtol=0, atol=1e-13)


def test_packed_gradients_stay_inside_their_sequence():
    packed = with_grad(scan_inputs(batch=1, length=10))
    y, _ = run(packed, cu_seqlens=torch.tensor([0, 4, 10]))
    (gradient,) = torch.autograd.grad(y[:, 4:].sum(), packed.u)
    assert not gradient[:, :4].any()
    assert gradient[:, 4:].all()


def test_half_precision_inputs_have_a_float32_state():
    exact = scan_inputs(length=70, heads=2, n=16, channels=16)
    half = ScanInputs(*(x.to(torch.bfloat16) for x in exact))
    y, final = run(half)
    expected, _ = run(ScanInputs(*(x.double() for x in half)), backend="reference")
    assert y.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in final)
    # bfloat16 has 8 bits: rounding the result costs 2^-9 of its largest values, and nothing else may be lost.
    assert error(y, expected.to(torch.bfloat16)) < 2**-8 * 4


def test_autocast_does_not_touch_the_scan():
    inputs = scan_inputs(length=20, dtype=torch.float32)
    expected, _ = run(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = run(inputs)
    assert torch.equal(found, expected)


def delta_rule(q, k, v, alpha, beta):
    """Gated DeltaNet as its paper defines it, for one head: S is (channels, state)."""
    S = torch.zeros(v.shape[-1], k.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(len(q)):
        S = alpha[t] * S @ (torch.eye(k.shape[-1], dtype=v.dtype) - beta[t] * torch.outer(k[t], k[t]))
        S = S + beta[t] * torch.outer(v[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs)


def test_the_scan_is_gated_deltanet():
    inputs = scan_inputs(batch=1, length=30, heads=1, form="delta")._replace(D=None)
    found, _ = run(inputs, chunk_size=8)
    one = [x[0, :, 0] for x in (inputs.C, inputs.k, inputs.u, inputs.log_decay.exp(), inputs.write)]
    assert error(found[0, :, 0], delta_rule(*one)) < 1e-12


def test_deltaproduct_is_micro_steps_of_the_scan():
    inputs = scan_inputs(batch=1, length=24, heads=1, form="delta")._replace(D=None)
    inputs = inputs._replace(log_decay=torch.zeros_like(inputs.log_decay), reflection=inputs.write)
    found, _ = run(inputs, chunk_size=8)
    n, micro = inputs.k.shape[-1], 2
    S = torch.zeros(inputs.u.shape[-1], n, dtype=torch.float64)
    for token in range(12):
        product = torch.eye(n, dtype=torch.float64)
        for j in range(token * micro, (token + 1) * micro):
            k, v, beta = inputs.k[0, j, 0], inputs.u[0, j, 0], inputs.write[0, j, 0]
            reflect = torch.eye(n, dtype=torch.float64) - beta * torch.outer(k, k)
            S, product = S @ reflect + beta * torch.outer(v, k), product @ reflect
        assert error(found[0, (token + 1) * micro - 1, 0], S @ inputs.C[0, (token + 1) * micro - 1, 0]) < 1e-12


def test_length_zero_returns_the_state():
    inputs = scan_inputs(length=0)
    state = scan_state(inputs)
    for backend in BACKENDS:
        y, final = run(inputs, state, backend)
        assert y.shape == inputs.u.shape
        assert all(torch.equal(a, b) for a, b in zip(final, state, strict=True))


def test_memory_of_the_backward_holds_no_step_states():
    """What autograd keeps must not grow like length x state x channels."""
    inputs = with_grad(scan_inputs(batch=1, length=256, heads=1, n=64, channels=64, dtype=torch.float32))
    saved = []

    def keep(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(inputs, chunk_size=64)
    assert max(saved) < 256 * 64 * 64 // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 11, 3)}, "u has shape"),
        ({"C": torch.zeros(2, 10, 3, 6)}, "C has shape"),
        ({"log_decay": torch.zeros(2, 11)}, "log_decay has shape"),
        ({"k": None}, "k and reflection belong together"),
        ({"D": torch.zeros(2)}, "D has shape"),
        ({"B": torch.zeros(())}, r"B has shape \(\); it must be \(batch=2, length=11, heads=3, state=any\)"),
        ({"write": torch.zeros(2, 11, 3, dtype=torch.complex64)}, "write has dtype torch.complex64"),
        ({"C": torch.zeros(2, 11, 3, 6, device="meta")}, "C has dtype torch.float32 .* on meta"),
        ({"k": torch.zeros(2, 11, 3, 6).to_sparse()}, "k has dtype torch.float32 and layout torch.sparse_coo"),
    ],
)
def test_wrong_coefficients_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        run(scan_inputs()._replace(**change))


def test_wrong_arguments_are_named():
    inputs, packed = scan_inputs(), scan_inputs(batch=1)
    state = scan_state(inputs)
    mask = torch.ones(2, 11, dtype=torch.bool)
    for kwargs, message in [
        ({"state": state._replace(B=state.B[:1])}, r"initial_state\.B has shape \(1, 3, 6\)"),
        ({"mask": mask[:, 1:]}, "mask has shape"),
        ({"mask": mask, "cu_seqlens": torch.tensor([0, 11])}, "both given"),
        ({"cu_seqlens": torch.tensor([0, 11])}, "needs a batch of 1"),
        ({"backend": "cuda"}, "'cuda' is unknown.*reference, chunkwise"),
        ({"chunk_size": 0}, "chunk_size=0 is not allowed; it must be a whole number of 1 or more"),
        ({"chunk_size": -4}, "chunk_size=-4 is not allowed"),
        ({"chunk_size": 2.5}, "chunk_size=2.5 is not allowed"),
        ({"state": state[:2]}, "initial_state has 2 parts"),
        ({"state": state._replace(u=state.u.long())}, r"initial_state\.u has dtype torch.int64"),
        ({"mask": mask.long() + 1}, "mask holds 2; it must be of booleans"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(inputs, **kwargs)
    for bounds in ([1, 11], [0, 12], [0, 7, 5, 11], [0.0, 11.0], [[0, 11]], [0]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            run(packed, cu_seqlens=torch.tensor(bounds))


def test_backends_are_chosen_in_one_place():
    device = torch.device("cpu")
    assert select_backend("auto", device) == "cpu"
    assert select_backend("auto", torch.device("meta")) == "chunkwise"
    assert select_backend("reference", device) == "reference"


def test_a_new_backend_is_one_entry_with_its_rank(monkeypatch):
    inputs, device = scan_inputs(), torch.device("cpu")
    expected, _ = run(inputs, backend="reference")
    for rank, chosen in ((0, "cpu"), (9, "twice")):
        twice = Backend(lambda *given: (2 * BACKENDS["reference"].run(*given)[0], given[1].h), rank)
        monkeypatch.setitem(BACKENDS, "twice", twice)
        assert select_backend("auto", device) == chosen
    assert torch.equal(run(inputs, backend="auto")[0], 2 * expected)
    monkeypatch.setitem(BACKENDS, "twice", twice._replace(unavailable=lambda device: "not today"))
    assert select_backend("auto", device) == "cpu"


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    usable = ", ".join(name for name in BACKENDS if name != "triton")
    broken = Backend(BACKENDS["reference"].run, unavailable=lambda device: f"no {device} kernel")
    monkeypatch.setitem(BACKENDS, "broken", broken)
    with pytest.raises(ValueError, match=f"'broken' cannot run: no cpu kernel. These can: {usable}.$"):
        select_backend("broken", torch.device("cpu"))
    with pytest.raises(ValueError, match=f"must be auto, or one of {', '.join(BACKENDS)}"):
        select_backend("brokn", torch.device("cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_float64_coefficient_makes_the_scan_float64(backend):
    inputs = scan_inputs()
    state = ScanState(*(x.float() for x in scan_state(inputs)))
    mixed = inputs._replace(u=inputs.u.float())
    y, final = run(mixed, state, backend)
    exact, _ = run(mixed._replace(u=mixed.u.double()), ScanState(*(x.double() for x in state)), backend)
    assert y.dtype == torch.float32 and torch.equal(y, exact.float())
    assert all(x.dtype == torch.float64 for x in final)


def test_many_chunks_lose_no_digits():
    inputs = hard_inputs(2000)
    exact, _ = run(ScanInputs(*(x.double() for x in inputs)), backend="reference")
    found, _ = run(inputs, chunk_size=2)
    assert error(found, exact) < 1e-5


def test_padding_up_to_a_power_of_two_changes_no_bit():
    """As above; matrices of other sizes would be rounded otherwise."""
    alone = scan_inputs(batch=1, length=9, n=16, channels=16)
    y, final = run(alone)
    for width in range(10, 17):
        wide = ScanInputs(*(F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - 9)) for x in alone[:-1]), D=alone.D)
        padded, final_padded = run(wide, mask=torch.arange(width)[None] < 9)
        assert torch.equal(padded[:, :9], y) and torch.equal(final_padded.h, final.h)


def test_the_last_packed_sequence_may_be_the_shortest():
    packed = scan_inputs(batch=1, length=20)
    found, _ = run(packed, cu_seqlens=torch.tensor([0, 13, 20]))
    alone, _ = run(ScanInputs(*(x[:, 13:] for x in packed[:-1]), D=packed.D))
    assert error(found[:, 13:], alone) < 1e-12
