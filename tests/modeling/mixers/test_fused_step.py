"""One compiled call stands for a block at single tokens only where it is the same function as the ordinary path."""

import functools

import accelerate
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.model_cases import OPTIONS, build
from helpers.module_changes import (
    CALLS,
    Counting,
    Marked,
    Watching,
    arrangements,
    double,
    double_precision_of_single,
    freed,
    freed_view,
    negated_twice,
    old_weight_norm,
    scattered,
    seen_modules,
    single,
    subclass,
    view_of_many,
    weight_norm,
)
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRModel
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State
from mamba3_nplr.modeling.mixers.mamba3_backends import MIXER_BACKENDS
from mamba3_nplr.modeling.mixers.mamba3_cpu import BlockFrame, step_cpu
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.sequence_model import RecurrentBlock

pytestmark = [
    pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # of what torch would rather not have used
]

NORMS = ["mixer_norm", "mixer.B_norm", "mixer.C_norm", "mixer.norm"]
PROJECTIONS = ["mixer.in_proj", "mixer.k_proj", "mixer.beta_proj", "mixer.out_proj"]
MODULES = [*NORMS, *PROJECTIONS, "mixer"]


@pytest.fixture
def block():
    """A block with every part that a step can have but those that exclude others."""
    return build(Mamba3NPLRModel, output_norm=True, gate_form="exact", scan_backend="cpu").layers[0]


@pytest.fixture
def taken(monkeypatch):
    """A list with an entry for each step that compiled code took: "block" or "mixer", by what it stood for."""
    steps, backend = [], MIXER_BACKENDS["cpu"]

    def step(x, sizes, matrices, weights, state, frame, **options):
        result = backend.step(x, sizes, matrices, weights, state, frame, **options)
        if result is not None:
            steps.append("mixer" if frame == BlockFrame() else "block")
        return result

    monkeypatch.setitem(MIXER_BACKENDS, "cpu", backend._replace(step=step))
    return steps


def random_state(mixer, rows):
    return Mamba3State(*(torch.randn(shape, dtype=torch.float64) for shape in mixer.state_shapes(rows)))


def outcome(function):
    """What a function returns, or the error it raises."""
    try:
        with torch.no_grad():
            return function()
    except Exception as error:
        return error


def advance(block, backend, x, state, mixer_alone=False):
    block.mixer.config.scan_backend = backend
    if mixer_alone:
        return block.mixer(x, state)
    # What all families do, for what is to be expected.
    step = block.advance if backend == "cpu" else functools.partial(RecurrentBlock.advance, block)
    return step(x, state, None, None)


def assert_same(block, x=None, state=None):
    """The block and its mixer alone do what they do without compiled code, or fail where that fails."""
    x = torch.randn(2, 1, 12, dtype=torch.float64) if x is None else x
    state = random_state(block.mixer, 2) if state is None else state
    for mixer_alone in (False, True):
        found, expected = (
            outcome(functools.partial(advance, block, name, x, state, mixer_alone)) for name in ("cpu", "reference")
        )
        if isinstance(expected, Exception):
            assert isinstance(found, Exception)
            continue
        assert not isinstance(found, Exception), found
        assert type(found[0]) is type(expected[0])
        for part, wanted in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change", CALLS)
@pytest.mark.parametrize("name", MODULES)
def test_what_happens_around_a_module_happens(name, change, block, taken):
    change(block.get_submodule(name))
    assert_same(block)
    # Hooks of a mixer do not mind what it does inside.
    inside = name == "mixer_norm" or (name == "mixer" and change is not subclass)
    assert taken == ["mixer", "mixer"] * inside


@pytest.mark.parametrize("change", CALLS)
@pytest.mark.parametrize("block_norm", ["rms_norm", "none"])
def test_what_happens_around_other_norms_happens(block_norm, change, taken):
    block = build(Mamba3NPLRModel, block_norm=block_norm).layers[0]
    change(block.mixer_norm)
    assert_same(block)
    assert taken == ["mixer", "mixer"]


