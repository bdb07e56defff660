"""A policy in a control loop with several environments: episodes that end apart, states taken out and put back."""

import copy
import warnings

import numpy as np
import pytest
import torch

from helpers.family_cases import build_case
from helpers.model_cases import OPTIONS, build
from helpers.scan_cases import error
from mamba3_nplr import Mamba3NPLRForBehaviorCloning

CASES = [f"mamba3/{option}" for option in ("paper", "learned_state", "exact_tracking", "no_rope")] + ["gdn", "ids4"]


def make_policy(case="mamba3/paper", **changes):
    family, _, option = case.partition("/")
    if family == "mamba3":
        return build(Mamba3NPLRForBehaviorCloning, option, **changes)
    return build_case(case, "ForBehaviorCloning", **changes)


def make_frames(environments, time=6):
    return torch.randn(time, environments, 16, dtype=torch.float64)


def act(policy, frames):
    return torch.stack([policy.select_action(frame) for frame in frames])


@pytest.mark.parametrize("environments", [3, 9])  # compiled steps, where there are any, are for at most 8 rows
@pytest.mark.parametrize("case", CASES)
def test_a_reset_starts_an_episode_in_some_environments_and_changes_no_other(case, environments):
    policy, frames = make_policy(case), make_frames(environments)
    unbroken = act(policy, frames)
    policy.reset()
    act(policy, frames[:3])
    before, others = policy.get_state(), [i for i in range(environments) if i not in (0, 2)]
    policy.reset([2, 0])
    assert all(torch.equal(part[others], before[name][others]) for name, part in policy.get_state().items())
    found = act(policy, frames[3:])
    assert error(found[:, others], unbroken[3:, others]) < 1e-12  # rounding may depend on what else is in a batch
    for environment in (0, 2):
        policy.reset()
        alone = act(policy, frames[3:, environment])
        assert error(found[:, environment], alone) < 1e-10
        assert error(alone, unbroken[3:, environment]) > 1e-3


@pytest.mark.parametrize(
    "chosen",
    [
        [1, 1],
        (1,),
        torch.tensor([1], dtype=torch.int32),
        np.array([1]),
        [False, True, False],
        np.array([False, True, False]),
        torch.tensor([False, True, False]),
    ],
    ids=str,
)
def test_environments_are_numbers_or_a_mask(chosen):
    policy, frames = make_policy(), make_frames(3, 2)
    policy.select_action(frames[0])
    before = policy.get_state()
    policy.reset(chosen)
    for name, part in policy.get_state().items():
        assert torch.equal(part[[0, 2]], before[name][[0, 2]])
        assert not part[1].any()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([3], "environments hold 3; this episode has 3, so they must be 0 to 2"),
        ([0, -1], "environments hold -1"),
        ([0.0], r"shape \(1,\) and dtype torch.float32; it must be a list of whole numbers or a boolean mask of shape"),
        ([True, False], r"shape \(2,\) and dtype torch.bool; .* boolean mask of shape \(3,\)"),
        (np.zeros(0, dtype=bool), r"shape \(0,\) and dtype torch.bool"),
        ([[0]], r"environments has shape \(1, 1\)"),
        (0, r"environments has shape \(\)"),
        (True, r"environments has shape \(\) and dtype torch.bool"),
    ],
    ids=str,
)
def test_wrong_environments_are_named_and_change_nothing(chosen, message):
    policy = make_policy()
    policy.select_action(make_frames(3)[0])
    before = policy.get_state()
    with pytest.raises(ValueError, match=message):
        policy.reset(chosen)
    assert all(torch.equal(part, before[name]) for name, part in policy.get_state().items())


def test_there_may_be_nothing_to_reset():
    policy, frames = make_policy(), make_frames(3)
    policy.reset([0])
    assert policy.get_state() == {}
    policy.select_action(frames[0])
    before = policy.get_state()
    for nothing in ([], np.zeros(0, dtype=np.int64), [False] * 3):
        policy.reset(nothing)
    assert all(torch.equal(part, before[name]) for name, part in policy.get_state().items())


@pytest.mark.parametrize("case", CASES)
def test_a_state_put_back_goes_on_from_where_it_was_taken(case):
    policy, frames = make_policy(case), make_frames(3)
    act(policy, frames[:2])
    kept = policy.get_state()
    expected = act(policy, frames[2:])
    copied = copy.deepcopy(kept)
    policy.reset([1])
    policy.set_state(kept)
    assert torch.equal(act(policy, frames[2:]), expected)
    assert all(torch.equal(part, copied[name]) for name, part in kept.items())
    twin = copy.deepcopy(policy)
    twin.set_state(kept)
    for part in kept.values():
        part.zero_()
    assert torch.equal(act(twin, frames[2:]), expected)
    policy.set_state({name: part[1:2] for name, part in copied.items()})
    assert error(act(policy, frames[2:, 1:2]), expected[:, 1:2]) < 1e-10


