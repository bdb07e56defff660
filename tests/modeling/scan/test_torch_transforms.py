"""torch.func and forward-mode differentiation of what compiled code would otherwise run."""

import pytest
import torch
from torch.autograd import forward_ad

from helpers.family_cases import build_case
from helpers.model_cases import build
from helpers.scan_cases import error, run, scan_inputs, scan_state
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.operator import scan_operator
from mamba3_nplr.modeling.scan.torch_transforms import in_forward_mode, is_transforming

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")

TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "dual numbers": lambda f, x: tangent(f, x),
    "forward-mode jacobian": lambda f, x: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
}


def tangent(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def scan_function(backend):
    inputs = scan_inputs(batch=1, length=3, heads=2, n=3, channels=2)
    return lambda u: run(inputs._replace(u=u), backend=backend)[0], inputs.u


def mixer_function(backend, family):
    torch.manual_seed(1)
    sizes = {"hidden_size": 4, "head_dim": 4, "state_size": 2, "num_rope_pairs": 1, "expand": 1}
    model = build(Mamba3NPLRModel, **sizes) if family == "mamba3" else build_case("gdp", hidden_size=4)
    model.config.scan_backend = backend
    return lambda x: model.layers[0].mixer(x)[0], torch.randn(1, 3, 4, dtype=torch.float64)


@pytest.mark.parametrize("what", ["scan", "mamba3", "delta"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_on_compiled_code_is_that_of_the_definition(name, what):
    results = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        function, x = scan_function(backend) if what == "scan" else mixer_function(backend, what)
        results.append(TRANSFORMS[name](function, x))
    assert results[1].abs().max() > 0.01
    assert error(*results) < 1e-10


def test_weights_may_be_what_is_differentiated():
    mixer = build(Mamba3NPLRModel, num_hidden_layers=1).layers[0].mixer
    mixer.config.scan_backend = "cpu"
    x, tangents = torch.randn(2, 5, 12, dtype=torch.float64), {"D": torch.ones_like(mixer.D)}

    def of_weights(weights):
        return torch.func.functional_call(mixer, weights, (x,))[0]

    found = torch.func.jvp(of_weights, ({"D": mixer.D.detach()},), (tangents,))[1]
    step = 1e-6
    numeric = (of_weights({"D": mixer.D + step}) - of_weights({"D": mixer.D - step})) / (2 * step)
    assert error(found, numeric.detach()) < 1e-6


@pytest.mark.parametrize("name", ["jvp", "grad"])
def test_a_transform_inside_of_a_compiled_graph(name):
    function, x = scan_function("cpu")
    compiled = torch.compile(lambda x: TRANSFORMS[name](function, x), backend="aot_eager", fullgraph=True)
    assert error(compiled(x), TRANSFORMS[name](function, x)) < 1e-12


def test_a_compiled_graph_inside_of_a_transform():
    function, x = scan_function("cpu")
    compiled = torch.compile(function, backend="aot_eager")
    compiled(x)  # traced outside of it first
    for name in ("jvp", "dual numbers"):
        try:
            found = TRANSFORMS[name](compiled, x)
        except RuntimeError as failed:  # as good, if it says so
            assert "chunkwise" in str(failed)
        else:
            assert error(found, TRANSFORMS[name](function, x)) < 1e-12, name


def test_a_model_runs_under_vmap():
    model = build(Mamba3NPLRModel, scan_backend="cpu")
    ids, embeds = torch.randint(0, 11, (3, 1, 5)), torch.randn(3, 1, 5, 12, dtype=torch.float64)
    for name, given in (("input_ids", ids), ("inputs_embeds", embeds)):
        batched = torch.func.vmap(lambda x, name=name: model(**{name: x}, use_cache=False).last_hidden_state)(given)
        assert error(batched[:, 0], model(**{name: given[:, 0]}).last_hidden_state) < 1e-10


def test_an_operator_called_by_itself_refuses_to_lose_a_tangent():
    inputs = scan_inputs(length=3)
    state = scan_state(inputs)
    with pytest.raises(RuntimeError, match="scan_cpu has no forward-mode derivative.*backend='chunkwise' to scan"):
        torch.func.jvp(
            lambda u: scan_operator(u, *inputs[1:], *state, None, None)[0], (inputs.u,), (torch.ones_like(inputs.u),)
        )


def test_torch_still_tells_that_it_is_transforming():
    """By names that are not public, and whose meaning may change with a version of torch."""
    assert not is_transforming() and not in_forward_mode()
    seen = []
    x = torch.ones(2)

    def look(x):
        seen.append((is_transforming(), in_forward_mode()))
        return x.sum()

    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    torch.func.jvp(look, (x,), (x,))
    with forward_ad.dual_level():
        look(x)
    assert seen == [(True, False), (True, False), (True, True), (True, True)]
    assert not is_transforming() and not in_forward_mode()