@pytest.mark.parametrize("name", MODULES)
def test_what_happens_around_a_class_of_modules_happens(name, block, taken, monkeypatch):
    kind = type(block.get_submodule(name))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args: double(forward(self, *args)))
    assert_same(block)


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_what_happens_around_all_modules_happens(register, block, taken):
    with seen_modules(register) as seen:
        assert_same(block)
    assert not taken and set(seen) >= {block.get_submodule(name) for name in MODULES}


def parameters():
    return [
        name for name, _ in build(Mamba3NPLRModel, output_norm=True, gate_form="exact").layers[0].named_parameters()
    ]


@pytest.mark.parametrize("change", [scattered, negated_twice, single, double_precision_of_single, view_of_many])
@pytest.mark.parametrize("name", parameters())
def test_numbers_are_read_from_wherever_they_are(name, change, block, taken):
    change(block.get_parameter(name))
    assert_same(block)
    if change in (double_precision_of_single, view_of_many):
        assert taken == ["block", "mixer"]
    else:
        assert "block" not in taken and (not taken or name.startswith("mixer_norm"))


@pytest.mark.parametrize("name", parameters())
def test_parameters_of_other_classes_are_asked_what_they_do(name, block, taken):
    *path, last = name.split(".")
    owner = block.get_submodule(".".join(path))
    setattr(owner, last, nn.Parameter(getattr(owner, last).detach().as_subclass(Marked)))
    assert_same(block)
    assert "block" not in taken and (not taken or name.startswith("mixer_norm"))


@pytest.mark.parametrize("change", [freed, freed_view])
@pytest.mark.parametrize("name", [f"{name}.weight" for name in ("mixer_norm", *PROJECTIONS)])
def test_weights_that_are_not_in_memory_are_an_error(name, change, block, taken):
    change(block.get_parameter(name))
    with torch.no_grad(), pytest.raises(RuntimeError, match="not allocated|out of bounds"):
        advance(block, "cpu", torch.randn(2, 1, 12, dtype=torch.float64), None)
    assert not taken or name == "mixer_norm.weight"


@pytest.mark.parametrize("change", [weight_norm, old_weight_norm])
@pytest.mark.parametrize("name", [*PROJECTIONS, *NORMS])
def test_weights_made_of_others_are_made(name, change, block, taken):
    change(block.get_submodule(name))
    assert_same(block)
    assert "block" not in taken and (not taken or name == "mixer_norm")


@pytest.mark.parametrize("name", ["dt_bias", "A_bias", "B_bias", "C_bias", "D"])
def test_parameters_of_a_mixer_made_of_others_are_made(name, block, taken):
    nn.utils.parametrize.register_parametrization(block.mixer, name, nn.Tanh())
    assert_same(block)
    assert not taken


def put_before_the_weight(block):
    block.mixer.in_proj.__dict__["weight"] = 2 * block.mixer.in_proj.weight.detach()


def put_before_a_bias(block):
    block.mixer.D.data *= 3
    block.mixer.__dict__["D"] = 2 * block.mixer.D.detach()


def put_before_the_bias_of_a_projection(block):
    block.mixer.out_proj.__dict__["bias"] = torch.ones(12, dtype=torch.float64)


def put_before_the_bias_of_the_norm(block):
    block.mixer_norm.__dict__["bias"] = None


def put_before_the_weight_of_the_norm(block):
    block.mixer_norm.__dict__["weight"] = 2 * block.mixer_norm.weight.detach()


def put_before_a_projection(block):
    block.mixer.__dict__["in_proj"] = nn.Linear(12, block.mixer.in_proj.out_features).double()


def put_before_the_norm(block):
    block.__dict__["mixer_norm"] = nn.Identity()


def with_bias(name, block):
    old = block.mixer.get_submodule(name)
    setattr(block.mixer, name, nn.Linear(old.in_features, old.out_features).double())


