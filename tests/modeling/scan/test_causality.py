"""The past does not depend on the future: on all backends what is read at a token follows from the tokens up to it."""

import pytest
import torch

from helpers.family_cases import build_case
from helpers.scan_cases import FORMS, run, scan_inputs, scan_state
from mamba3_nplr.modeling.scan.definition import ScanInputs
from mamba3_nplr.modeling.scan.dispatch import BACKENDS

DTYPES = (torch.float32, torch.float64)
LENGTH = 37  # chunks of 8 here, of 16 in compiled code, and a rest
SEEN = (1, 13, 16, 30)  # tokens before the change: the first, inside a chunk, all of one, of a later one
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))
TO_THE_TOKEN = [name for name in BACKENDS if name != "triton"]  # whose kernels see chunks: see below
TRITON_CHUNK = 16


def scaled_after(inputs: ScanInputs, seen: int, scale: float) -> ScanInputs:
    """
    All coefficients after so many tokens times `scale`, by which the decay goes to 0; with a scale of infinity, the
    largest numbers that are finite.
    """
    later = (None if x is None else torch.nan_to_num(scale * x[:, seen:]) for x in inputs[:-1])
    pairs = zip(inputs[:-1], later, strict=True)
    return ScanInputs(*(None if x is None else torch.cat([x[:, :seen], y], dim=1) for x, y in pairs), D=inputs.D)


