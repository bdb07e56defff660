"""One compiled call stands for a step of a policy only where, at that step, it is the same function as its modules."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.modeling_layers import GradientCheckpointingLayer

from helpers import module_changes
from helpers.family_cases import build_case
from helpers.model_cases import OPTIONS, build
from mamba3_nplr import Mamba3NPLRForBehaviorCloning
from mamba3_nplr.modeling import fused_policy, modeling_mamba3_nplr, sequence_model
from mamba3_nplr.modeling.control_loop import ControlLoopMixin
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3Mixer, Mamba3State
from mamba3_nplr.modeling.mixers.mamba3_backends import MIXER_BACKENDS
from mamba3_nplr.modeling.recurrent_cache import LayerStates
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.dispatch import BACKENDS

pytestmark = [
    pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # of what torch would rather not have used
]

BLOCK = ["mixer_norm", "mixer.B_norm", "mixer.C_norm", "mixer.norm"]
BLOCK += ["mixer.in_proj", "mixer.k_proj", "mixer.beta_proj", "mixer.out_proj", "mixer", ""]
MODULES = ["model.embed_observations", "model.norm", "action_head"]
MODULES += [f"model.layers.1.{name}".rstrip(".") for name in BLOCK]
EVERYTHING = {"output_norm": True, "gate_form": "exact", "num_hidden_layers": 2}
OBSERVATION = np.random.default_rng(0).standard_normal(16)


def make_policy(option="paper", **changes):
    return build(Mamba3NPLRForBehaviorCloning, option, **({"scan_backend": "cpu"} | changes))


@pytest.fixture
def fused(monkeypatch):
    """A list with an entry for each step that one compiled call took."""
    steps, step = [], fused_policy.Plan.step

    def count(plan, observation, states):
        result = step(plan, observation, states)
        return result if result is None else (steps.append(1), result)[1]

    monkeypatch.setattr(fused_policy.Plan, "step", count)
    return steps


@pytest.fixture
def policy(fused):
    """A policy with every part that a step can have, but for those that exclude others, and a plan for its next one."""
    policy = make_policy(**EVERYTHING)
    for _ in range(3):
        policy.select_action(OBSERVATION)
    assert len(fused) == 2  # the first step of an episode makes the state
    fused.clear()
    return policy


def outcome(function):
    """What a function returns, or the error it raises."""
    try:
        return function()
    except Exception as error:
        return error


def assert_same(policy, observation=OBSERVATION, states=None):
    """The next action and state are those of the modules, or the same error."""
    states = policy.policy_states if states is None else states
    found = outcome(lambda: policy.next_action(observation, states))
    configs = [layer.mixer.config for layer in policy.model.layers]
    before = [config.scan_backend for config in configs]
    for config in configs:
        config.scan_backend = "reference"
    expected = outcome(lambda: policy.next_action_by_modules(observation, states))
    for config, backend in zip(configs, before, strict=True):
        config.scan_backend = backend
    if isinstance(expected, Exception):
        assert isinstance(found, Exception)
        return
    assert not isinstance(found, Exception), found
    assert type(found[0]) is type(expected[0])
    torch.testing.assert_close(*map(torch.as_tensor, (found[0], expected[0])), rtol=1e-10, atol=1e-10)
    assert type(found[1]) is LayerStates
    for (name, part), (other, wanted) in zip(found[1].parts(), expected[1].parts(), strict=True):
        assert name == other
        torch.testing.assert_close(part, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [None, 1, 3, 8])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_is_that_of_the_modules(option, rows, fused):
    policy = make_policy(option)
    shape = (16,) if rows is None else (rows, 16)
    for step in range(4):
        observation = np.random.default_rng(step).standard_normal(shape)
        if step:
            assert_same(policy, observation)
            assert_same(policy, torch.as_tensor(observation))
        policy.select_action(observation)
    assert len(fused) == 9


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("block_norm", ["layer_norm", "rms_norm", "none"])
def test_every_frame(block_norm, residual, fused):
    policy = make_policy(block_norm=block_norm, residual=residual)
    policy.select_action(OBSERVATION)
    assert_same(policy)
    assert fused


def test_maps_may_have_biases(fused):
    policy = make_policy()
    policy.model.embed_observations = nn.Linear(16, policy.config.hidden_size).double()
    policy.action_head = nn.Linear(policy.config.hidden_size, policy.config.action_head_size).double()
    policy.model.norm = nn.LayerNorm(policy.config.hidden_size, bias=False).double()
    policy.select_action(OBSERVATION)
    assert_same(policy)
    assert fused


@pytest.mark.parametrize("case", ["gdn", "ids4"])
def test_other_families_run_as_they_are(case, fused):
    policy = build_case(case, "ForBehaviorCloning")
    policy.select_action(OBSERVATION)
    policy.select_action(OBSERVATION)
    assert not fused


@pytest.mark.parametrize("change", module_changes.CALLS)
@pytest.mark.parametrize("name", MODULES)
def test_what_happens_around_a_module_happens(name, change, policy, fused):
    change(policy.get_submodule(name))
    assert_same(policy)
    assert not fused


@pytest.mark.parametrize("name", MODULES)
def test_what_happens_around_a_class_of_modules_happens(name, policy, fused, monkeypatch):
    kind = type(policy.get_submodule(name))
    forward = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *args, **named: module_changes.double(forward(self, *args, **named))
    )
    assert_same(policy)
    assert not fused


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ControlLoopMixin, "step"),
        (Mamba3NPLRForBehaviorCloning, "step"),
        (sequence_model.SequenceModel, "run_blocks"),
        (modeling_mamba3_nplr.Mamba3NPLRBlock, "advance"),
        (Mamba3Mixer, "step"),
        (nn.Module, "__call__"),
        (GradientCheckpointingLayer, "__call__"),
    ],
)
def test_other_methods_of_classes_are_called(kind, name, policy, fused, monkeypatch):
    calls, method = [], getattr(kind, name)

    def counted(self, *args, **named):
        calls.append(self)
        return method(self, *args, **named)

    monkeypatch.setattr(kind, name, counted)
    found = policy.select_action(OBSERVATION)
    assert calls and not fused
    monkeypatch.undo()
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("module", "name"),
    [("", "step"), ("model", "run_blocks"), ("model.layers.1", "advance"), ("model.layers.1.mixer", "step")],
)
def test_other_methods_of_objects_are_called(module, name, policy, fused):
    calls, owner = [], policy.get_submodule(module)
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: calls.append(1) or method(*args, **named))
    policy.select_action(OBSERVATION)
    assert calls and not fused


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_what_happens_around_all_modules_happens(register, policy, fused):
    with module_changes.seen_modules(register) as seen:
        assert_same(policy)
    assert not fused and set(seen) >= {policy.get_submodule(name) for name in MODULES}


def parameters():
    return [name for name, _ in make_policy(**EVERYTHING).named_parameters() if "layers.0" not in name]


def half_precision(p):
    p.data = p.data.bfloat16()


def changed(p):
    p.data.mul_(2)


def changed_in_place(p):
    with torch.no_grad():
        p.add_(0.5)


def replaced(p):
    p.data = 2 * p.data


def swapped(p):
    torch.utils.swap_tensors(p, nn.Parameter(2 * p.detach()))


def frozen(p):
    p.requires_grad_(not p.requires_grad)


READABLE = [
    module_changes.double_precision_of_single,
    module_changes.view_of_many,
    changed,
    changed_in_place,
    replaced,
    swapped,
    frozen,
]
UNREADABLE = [module_changes.scattered, module_changes.negated_twice, module_changes.single, half_precision]


@pytest.mark.parametrize("change", [*READABLE, *UNREADABLE])
@pytest.mark.parametrize("name", parameters())
def test_numbers_are_read_from_wherever_they_are(name, change, policy, fused):
    change(policy.get_parameter(name))
    assert_same(policy)
    assert len(fused) == (change in READABLE)
    assert_same(policy)


@pytest.mark.parametrize("name", parameters())
def test_another_parameter_is_another(name, policy, fused):
    *path, last = name.split(".")
    owner = policy.get_submodule(".".join(path))
    setattr(owner, last, nn.Parameter(2 * getattr(owner, last).detach()))
    assert_same(policy)
    assert len(fused) == 1
    setattr(owner, last, nn.Parameter(getattr(owner, last).detach().as_subclass(module_changes.Marked)))
    assert_same(policy)
    assert len(fused) == 1


def test_a_parameter_that_equals_the_one_before_is_another(fused):
    """With one head some have one number each, and two such tensors compare as two numbers do."""
    policy = make_policy(expand=1, head_dim=12)
    policy.select_action(OBSERVATION)
    policy.select_action(OBSERVATION)
    mixer = policy.model.layers[0].mixer
    for name in ("D", "dt_bias"):
        setattr(mixer, name, nn.Parameter(getattr(mixer, name).detach().clone()))
        assert_same(policy)
        getattr(mixer, name).data.add_(1)
        assert_same(policy)
    assert len(fused) == 5


def test_a_square_matrix_that_is_turned(fused):
    policy = make_policy(hidden_size=16)
    policy.select_action(OBSERVATION)
    policy.select_action(OBSERVATION)
    weight = policy.model.embed_observations.weight
    weight.data = weight.data.T
    assert_same(policy)
    assert len(fused) == 1


@pytest.mark.parametrize("change", [module_changes.freed, module_changes.freed_view])
@pytest.mark.parametrize("name", [f"{name}.weight" for name in MODULES if not name.endswith(("mixer", "1"))])
def test_weights_that_are_not_in_memory_are_an_error(name, change, policy, fused):
    change(policy.get_parameter(name))
    with pytest.raises((RuntimeError, ValueError), match="not allocated|out of bounds|has 0 bytes of memory"):
        policy.select_action(OBSERVATION)
    assert not fused


@pytest.mark.parametrize("change", [module_changes.weight_norm, module_changes.old_weight_norm])
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("mixer", "1"))])
def test_weights_made_of_others_are_made(name, change, policy, fused):
    change(policy.get_submodule(name))
    assert_same(policy)
    assert not fused


def put_before(name, attribute, value):
    def change(policy):
        module = policy.get_submodule(name)
        old = getattr(module, attribute)
        module.__dict__[attribute] = value(old)

    return change


def with_attribute(name, attribute, value):
    return lambda policy: setattr(policy.get_submodule(name), attribute, value)


def with_module(name, attribute, make):
    return lambda policy: setattr(policy.get_submodule(name), attribute, make(policy).double())


LAYER, MIXER = "model.layers.1", "model.layers.1.mixer"
CHANGES = {
    "a weight of the map": put_before("model.embed_observations", "weight", lambda x: 2 * x.detach()),
    "a bias of the map": put_before("model.embed_observations", "bias", lambda x: torch.ones(12).double()),
    "a weight of the norm": put_before("model.norm", "weight", lambda x: 2 * x.detach()),
    "a bias of the norm": put_before("model.norm", "bias", lambda x: None),
    "a weight of the head": put_before("action_head", "weight", lambda x: 2 * x.detach()),
    "a bias of the head": put_before("action_head", "bias", lambda x: torch.ones(16).double()),
    "a map": put_before("model", "embed_observations", lambda x: nn.Linear(16, 12).double()),
    "a norm": put_before("model", "norm", lambda x: nn.Identity()),
    "a head": put_before("", "action_head", lambda x: nn.Linear(12, 16).double()),
    "a model": put_before("", "model", lambda x: make_policy(**EVERYTHING).model),
    "layers": put_before("model", "layers", lambda x: x[:1]),
    "D": put_before(MIXER, "D", lambda x: 2 * x.detach()),
    "a projection": put_before(MIXER, "out_proj", lambda x: nn.Linear(x.in_features, 12).double()),
    "eps of the norm": with_attribute("model.norm", "eps", 0.5),
    "eps before the mixer": with_attribute(f"{LAYER}.mixer_norm", "eps", 0.5),
    "eps in the mixer": with_attribute(f"{MIXER}.C_norm", "eps", 0.5),
    "groups": with_attribute(f"{MIXER}.norm", "group_size", 2),
    "shape of the norm": with_attribute("model.norm", "normalized_shape", (6,)),
    "residual": with_attribute(LAYER, "residual", False),
    "training": lambda policy: policy.train(),
    "another map": with_module("model", "embed_observations", lambda policy: nn.Linear(16, 12)),
    "another norm": with_module("model", "norm", lambda policy: nn.RMSNorm(12, eps=0.3)),
    "no norm": with_module("model", "norm", lambda policy: nn.Identity()),
    "a norm without a weight": with_module("model", "norm", lambda policy: nn.LayerNorm(12, elementwise_affine=False)),
    "a norm without eps": with_module("model", "norm", lambda policy: nn.RMSNorm(12)),
    "another head": with_module("", "action_head", lambda policy: nn.Linear(12, 16)),
    "a head of another width": with_module("", "action_head", lambda policy: nn.Linear(12, 7)),
    "a narrow head": with_module("", "action_head", lambda policy: nn.Linear(12, 1)),
    "a mixer": with_module(LAYER, "mixer", lambda policy: make_policy(**EVERYTHING).model.layers[0].mixer),
    "a layer": lambda policy: policy.model.layers.__setitem__(0, make_policy(**EVERYTHING).model.layers[1]),
    "no layer": lambda policy: policy.model.layers.__delitem__(1),
    "another list of layers": with_module("model", "layers", lambda policy: nn.ModuleList(policy.model.layers[::-1])),
    "a sequence of layers": with_module("model", "layers", lambda policy: nn.Sequential(*policy.model.layers)),
    "a class": lambda policy: setattr(policy.model, "__class__", type("Other", (type(policy.model),), {})),
    "gradient checkpointing": lambda policy: policy.train().gradient_checkpointing_enable(),
    "weights of another": lambda policy: policy.load_state_dict(make_policy(**EVERYTHING).state_dict()),
    "weights assigned": lambda policy: policy.load_state_dict(make_policy(**EVERYTHING).state_dict(), assign=True),
    "a dict of hooks": with_attribute("action_head", "_forward_hooks", {}),
    "all attributes": lambda policy: setattr(policy.model.norm, "__dict__", dict(nn.LayerNorm(12).double().__dict__)),
    "all parameters": with_attribute("action_head", "_parameters", dict(nn.Linear(12, 16).double()._parameters)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_are_taken_as_they_are_now(name, policy, fused):
    CHANGES[name](policy)
    assert_same(policy)
    assert_same(policy)


def test_a_hook_in_another_dict_of_hooks(policy, fused):
    policy.action_head._forward_hooks = type(policy.action_head._forward_hooks)()
    assert_same(policy)
    policy.action_head.register_forward_hook(lambda module, args, output: module_changes.double(output))
    assert_same(policy)
    assert len(fused) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_policy_in_another_precision(dtype, policy, fused):
    policy.to(dtype)
    found = policy.next_action(OBSERVATION, policy.policy_states)[0]
    expected = policy.next_action_by_modules(OBSERVATION, policy.policy_states)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not fused  # the state is still of doubles
    policy.select_action(OBSERVATION)
    assert policy.select_action(OBSERVATION).dtype == np.float64
    assert len(fused) == (dtype is torch.float32)


def test_settings_are_taken_as_they_are_now(policy, fused):
    policy.config.action_size = 5
    assert_same(policy)
    assert len(fused) == 1
    policy.config.observation_size = 15
    assert_same(policy)
    policy.config.observation_size = 16
    policy.model.layers[1].mixer.config = copy.deepcopy(policy.config)
    policy.model.layers[1].mixer.config.scan_backend = "reference"
    assert_same(policy)
    assert len(fused) == 1
    policy.config.action_size = 17  # more than there are
    assert_same(policy)


def test_options_of_compiled_mixers_are_taken_as_they_are_now(policy, fused):
    before = policy.next_action(OBSERVATION, policy.policy_states)[0]
    policy.model.layers[0].mixer.options["contractive"] = True
    found = policy.next_action(OBSERVATION, policy.policy_states)[0]
    expected = policy.next_action_by_modules(OBSERVATION, policy.policy_states)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert len(fused) == 2 and np.abs(found - before).max() > 1e-8  # a hundred times what is allowed above


def test_another_backend_is_called(policy, fused, monkeypatch):
    policy.config.scan_backend = "auto"
    assert_same(policy)
    assert len(fused) == 1
    monkeypatch.setitem(BACKENDS, "fastest", BACKENDS["reference"]._replace(rank=9))
    assert_same(policy)
    assert len(fused) == 1
    monkeypatch.undo()


def test_another_compiled_step_is_called(policy, fused, monkeypatch):
    calls, backend = [], MIXER_BACKENDS["cpu"]
    step = lambda *given, **named: calls.append(1) or backend.step(*given, **named)  # noqa: E731
    monkeypatch.setitem(MIXER_BACKENDS, "cpu", backend._replace(step=step))
    policy.select_action(OBSERVATION)
    assert calls == [1, 1] and not fused


@pytest.mark.parametrize(
    "watch",
    [
        module_changes.Counting,
        module_changes.Watching,
        forward_ad.dual_level,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.device, "cpu"),
    ],
)
def test_who_watches_operators_sees_them(watch, policy, fused):
    with watch():
        policy.select_action(OBSERVATION)
    assert not fused


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradients_may_be_on_or_off(mode, policy, fused):
    with mode():
        policy.reset()
        for _ in range(3):
            action = policy.select_action(torch.as_tensor(OBSERVATION))
        assert not action.requires_grad and action.is_inference() == (mode is torch.inference_mode)
        assert_same(policy)
    assert len(fused) == 3


@pytest.mark.parametrize("how", module_changes.arrangements(torch.ones(1)))
def test_states_are_read_however_they_lie(how, policy, fused):
    states = policy.policy_states
    for field, part in states[1]._asdict().items():
        given, _ = module_changes.arrangements(part.float().double())[how]
        assert_same(policy, states=LayerStates([states[0], states[1]._replace(**{field: given})]))
    assert not fused


def test_a_state_that_is_not_in_memory_is_an_error(policy, fused):
    policy.policy_states[1].h.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="h0 has 0 bytes of memory"):
        policy.select_action(OBSERVATION)
    assert not fused


def test_states_of_another_number_of_layers_or_rows(policy, fused):
    states = policy.policy_states
    assert_same(policy, states=LayerStates(states[:1]))
    for wrong in ([*states, states[0]], [states[0], states[1][:3]], [states[0], (1, 2, 3, 4)]):
        assert_same(policy, states=LayerStates(wrong))
    with pytest.raises(ValueError, match="observation is of 2 environments; this episode has 1"):
        policy.next_action(np.stack([OBSERVATION] * 2), states)
    assert not fused


def test_a_step_changes_no_state_before_it(policy, fused):
    states = policy.policy_states
    before = policy.get_state()
    _, after = policy.next_action(OBSERVATION, states)
    assert fused and all(torch.equal(part, before[name]) for name, part in states.parts())
    assert all(type(state) is Mamba3State for state in after)
    addresses = [part.data_ptr() for one in (states, after) for _, part in one.parts()]
    assert len(set(addresses)) == len(addresses)
    policy.policy_states[0].h.zero_()
    assert_same(policy)


def observations():
    """Ways to give an observation, and whether one compiled call takes it."""
    x = OBSERVATION
    frozen_array = x.copy()
    frozen_array.flags.writeable = False
    unaligned = np.frombuffer(b"0" + x.tobytes(), dtype=np.uint8)[1:].view(np.float64)
    return {
        "floats": (x.astype(np.float32), True),
        "doubles": (x, True),
        "backwards": (x[::-1], True),
        "scattered": (np.repeat(x, 2)[::2], True),
        "read-only": (frozen_array, True),
        "unaligned": (unaligned, True),
        "columns": (np.asfortranarray(np.stack([x, 2 * x, 3 * x]))[:1], True),
        "one row": (x[None], True),
        "half": (x.astype(np.float16), False),
        "other bytes": (x.astype(">f8"), False),
        "whole": (x.round().astype(np.int64), False),
        "booleans": (x > 0, False),
        "complex": (x.astype(np.complex128), False),
        "objects": (x.astype(object), False),
        "texts": (x.astype(str), False),
        "masked": (np.ma.array(x, mask=x > 0), False),
        "subclass": (x.view(type("Array", (np.ndarray,), {})), False),
        "list": (x.tolist(), False),
        "number": (np.float64(3.0), False),
        "tensor": (torch.tensor(x), True),
        "parameter": (nn.Parameter(torch.tensor(x)), False),
        "with a gradient": (torch.tensor(x, requires_grad=True), True),
        "scattered tensor": (torch.tensor(x).repeat_interleave(2)[::2], False),
        "negated tensor": (torch._neg_view(torch.tensor(x)), False),
        "float tensor": (torch.tensor(x).float(), False),
        "meta": (torch.tensor(x, device="meta"), False),
        "too long": (np.concatenate([x, x[:1]]), False),
        "three axes": (x[None, None], False),
        "no axis": (np.array(1.0), False),
        "no rows": (np.zeros((0, 16)), False),
        "not a number": (np.where(x > 0, np.nan, x), False),
        "infinite": (np.where(x > 0, np.inf, x), False),
        "too large": (1e200 * x, False),
    }


@pytest.mark.parametrize("name", observations())
def test_observations_are_read_however_they_lie(name, policy, fused):
    observation, plain = observations()[name]
    assert_same(policy, observation)
    assert len(fused) == plain


@pytest.mark.parametrize("observation", [1e39 * OBSERVATION, np.full(16, 1e38), np.full(16, np.nan, dtype=np.float32)])
def test_what_is_not_finite_is_named_and_changes_no_state(observation, fused):
    policy = make_policy().float()
    policy.select_action(OBSERVATION)
    policy.select_action(OBSERVATION)
    before = policy.get_state()
    found, expected = (
        outcome(lambda step=step: step(observation, policy.policy_states))
        for step in (policy.next_action, policy.next_action_by_modules)
    )
    assert type(found) is type(expected)
    if isinstance(expected, ValueError):
        assert str(found) == str(expected)
    with pytest.raises(ValueError, match="not finite"):
        policy.select_action(np.full(16, np.inf))
    assert all(torch.equal(part, before[name]) for name, part in policy.get_state().items())


def test_floats_give_floats_and_doubles_doubles(fused):
    policy = make_policy().float()
    for dtype in (np.float32, np.float64, np.float32):
        action = policy.select_action(OBSERVATION.astype(dtype))
        assert action.dtype == dtype and action.shape == (2,) and action.flags.writeable
    assert len(fused) == 2


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy)), copy.copy],
    ids=["deep", "pickle", "copy"],
)
def test_copies_of_a_policy_step_by_themselves(copied, policy, fused):
    other = copied(policy)
    other.action_head = nn.Linear(12, 16, bias=False).double()
    for one in (policy, other, policy):
        assert_same(one)
    assert len(fused) == 3


def test_episodes_run_side_by_side_on_threads(fused):
    policy = make_policy()
    frames = np.random.default_rng(1).standard_normal((4, 50, 16))

    def episode(number):
        states, actions = None, []
        for frame in frames[number]:
            action, states = policy.next_action(frame, states)
            actions.append(action)
        return np.stack(actions)

    expected = [episode(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(episode, range(4)))
    assert np.array_equal(found, expected)


def test_a_plan_is_made_once(policy, fused, monkeypatch):
    made = []
    monkeypatch.setattr(fused_policy, "make_plan", lambda *given: made.append(given))
    policy.select_action(OBSERVATION)
    assert fused and not made
    policy.model.norm.eps = 0.3
    policy.select_action(OBSERVATION)
    assert len(made) == 1