def without_bias(block):
    block.mixer.beta_proj = nn.Linear(12, block.mixer.beta_proj.out_features, bias=False).double()


def other_epsilon(name, block):
    block.get_submodule(name).eps = 0.5


def other_groups(name, block):
    block.get_submodule(name).group_size = 2


def other_axes(block):
    block.mixer_norm = nn.LayerNorm((1, 12)).double()


def axes_that_do_not_fit(block):
    block.mixer_norm.normalized_shape = (6,)


def norm_without_weight(block):
    block.mixer_norm = nn.LayerNorm(12, elementwise_affine=False).double()


def norm_without_epsilon(block):
    block.mixer_norm = nn.RMSNorm(12).double()


CHANGES = [
    put_before_the_weight,
    put_before_a_bias,
    put_before_the_bias_of_a_projection,
    put_before_the_bias_of_the_norm,
    put_before_the_weight_of_the_norm,
    put_before_a_projection,
    put_before_the_norm,
    *(functools.partial(with_bias, name) for name in ("in_proj", "k_proj", "out_proj")),
    without_bias,
    *(functools.partial(other_epsilon, name) for name in NORMS),
    *(functools.partial(other_groups, name) for name in NORMS[1:]),
    other_axes,
    axes_that_do_not_fit,
    norm_without_weight,
    norm_without_epsilon,
]


@pytest.mark.parametrize("change", CHANGES)
def test_modules_are_taken_as_they_are_now(change, block, taken):
    change(block)
    assert_same(block)


def test_the_epsilon_of_the_norm_before_the_mixer_is_known(block, taken):
    other_epsilon("mixer_norm", block)
    assert_same(block)
    assert taken == ["block", "mixer"]


def test_a_block_may_have_a_norm_without_a_bias(block, taken):
    block.mixer_norm = nn.LayerNorm(12, bias=False).double()
    assert_same(block)
    assert taken == ["block", "mixer"]


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((2, 1, 12), {"mask": torch.tensor([[True], [False]])}),
        ((1, 1, 12), {"cu_seqlens": torch.tensor([0, 0, 1])}),
        ((2, 2, 12), {}),
        ((9, 1, 12), {}),
    ],
)
@torch.no_grad()
def test_sequences_and_many_rows_are_no_steps(shape, named, block, taken):
    x = torch.randn(shape, dtype=torch.float64)
    found, _ = block.mixer(x, **named)
    block.mixer.config.scan_backend = "reference"
    torch.testing.assert_close(found, block.mixer(x, **named)[0], rtol=1e-10, atol=1e-10)
    assert not taken


@torch.no_grad()
def test_a_step_compiles_in_one_graph(block, taken):
    x = torch.randn(2, 1, 12, dtype=torch.float64)
    found = torch.compile(block, backend="eager", fullgraph=True)(x)
    assert not taken
    torch.testing.assert_close(found, block(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "watch",
    [
        Counting,
        Watching,
        forward_ad.dual_level,
        torch.enable_grad,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.device, "cpu"),
    ],
)
@torch.no_grad()
def test_who_watches_operators_sees_them(watch, block, taken):
    x = torch.randn(2, 1, 12, dtype=torch.float64)
    for mixer_alone in (False, True):
        with watch():
            advance(block, "cpu", x, None, mixer_alone)
    assert not taken


def run(block, x, mixer_alone):
    y, state = advance(block, "cpu", x, None, mixer_alone)
    return (y, *state)


def traced(function, x):
    return torch.jit.trace(function, (x,), check_trace=False)


def functional(function, x):
    return make_fx(function)(x)


def symbolic(function, x):
    return make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)


