"""
One compiled call for a step of a whole policy: the map of observations, all blocks, the last norm and the head.

When that call is the same function as the ordinary path is a long question (see `fused_step`); to ask it takes several
times as long as the step. So it is asked once, for a `Plan`, which holds everything that the answer was taken from, and
a step only compares that with what is there now:

- the modules: the class of each, a copy of its attributes, its parameters and submodules, its hooks, which are none. An
  attribute that is added, such as a `forward` of its own or what is put before a weight, is one more in the comparison;
- the classes: the methods that compiled code stands for;
- the tensors: `TensorGuards` compares class, dispatch keys (device, layout, negation, transforms and tracers), dtype,
  sizes and strides, and the plan the addresses. Numbers are read where they lie, so that they may change. To take its
  storage from a tensor, or to give it another, changes its address;
- the configurations and registries that decide on a backend;
- torch: modes, transforms and graphs, asked anew at each step.

Whatever differs, the question is asked again, and where the answer is no the ordinary path runs, which also says what
is wrong with an observation or a state.
"""

import ctypes
from itertools import chain, repeat
from operator import attrgetter, getitem, is_, itemgetter, le

import numpy as np
import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from transformers.modeling_layers import GradientCheckpointingLayer

from .mixers.fused_step import (
    DTYPES,
    FORWARDS,
    MAX_ROWS,
    METHODS,
    has_global_hooks,
    has_plain_parameters,
    is_bare,
    is_plain,
    parameter,
    submodule,
)
from .mixers.mamba3_backends import MIXER_BACKENDS
from .mixers.mamba3_cpu import PolicyBlock, step_function
from .recurrent_cache import LayerStates
from .scan.cpu.compiled import INTEGER, NUMBER, TENSOR, library
from .scan.dispatch import BACKENDS
from .scan.torch_transforms import is_plain_without_gradients

# The dtype of an array -> that of a tensor.
ARRAYS = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
# Attributes of modules by which what is called could be another function.
METHOD_NAMES = {"step", "run_blocks", "advance", "frame", "policy_block", "model", "action_head"}

METHODS.update((nn.Module.__call__, GradientCheckpointingLayer.__call__))

attributes_of = attrgetter("__dict__")
parameters_of, submodules_of = itemgetter("_parameters"), itemgetter("_modules")
config_of, options_of = itemgetter("config"), itemgetter("options")


POLICY_FIELDS = dict.fromkeys(("rows", "layers", "inputs", "hidden", "actions", "centred"), INTEGER)
POLICY_FIELDS |= {"epsilon": NUMBER, "blocks": TENSOR}
POLICY_FIELDS |= {f"{part}_{name}": TENSOR for part in ("in", "norm", "head") for name in ("weight", "bias")}
# `PolicyStep` of the C++ source.
PolicyArguments = type("PolicyArguments", (ctypes.Structure,), {"_fields_": list(POLICY_FIELDS.items())})


class Plans(dict):
    """Those of a policy. A copy of the policy has its own, made when it needs them."""

    def __deepcopy__(self, memo) -> "Plans":
        return Plans()

    def __reduce__(self) -> tuple:
        return Plans, ()


def step_policy(policy: nn.Module, observation, states: LayerStates):
    """
    What `next_action` returns for an array of floats or doubles, or a tensor of the policy's own dtype, after the step
    that has left these states; None where the ordinary path must run.
    """
    kind = type(observation)
    if (kind is not np.ndarray and kind is not torch.Tensor) or not is_plain_without_gradients():
        return None
    shape, plans = observation.shape, policy.__dict__.get("step_plans")
    if plans is None:
        plans = policy.__dict__["step_plans"] = Plans()
    rows = 1 if len(shape) == 1 else shape[0] if len(shape) == 2 else 0
    # With or without gradients, tensors have other dispatch keys.
    key = rows, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    plan = plans.get(key)
    if plan is None or not plan.holds(policy):
        plan = make_plan(policy, rows)
        if plan is None:
            plans.pop(key, None)
            return None
        plans[key] = plan
    return plan.step(observation, states)