def test_what_is_done_to_a_state_outside_does_not_reach_the_policy():
    policy, frames = make_policy(), make_frames(3)
    policy.select_action(frames[0])
    kept = copy.deepcopy(policy.get_state())
    for part in policy.get_state().values():
        part.zero_()
    assert all(torch.equal(part, kept[name]) for name, part in policy.get_state().items())


def test_the_state_before_the_first_action_can_be_put_back():
    policy, frames = make_policy(), make_frames(2)
    beginning = policy.get_state()
    expected = act(policy, frames)
    policy.set_state(beginning)
    assert torch.equal(act(policy, frames), expected)


@pytest.mark.parametrize("how", ["sizes", "layers", "family", "rows", "no tensors"])
def test_a_foreign_state_is_refused(how):
    policy, frames = make_policy(), make_frames(3)
    policy.select_action(frames[0])
    before = policy.get_state()
    other = {
        "sizes": lambda: make_policy(state_size=4),
        "layers": lambda: make_policy(num_hidden_layers=1),
        "family": lambda: make_policy("gdn"),
    }.get(how, make_policy)()
    other.select_action(frames[0])
    state = other.get_state()
    if how == "rows":
        state["1.h"] = state["1.h"][:2]
    if how == "no tensors":
        state = {name: part.tolist() for name, part in state.items()}
    with pytest.raises(ValueError, match="state has the parts .* this policy needs .* another configuration, or its"):
        policy.set_state(state)
    assert all(torch.equal(part, before[name]) for name, part in policy.get_state().items())


def test_a_state_of_another_number_of_environments_fits_their_observations_only():
    policy, frames = make_policy(), make_frames(3)
    policy.select_action(frames[0])
    kept = policy.get_state()
    policy.reset()
    policy.select_action(frames[0, :2])
    policy.set_state(kept)
    with pytest.raises(ValueError, match="observation is of 2 environments; this episode has 3"):
        policy.select_action(frames[0, :2])
    assert policy.select_action(frames[0]).shape == (3, 2)