@pytest.fixture
def undisturbed(backend, form, dtype):
    """Coefficients, a state before them, and what a backend makes of both."""
    inputs = scan_inputs(length=LENGTH, form=form, dtype=dtype)
    state = scan_state(inputs)
    return inputs, state, *run(inputs, state, backend, chunk_size=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_later_tokens_of_any_size_change_no_bit(backend, undisturbed):
    inputs, state, y, _ = undisturbed
    for seen in SEEN:
        for scale in (1e6, 1e30, float("inf")):  # products of the second overflow, those of the last with the past's
            found, _ = run(scaled_after(inputs, seen, scale), state, backend, chunk_size=8)
            assert torch.equal(found[:, :seen], y[:, :seen]), (seen, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_what_is_not_finite_goes_forward_in_its_head(backend, undisturbed):
    """And is seen wherever the definition has it."""
    inputs, state, y, final = undisturbed
    names = [name for name, x in inputs._asdict().items() if x is not None and name != "D"]
    for number, name in enumerate(names):
        seen, value = SEEN[number % len(SEEN)], NOT_FINITE[number % 3 if name != "log_decay" else 0]
        changed = getattr(inputs, name).clone()
        changed[1, seen, 2] = value
        changed = inputs._replace(**{name: changed})
        found, last = run(changed, state, backend, chunk_size=8)
        expected, expected_last = run(changed, state, "reference")
        touched = torch.zeros(*y.shape[:3], 1, dtype=torch.bool)
        touched[1, seen:, 2] = True
        assert torch.equal(found.where(~touched, 0.0), y.where(~touched, 0.0)), name
        assert not found[~expected.isfinite()].isfinite().any(), name
        assert expected[1, seen, 2].isfinite().logical_not().all(), name
        others = [(row, head) for row in range(2) for head in range(3) if (row, head) != (1, 2)]
        assert all(torch.equal(last.h[at], final.h[at]) for at in others), name
        assert not last.h[~expected_last.h.isfinite()].isfinite().any(), name


@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_what_only_one_token_reads_is_felt_there_alone(backend):
    inputs = scan_inputs(length=LENGTH)
    y, final = run(inputs, backend=backend, chunk_size=8)
    changed = inputs.C.clone()
    changed[1, 13, 2] = float("nan")
    found, last = run(inputs._replace(C=changed), backend=backend, chunk_size=8)
    there = torch.zeros(y.shape[:3], dtype=torch.bool)
    there[1, 13, 2] = True
    assert found[there].isnan().all() and torch.equal(found[~there], y[~there])
    assert torch.equal(last.h, final.h)


@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_without_a_carry_nobody_reads_the_token_before(backend):
    inputs = scan_inputs(form="delta")
    state = scan_state(inputs)
    y, _ = run(inputs, state, backend)
    nothing = {name: torch.full_like(getattr(state, name), float("nan")) for name in ("B", "u")}
    found, _ = run(inputs, state._replace(**nothing), backend)
    assert torch.equal(found, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_decay_may_be_zero(backend, dtype):
    """log_decay = -inf: the state is forgotten, and nothing is lost."""
    inputs = scan_inputs(length=LENGTH, form="contractive", dtype=dtype)
    forgets = torch.zeros_like(inputs.reflection, dtype=torch.bool)
    forgets[:, 13] = True
    inputs = inputs._replace(
        log_decay=inputs.log_decay.masked_fill(forgets, -torch.inf),
        reflection=inputs.reflection.masked_fill(forgets, 0),
    )
    found, _ = run(inputs, backend=backend, chunk_size=8)
    rest = ScanInputs(*(x[:, 13:] for x in inputs[:-1]), D=inputs.D)
    expected, _ = run(rest._replace(carry=rest.carry.masked_fill(forgets[:, 13:], 0)), backend="reference")
    torch.testing.assert_close(found[:, 13:], expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("backend", TO_THE_TOKEN)
def test_packed_sequences_and_gradients_of_the_past_are_untouched(backend):
    inputs = scan_inputs(batch=1, length=LENGTH)
    state = scan_state(inputs, rows=3)
    bounds = torch.tensor([0, 9, 25, LENGTH])
    y, final = run(inputs, state, backend, chunk_size=8, cu_seqlens=bounds)
    u = inputs.u.clone()
    u[0, 20] = float("nan")
    found, last = run(inputs._replace(u=u), state, backend, chunk_size=8, cu_seqlens=bounds)
    assert torch.equal(found[:, :20], y[:, :20]) and torch.equal(found[:, 25:], y[:, 25:])
    assert found[:, 20:25].isnan().all() and last.h[1].isnan().all()
    assert torch.equal(last.h[::2], final.h[::2])


def test_the_chunkwise_scan_has_gradients_of_what_came_before():
    inputs = scan_inputs(length=LENGTH)
    u, B = inputs.u.clone().requires_grad_(), inputs.B.clone()
    B[:, 20] = float("nan")
    y, _ = run(inputs._replace(u=u), chunk_size=8)
    (expected,) = torch.autograd.grad(y[:, :20].square().sum(), u)
    y, _ = run(inputs._replace(u=u, B=B), chunk_size=8)
    (found,) = torch.autograd.grad(y[:, :20].square().sum(), u)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [1e6, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("case", ["paper", "rank0", "exact_tracking", "deltanet", "deltaproduct", "gdn", "gdp"])
@pytest.mark.parametrize("backend", TO_THE_TOKEN)
@torch.no_grad()
def test_a_mixer_does_not_look_ahead(backend, case, change):
    for dtype in DTYPES:
        mixer = build_case(case, dtype=dtype, num_hidden_layers=1).layers[0].mixer
        mixer.config.scan_backend = backend
        x = torch.randn(2, LENGTH, mixer.config.hidden_size, dtype=dtype)
        y, state = mixer(x)
        for seen in (13, 16):
            changed = x.clone()
            changed[1, seen:] *= change
            found, last = mixer(changed)
            assert torch.equal(found[1, :seen], y[1, :seen]), (dtype, seen)
            assert torch.equal(found[0], y[0])
            assert all(torch.equal(a[0], b[0]) for a, b in zip(last, state, strict=True))
            if change not in (1e6, 1e30):
                assert not found[1, seen:].isfinite().any() and not last.h[1].isfinite().any()


@pytest.mark.parametrize("n", [4, 40])
def test_triton_sees_no_later_token_whose_products_are_finite(n):
    inputs = scan_inputs(batch=1, length=20, heads=1, n=n, dtype=torch.float32)
    y, _ = run(inputs, backend="triton")
    for seen in (1, 13, 16):
        later = scaled_after(inputs, seen, 1e6)._replace(k=inputs.k, reflection=inputs.reflection)
        found, _ = run(later, backend="triton")
        assert torch.equal(found[:, :seen], y[:, :seen]), seen


def test_what_is_not_finite_reaches_back_to_the_start_of_its_chunk_in_triton():
    """And no further, nor to other heads: see `scan_triton`."""
    inputs = scan_inputs(batch=1, length=33, heads=2, dtype=torch.float32)
    y, final = run(inputs, backend="triton")
    for name in ("u", "k"):
        changed = getattr(inputs, name).clone()
        changed[:, 20, 1] = float("nan")
        found, last = run(inputs._replace(**{name: changed}), backend="triton")
        assert torch.equal(found[:, :TRITON_CHUNK], y[:, :TRITON_CHUNK]), name
        assert torch.equal(found[:, :, 0], y[:, :, 0]) and torch.equal(last.h[:, 0], final.h[:, 0]), name
        assert found[:, 20:, 1].isnan().all() and last.h[:, 1].isnan().all(), name