class Plan:
    """The compiled step of a policy for some number of rows, and all that it depends on."""

    def __init__(self, policy, rows: int, arguments: PolicyArguments, blocks: list[PolicyBlock], tensors: list):
        self.prepare_call(policy, rows, arguments, blocks, tensors)
        self.remember_modules(policy)
        self.remember_tensors(tensors, blocks)
        self.remember_settings(policy)

    def prepare_call(self, policy, rows, arguments, blocks, tensors):
        self.dtype = tensors[0].dtype
        self.array_dtype = next(array for array, dtype in ARRAYS.items() if dtype is self.dtype)
        self.rows, self.inputs, self.actions = rows, arguments.inputs, arguments.actions
        step_function.function(self.dtype)  # says so if there is no library for this dtype
        self.function = library(self.dtype).policy_step
        self.function.argtypes = [ctypes.c_void_p] * 4
        self.blocks = (step_function.struct * len(blocks))(*(block.arguments for block in blocks))
        arguments.blocks = ctypes.addressof(self.blocks)
        self.arguments, self.address = arguments, ctypes.addressof(arguments)
        self.pointers = ctypes.c_void_p * (8 * len(blocks))
        # Of four parts: h, B, u and phase.
        self.state_types = [type(layer.mixer.state_shapes(1)) for layer in policy.model.layers]

    def remember_modules(self, policy):
        self.modules = modules_of(policy)
        self.kinds = list(map(type, self.modules))
        attributes = list(map(attributes_of, self.modules))
        self.attributes = list(map(dict, attributes))
        self.parameters = list(map(parameters_of, attributes))
        self.parameter_copies = list(map(dict, self.parameters))
        self.values = [value for parameters in self.parameters for value in parameters.values()]
        self.submodules = [dict(submodules_of(own)) for own in attributes]
        self.hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        self.policy_modules = dict(policy._modules)
        kinds = set(self.kinds) & set(FORWARDS)
        methods = [*((kind, "forward") for kind in kinds), *methods_of(policy)]
        self.owners, self.names = map(list, zip(*methods, strict=True))
        self.methods = list(map(getattr, self.owners, self.names))

    def remember_tensors(self, tensors, blocks):
        self.tensors, self.addresses = tensors, [x.data_ptr() for x in tensors]
        sizes = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self.guards = TensorGuards(*tensors, **sizes)
        parts = [torch.empty(shape, dtype=self.dtype) for block in blocks for shape in block.state_shapes]
        self.state_bytes = [part.nbytes for part in parts]
        self.state_guards = TensorGuards(*parts, **sizes)

    def remember_settings(self, policy):
        self.mixers = [layer.mixer for layer in policy.model.layers]
        self.configs = [policy.config, policy.config, *(mixer.config for mixer in self.mixers)]
        self.fields = ["observation_size", "action_size", *("scan_backend" for _ in self.mixers)]
        self.settings = self.settings_now()
        self.options = [dict(mixer.options) for mixer in self.mixers]
        self.backends, self.mixer_backends = dict(BACKENDS), dict(MIXER_BACKENDS)

    def settings_now(self) -> list:
        # A configuration looks for other names of each attribute, which takes long.
        return list(map(getitem, map(object.__getattribute__, self.configs, repeat("__dict__")), self.fields))

    def holds(self, policy: nn.Module) -> bool:
        """Whether all is as it was when the plan was made."""
        try:
            return (
                not has_global_hooks()
                and not any(self.hooks)
                and self.modules_are_the_same(policy)
                and list(map(getattr, self.owners, self.names)) == self.methods
                and self.settings_are_the_same(policy)
                and self.guards.check(*self.tensors)
                and list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            # Something is missing, or is compared with what it cannot be compared with.
            return False

    def modules_are_the_same(self, policy) -> bool:
        own, attributes = policy.__dict__, list(map(attributes_of, self.modules))
        # Tensors first by identity: to compare two of them means to compare their numbers. Where a dict of parameters,
        # submodules or hooks is another, but equal, it is compared with the one before, which is known to be right.
        return (
            submodules_of(own) == self.policy_modules
            and METHOD_NAMES.isdisjoint(own)
            and all(map(is_, map(parameters_of, attributes), self.parameters))
            and all(map(is_, chain.from_iterable(map(dict.values, self.parameters)), self.values))
            and self.parameters == self.parameter_copies
            and list(map(type, self.modules)) == self.kinds
            and list(map(submodules_of, attributes)) == self.submodules
            and attributes == self.attributes
        )

    def settings_are_the_same(self, policy) -> bool:
        mixers = list(map(attributes_of, self.mixers))
        return (
            config_of(policy.__dict__) is self.configs[0]
            and all(map(is_, map(config_of, mixers), self.configs[2:]))
            and self.settings_now() == self.settings
            and list(map(options_of, mixers)) == self.options
            and self.backends == BACKENDS
            and self.mixer_backends == MIXER_BACKENDS
        )

    def step(self, observation: np.ndarray | torch.Tensor, states: LayerStates):
        """The action and the states after it; None if the observation or a state is not of the kind that is usual."""
        if observation.shape[-1] != self.inputs:
            return None
        parts = self.parts_of(states)
        data, action, address = (None, None, None) if parts is None else self.read(observation)
        if data is None:
            return None
        after = list(map(torch.empty_like, parts))
        pointers = self.pointers(*map(torch.Tensor.data_ptr, parts), *map(torch.Tensor.data_ptr, after))
        # What can go wrong, the ordinary path says: too little memory, or a number that is not finite.
        if self.function(self.address, data, pointers, address):
            return None
        if type(observation) is np.ndarray and observation.dtype is not action.dtype:
            action = action.astype(observation.dtype)
        return action, LayerStates([kind(*after[4 * i : 4 * i + 4]) for i, kind in enumerate(self.state_types)])

    def parts_of(self, states: LayerStates) -> list[torch.Tensor] | None:
        """All tensors of the states; None if they do not lie in memory as compiled code writes them."""
        try:
            parts = list(chain.from_iterable(states))
            if len(parts) != len(self.state_bytes) or not self.state_guards.check(*parts):
                return None
        except (RuntimeError, TypeError):
            return None
        there = [part.untyped_storage().nbytes() for part in parts]
        return parts if all(map(le, self.state_bytes, there)) else None

    def read(self, observation) -> tuple:
        """Numbers of an observation where compiled code can read them, an action to be filled, and its address."""
        shape = (*observation.shape[:-1], self.actions)
        if type(observation) is torch.Tensor:
            if not is_plain(observation, self.dtype, observation.shape):
                return None, None, None
            action = torch.empty(shape, dtype=self.dtype)
            return observation.data_ptr(), action, action.data_ptr()
        if observation.dtype not in ARRAYS:
            return None, None, None
        action = np.empty(shape, self.array_dtype)
        if observation.dtype is not action.dtype:
            with np.errstate(over="ignore"):  # then it is not finite, which is found
                observation = observation.astype(action.dtype)
        return observation.tobytes(), action, ctypes.addressof(ctypes.c_char.from_buffer(action))


def make_plan(policy: nn.Module, rows: int) -> Plan | None:
    """The plan for steps of so many rows, or None where compiled code must not stand for the policy as it is now."""
    model, head = submodule(policy, "model"), submodule(policy, "action_head")
    weight = parameter(head, "weight") if is_bare(head, nn.Linear) else None
    if not 0 < rows <= MAX_ROWS or model is None or weight is None or weight.dtype not in DTYPES:
        return None
    if not is_as_written(policy, model):
        return None
    dtype, hidden = weight.dtype, policy.config.hidden_size
    blocks = [layer.policy_block(dtype, rows) for layer in model.layers]
    arguments, tensors = PolicyArguments(rows=rows, layers=len(blocks), hidden=hidden), []
    arguments.inputs, arguments.actions = policy.config.observation_size, policy.config.action_size
    parts = (
        linear_parts(submodule(model, "embed_observations"), dtype, (hidden, arguments.inputs)),
        norm_parts(submodule(model, "norm"), dtype, hidden, arguments),
        linear_parts(head, dtype, (policy.config.action_head_size, hidden)),
    )
    if None in blocks or None in parts or not blocks or arguments.actions > policy.config.action_head_size:
        return None
    for name, pair in zip(("in", "norm", "head"), parts, strict=True):
        for field, tensor in zip(("weight", "bias"), pair, strict=True):
            if tensor is not None:
                setattr(arguments, f"{name}_{field}", tensor.data_ptr())
                tensors.append(tensor)
    return Plan(policy, rows, arguments, blocks, [*tensors, *chain.from_iterable(block.tensors for block in blocks)])


def is_as_written(policy: nn.Module, model: nn.Module) -> bool:
    """Whether the policy calls its modules as it is written here, and nobody sees them called."""
    layers = submodule(model, "layers")
    if type(layers) is not nn.ModuleList or has_global_hooks() or not METHOD_NAMES.isdisjoint(policy.__dict__):
        return False
    # Layers of other families have no compiled step.
    if not all(hasattr(layer, "policy_block") and is_bare(layer, type(layer)) for layer in layers):
        return False
    # Each reads the state of its own number.
    if [layer.layer_idx for layer in layers] != list(range(len(layers))):
        return False
    # It would leave the state out.
    if any(layer.gradient_checkpointing and layer.training for layer in layers):
        return False
    for module in modules_of(policy):
        if any(hooks_of(module)) or not METHOD_NAMES.isdisjoint(module.__dict__):
            return False
    return all(getattr(owner, name) in METHODS for owner, name in methods_of(policy))


def modules_of(policy: nn.Module) -> list[nn.Module]:
    return [*policy._modules["model"].modules(), *policy._modules["action_head"].modules()]


def hooks_of(module: nn.Module) -> tuple[dict, dict]:
    return module._forward_hooks, module._forward_pre_hooks


def methods_of(policy: nn.Module) -> list[tuple[type, str]]:
    """Classes, and the names of their methods that a step of the policy goes through."""
    model = policy._modules["model"]
    layers = {type(layer) for layer in model.layers}
    mixers = {type(layer.mixer) for layer in model.layers}
    named = [(kind, name) for kind in layers for name in ("__call__", "advance")] + [(kind, "step") for kind in mixers]
    return [(nn.Module, "__call__"), (type(policy), "step"), (type(model), "run_blocks"), *named]


def linear_parts(linear: nn.Module | None, dtype: torch.dtype, shape: tuple[int, int]) -> tuple | None:
    """Weight and bias of a linear map that is bare; None if it is not, or they cannot be read."""
    if not is_bare(linear, nn.Linear) or "bias" in linear.__dict__:
        return None
    weight, bias = parameter(linear, "weight"), linear._parameters.get("bias")
    readable = is_plain(weight, dtype, shape) and (bias is None or is_plain(bias, dtype, shape[:1]))
    return (weight, bias) if readable else None


def norm_parts(norm: nn.Module | None, dtype: torch.dtype, size: int, arguments: PolicyArguments) -> tuple | None:
    """Weight and bias of the last norm, whose other numbers go to `arguments`; None as above."""
    if is_bare(norm, nn.Identity):
        return None, None
    centred = is_bare(norm, nn.LayerNorm)
    if not (centred or is_bare(norm, nn.RMSNorm)) or not has_plain_parameters(norm):
        return None
    weight, bias = norm._parameters["weight"], norm._parameters["bias"] if centred else None
    if not is_plain(weight, dtype, (size,)) or not (bias is None or is_plain(bias, dtype, (size,))):
        return None
    arguments.centred, arguments.epsilon = centred, norm.eps
    return weight, bias