@pytest.mark.parametrize("mixer_alone", [False, True])
@pytest.mark.parametrize("record", [traced, functional, symbolic])
@torch.no_grad()
def test_a_recorded_step_is_that_of_its_input(record, mixer_alone, block, taken):
    block.requires_grad_(False)  # torch.jit.trace takes no other constants
    step = functools.partial(run, block, mixer_alone=mixer_alone)
    first, second = torch.randn(2, 2, 1, 12, dtype=torch.float64)
    recorded = record(lambda x: step(x), first)
    assert not taken
    for found, expected in zip(recorded(second), step(second), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("inside", [False, True])
@torch.no_grad()
def test_fake_tensors_stay_fake(inside, block, taken):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = mode.from_tensor(torch.randn(2, 1, 12, dtype=torch.float64))
    if inside:
        with mode:
            found = run(block, x, False)
    else:
        found = run(block, x, False)
    assert not taken and [tuple(part.shape) for part in found] == [(2, 1, 12), *block.mixer.state_shapes(2)]


@torch.no_grad()
def test_vmap(block):
    x = torch.randn(3, 2, 1, 12, dtype=torch.float64)
    found = torch.vmap(lambda x: run(block, x, False)[0])(x)
    expected = torch.stack([run(block, part, False)[0] for part in x])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_weights_may_come_from_outside(block, taken):
    x, mixer = torch.randn(2, 1, 12, dtype=torch.float64), block.mixer
    others = {name: torch.randn_like(parameter) for name, parameter in mixer.named_parameters()}
    found, _ = torch.func.functional_call(mixer, others, (x,))
    mixer.load_state_dict(others)
    mixer.config.scan_backend = "reference"
    torch.testing.assert_close(found, mixer(x)[0], rtol=1e-10, atol=1e-10)
    assert taken == ["mixer"]


def test_nothing_of_a_step_is_remembered(block, taken):
    """Each line changes what a step before it has read."""
    other = build(Mamba3NPLRModel, output_norm=True, gate_form="exact", scan_backend="cpu").layers[0]
    changes = [
        lambda: None,
        lambda: setattr(block.mixer.in_proj.weight, "data", torch.randn(80, 12, dtype=torch.float64)),
        lambda: setattr(block.mixer.in_proj.weight, "data", torch.randn(12, 80, dtype=torch.float64).T),
        lambda: block.load_state_dict(other.state_dict()),
        lambda: block.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True),
        lambda: setattr(block.mixer, "out_proj", other.mixer.out_proj),
        lambda: setattr(block.mixer_norm, "eps", 0.1),
        lambda: setattr(block, "mixer_norm", nn.RMSNorm(12, eps=0.3).double()),
        lambda: setattr(block, "residual", False),
    ]
    for change in changes:
        change()
        assert_same(block)
    # All but the two whose input projection does not lie in one piece.
    assert taken == ["block", "mixer"] * (len(changes) - 2)
    handle = block.mixer.k_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    taken.clear()
    assert_same(block)
    assert not taken
    handle.remove()
    assert_same(block)
    assert taken == ["block", "mixer"]


@pytest.mark.parametrize("how", arrangements(torch.ones(1)))
def test_states_are_read_however_they_lie(how, block, taken):
    state = random_state(block.mixer, 2)
    for field, part in state._asdict().items():
        given, plain = arrangements(part.float().double())[how]
        assert_same(block, state=state._replace(**{field: given}))
        assert taken == ["block", "mixer"] * plain
        taken.clear()


@pytest.mark.parametrize("how", arrangements(torch.ones(1)))
def test_tokens_are_read_however_they_lie(how, block, taken):
    x, plain = arrangements(torch.randn(2, 1, 12, dtype=torch.float64))[how]
    assert_same(block, x=x)
    assert ("block" in taken) == (plain and how != "float32")  # in that dtype there are no weights here


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("block_norm", ["layer_norm", "rms_norm", "none"])
@pytest.mark.parametrize("width", [1, 11, 13, 80])
@torch.no_grad()
def test_a_token_of_another_width_is_an_error(width, block_norm, backend):
    model = build(Mamba3NPLRModel, block_norm=block_norm, scan_backend=backend)
    x = torch.randn(2, 1, width, dtype=torch.float64)
    for function in (lambda: model(inputs_embeds=x), lambda: model.layers[0].mixer(x)):
        with pytest.raises((RuntimeError, ValueError)):
            function()


