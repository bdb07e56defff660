"""Small mixers of Mamba-3 and of the delta family, and what their operators take."""

import torch

from helpers.family_cases import build_case
from helpers.model_cases import build
from helpers.scan_cases import error
from mamba3_nplr import Mamba3NPLRModel
from mamba3_nplr.modeling.mixers.delta import DeltaMixer, DeltaState
from mamba3_nplr.modeling.mixers.joined_projections import project
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State


def make_mixer(option="paper", dtype=torch.float64, **sizes):
    return build(Mamba3NPLRModel, option, dtype, num_hidden_layers=1, **sizes).layers[0].mixer


def random_state(mixer, rows, dtype=torch.float64):
    state = Mamba3State(*(torch.randn(shape, dtype=torch.float64) for shape in mixer.state_shapes(rows)))
    return Mamba3State(*(part.to(dtype) for part in state._replace(phase=3 * state.phase.tanh())))


def operator_arguments(mixer, rows, length):
    """Arguments of the operator with rows of equal length, from random projections in the mixer's dtype."""
    config, dtype = mixer.config, mixer.D.dtype
    x = torch.randn(rows, length, config.hidden_size, dtype=dtype)
    k, beta = (mixer.k_proj(x), mixer.beta_proj(x)) if config.reflection_rank else (None, None)
    tensors = (mixer.in_proj(x), k, beta, *mixer.weights(), *random_state(mixer, rows, dtype), None, None)
    return [*(None if x is None else x.detach().clone() for x in tensors), *mixer.options.values()]


def make_delta_mixer(case="gdp_everything", dtype=torch.float64, **sizes) -> DeltaMixer:
    return build_case(case, dtype=dtype, num_hidden_layers=1, **sizes).layers[0].mixer


def random_delta_state(mixer, rows, dtype=torch.float64) -> DeltaState:
    return DeltaState(*(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in mixer.state_shapes(rows)))


def delta_operator_arguments(mixer, rows, length):
    """As `operator_arguments`, for a mixer of the delta family."""
    dtype = mixer.o_norm.weight.dtype
    x = torch.randn(rows, length, mixer.config.hidden_size, dtype=dtype)
    projected = project(mixer, list(mixer.projections), x)
    tensors = (projected, *mixer.weights(), *random_delta_state(mixer, rows, dtype), None, None)
    return [*(None if x is None else x.detach().clone() for x in tensors), *mixer.options().values()]


def run(mixer, x, state, backend, **sequences):
    """Output, state, and the gradients of a random function of them in the input, the state and every parameter."""
    mixer.config.scan_backend = backend
    x, state = x.detach().clone().requires_grad_(), type(state)(*(part.detach().clone() for part in state))
    leaves = {"x": x} | {f"initial_{name}": part.requires_grad_() for name, part in state._asdict().items()}
    leaves |= {name: parameter for name, parameter in mixer.named_parameters() if name != "h0"}  # a state is given
    y, final = mixer(x, state, **sequences)
    return results_and_gradients(y, final, leaves)


def results_and_gradients(y, final, leaves):
    """Output, state, and the gradients of a random function of them."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part) for part in (y, *final)]
    total = sum((weight * part).sum() for weight, part in zip(weights, (y, *final), strict=True))
    grads = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
    results = {"y": y.detach()} | {f"final_{name}": part.detach() for name, part in final._asdict().items()}
    return results | {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_close(found, expected, tolerance):
    for name in expected:
        if expected[name].numel():
            assert error(found[name], expected[name]) < tolerance, name