@pytest.mark.parametrize("batch", [(), (3,), (0,)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_give_arrays_and_tensors_give_tensors(dtype, batch):
    policy = make_policy(dtype=torch.float32)
    array = np.random.default_rng(0).normal(size=(*batch, 16)).astype(dtype)
    expected = policy.select_action(array.tolist() if batch != (0,) else torch.zeros(0, 16))
    assert expected.dtype == torch.float32
    for given in (array, torch.from_numpy(array)):
        policy.reset()
        action = policy.select_action(given)
        assert type(action) is type(given) and action.dtype == given.dtype and action.shape == (*batch, 2)
        if action.size if isinstance(action, np.ndarray) else action.numel():
            assert error(torch.as_tensor(action), expected) < (1e-3 if dtype == "float16" else 1e-7)


@pytest.mark.parametrize(("dtype", "in_numpy"), [(torch.float64, "float64"), (torch.bfloat16, "float32")])
def test_whole_numbers_give_actions_in_the_dtype_of_the_policy(dtype, in_numpy):
    policy = make_policy(dtype=dtype)
    assert policy.select_action(np.ones(16, dtype=np.int64)).dtype == in_numpy
    assert policy.select_action(torch.ones(16, dtype=torch.int64)).dtype == dtype
    assert policy.select_action([1] * 16).dtype == dtype
    assert policy.select_action(np.ones(16)).dtype == np.float64


def test_any_view_of_an_array_is_read():
    policy = make_policy(dtype=torch.float32)
    array = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    expected = policy.select_action(array)
    backwards, frozen = array[::-1, ::-1].copy()[::-1, ::-1], array.copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for view in (backwards, frozen):
            policy.reset()
            assert np.array_equal(policy.select_action(view), expected)


def test_an_action_stays_when_the_policy_goes_on():
    """An array shares the memory of the tensor it was made of: no later step may write there."""
    policy = make_policy(dtype=torch.float32)
    array = np.ones((2, 16), dtype=np.float32)
    first = policy.select_action(array)
    kept = first.copy()
    policy.select_action(-array)
    assert np.array_equal(first, kept) and np.array_equal(array, np.ones((2, 16)))


def test_every_option_has_a_state_for_each_environment():
    for option in OPTIONS:
        policy = make_policy(f"mamba3/{option}")
        policy.select_action(make_frames(2)[0])
        assert all(len(part) == 2 for part in policy.get_state().values())


@pytest.mark.parametrize("case", CASES)
def test_episodes_run_side_by_side_on_states_of_their_own(case):
    policy, frames = make_policy(case), make_frames(2)
    expected = act(policy, frames)
    kept, states, found = policy.get_state(), [None, None], [[], []]
    for frame in frames:
        for number in range(2):
            action, states[number] = policy.next_action(frame[number], states[number])
            found[number].append(action)
    assert error(torch.stack([torch.stack(x) for x in found], 1), expected) < 1e-12
    assert all(torch.equal(part, kept[name]) for name, part in policy.get_state().items())


@pytest.mark.parametrize("environments", [3, 9])
@pytest.mark.parametrize("case", [*CASES, "mamba3/bare_blocks", "mamba3/no_block_norm", "gdp_everything"])
def test_a_step_that_overflows_leaves_the_episode_as_it_was(case, environments):
    policy, frames = make_policy(case, dtype=torch.float32), make_frames(environments).float()
    expected = act(policy, frames)
    policy.reset()
    act(policy, frames[:3])
    huge = frames[3].clone()
    huge[1] = 3e38
    before = policy.policy_states
    message = r"not finite in environments \[1\]: the largest number there is 3e\+38 in observation and .*torch.float32"
    with pytest.raises(ValueError, match=message):
        policy.select_action(huge)
    assert policy.policy_states is before
    assert error(act(policy, frames[3:]), expected[3:]) < 1e-6


@pytest.mark.parametrize("case", [*CASES, "mamba3/bare_blocks", "mamba3/no_block_norm", "gdp_everything"])
def test_a_state_is_finite_wherever_the_action_is(case):
    policy, refused = make_policy(case, dtype=torch.float32), 0
    for exponent in range(3, 40):
        policy.reset()
        policy.select_action(torch.randn(16))
        for observation in (torch.randn(16, dtype=torch.float64) * 10.0**exponent, torch.randn(16)):
            try:
                policy.select_action(observation.clamp(-3e38, 3e38))
            except ValueError:
                refused += 1
            assert all(part.isfinite().all() for part in policy.get_state().values()), exponent
    assert 0 < refused < 37


def test_a_state_too_large_to_go_on_is_said_to_be_so():
    policy = make_policy(dtype=torch.float32)
    policy.select_action(torch.randn(2, 16))
    state = policy.get_state()
    state["1.h"][1] = 3e38
    policy.set_state(state)
    with pytest.raises(ValueError, match=r"environments \[1\].* in observation and 3e\+38 in the state.*reset\(\)"):
        policy.select_action(torch.randn(2, 16))
    policy.reset([1])
    assert policy.select_action(torch.randn(2, 16)).isfinite().all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300])
def test_a_state_that_is_not_finite_is_refused(number):
    policy = make_policy(dtype=torch.float32)
    policy.select_action(torch.randn(2, 16))
    before = policy.get_state()
    state = {name: part.double() for name, part in before.items()}
    state["1.u"][1, 0, 0] = number
    with pytest.raises(ValueError, match="state holds a number in 1.u that is not finite in torch.float32"):
        policy.set_state(state)
    assert all(torch.equal(part, before[name]) for name, part in policy.get_state().items())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_an_observation_that_is_not_finite_in_the_dtype_of_the_policy_is_refused(number):
    policy = make_policy(dtype=torch.float32)
    for row in np.eye(16):
        observation = np.stack([np.zeros(16), np.where(row == 1, number, 0)])
        with pytest.raises(ValueError, match="observation holds a number that is not finite in torch.float32"):
            policy.select_action(observation)
    assert policy.get_state() == {}


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (None, "observation must be an array of numbers; given: NoneType"),
        ("up", "observation must be an array of numbers; given: str"),
        ([[0.0] * 16, [0.0]], "observation must be an array of numbers; given: list"),
        (np.array([None] * 16), "observation must be an array of numbers; given: ndarray"),
        (np.zeros(16) * 1j, "observation must be real numbers; given: complex ones"),
        (torch.zeros(16) * 1j, "observation must be real numbers; given: complex ones"),
        (3.0, r"observation has shape \(\)"),
    ],
    ids=str,
)
def test_what_is_no_observation_is_named_and_changes_nothing(observation, message):
    policy = make_policy()
    policy.select_action(make_frames(1)[0])
    before = policy.policy_states
    with pytest.raises(ValueError, match=message):
        policy.select_action(observation)
    assert policy.policy_states is before


@pytest.mark.parametrize("state", [None, [], "0.h", torch.zeros(2)])
def test_what_is_no_state_is_refused(state):
    policy = make_policy()
    policy.select_action(make_frames(1)[0])
    before = policy.policy_states
    with pytest.raises(ValueError, match=f"state is a {type(state).__name__}; it must be a dict of tensors"):
        policy.set_state(state)
    assert policy.policy_states is before