def step_arguments(option, rows=2):
    """What a block gives to compiled code: tensors by name, and the rest."""
    block = build(Mamba3NPLRModel, option).layers[0]
    mixer, frame = block.mixer, block.frame()
    groups = {"matrices": mixer.bare_matrices(), "weights": mixer.bare_weights(), "state": random_state(mixer, rows)}
    groups["frame"] = frame
    return torch.randn(rows, 1, 12, dtype=torch.float64), mixer.sizes, groups, mixer.options


def call_step(x, sizes, groups, options):
    return step_cpu(x, sizes, *groups.values(), **options)


def unfit(x):
    """What a tensor might be in the place of another that compiled code could read."""
    yield from (x[1:], x[..., :-1], torch.cat([x, x]), x[None], x.new_ones(()), x.to("meta"), x.to(torch.int64))
    yield from (x.bfloat16(), x.to(torch.complex128), x.to_sparse(), torch._neg_view(x), x.as_subclass(Marked))
    yield from (FakeTensorMode().from_tensor(x), x.tolist(), 1.0, "tensor")
    if x.dim() == 2:
        yield from (x.to_sparse_csr(), x.T.contiguous())
        yield x.T.contiguous().T


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_compiled_code_refuses_what_it_cannot_read(option):
    x, sizes, groups, options = step_arguments(option)
    assert call_step(x, sizes, groups, options) is not None
    for wrong in (*unfit(x), None):
        if not torch.is_tensor(wrong) or not wrong.is_floating_point() or wrong.shape != x.shape:
            assert call_step(wrong, sizes, groups, options) is None
    for group, values in groups.items():
        for field, value in zip(values._fields, values, strict=True):
            if value is not None and not torch.is_tensor(value):
                continue
            candidates = [torch.ones(12, dtype=torch.float64)] if value is None else [*unfit(value), None]
            for wrong in candidates:
                refused = call_step(x, sizes, groups | {group: values._replace(**{field: wrong})}, options) is None
                assert refused or fits_after_all(group, field, value, wrong)


def fits_after_all(group, field, value, wrong):
    """A state is converted, and a norm before the mixer may lack a bias, or a whole block a norm."""
    if group == "state" and type(wrong) is torch.Tensor:
        return wrong.shape == value.shape and wrong.is_cpu and not wrong.is_sparse and not wrong.is_neg()
    return group == "frame" and (wrong is None or value is None)


def offloaded_to_disk(policy, folder):
    policy.save_pretrained(folder / "policy")
    places = {"device_map": {"": "disk"}, "offload_folder": str(folder / "offloaded")}
    return Mamba3NPLRForBehaviorCloning.from_pretrained(folder / "policy", dtype=torch.float64, **places)


def offloaded_to_memory(policy, folder):
    return accelerate.cpu_offload(policy, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("option", ["paper", "output_norm", "learned_state", "delta"])
@pytest.mark.parametrize("offload", [offloaded_to_disk, offloaded_to_memory])
@torch.no_grad()
def test_offloaded_weights_are_fetched(offload, option, tmp_path, taken):
    policy = build(Mamba3NPLRForBehaviorCloning, option, scan_backend="cpu")
    observations = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = policy(observations).actions
    policy = offload(policy, tmp_path)
    cache, actions = None, []
    for frame in observations.split(1, dim=1):
        output = policy(frame, past_key_values=cache, use_cache=True)
        actions.append(output.actions)
        cache = output.past_key_values
    torch.testing.assert_close(torch.cat(actions, dim=1), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(policy(observations).actions, expected, rtol=1e-10, atol=1e-10)
    actions = [policy.select_action(frames) for frames in observations.unbind(1)]
    torch.testing.assert_close(torch.stack(actions, dim=1), expected, rtol=1e-10, atol=1e-10)
    assert not taken
