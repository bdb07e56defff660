"""A policy in a control loop: one observation in, one action out, with a state for each environment in between."""

import math
from collections.abc import Callable

import numpy as np
import torch

from .mixers.fused_step import known_method
from .model_inputs import as_numbers
from .recurrent_cache import LayerStates


class ControlLoopMixin:
    """
    Steps of a policy that has its base model under `model` and the map to actions under `action_head`. Before the first
    action `policy_states` is None; a step replaces it and changes no tensor in it.
    """

    policy_states: LayerStates | None = None
    # What a family has to stand for a step: takes the policy, an observation and states, and returns the action and the
    # states after it, or None where it must not.
    compiled_step: Callable | None = None

    def reset(self, environments=None) -> None:
        """
        Starts an episode: in all environments, whose number may then be another, or in some of them.

        Args:
            environments: The numbers of those to reset, or a boolean mask (environments,), such as the `terminated |
                truncated` of a vectorised environment; a list, array or tensor. The others are left as they are. Before
                the first action there is nothing to reset.
        """
        if environments is None:
            self.policy_states = None
        elif self.policy_states is not None:
            rows = chosen_rows(environments, self.policy_states.rows).to(self.policy_states[0][0].device)
            self.policy_states = self.policy_states.with_rows(rows, self.initial_states(len(rows)))

    def get_state(self) -> dict[str, torch.Tensor]:
        """
        What the policy remembers of the episodes, by layer and name, such as `"0.h"`: tensors with an axis of
        environments first. They are copies, which later steps do not change; there are none before the first action.
        """
        if self.policy_states is None:
            return {}
        return {name: part.clone() for name, part in self.policy_states.parts()}

    @torch.no_grad()
    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continues from what `get_state` returned, also in a copy of this policy or on another device."""
        if not isinstance(state, dict):
            raise ValueError(
                f"state is a {type(state).__name__}; it must be a dict of tensors, as get_state() returns."
            )
        if not state:
            self.reset()
            return
        rows = next((len(part) for part in state.values() if torch.is_tensor(part) and part.dim()), 0)
        fresh = self.initial_states(rows)
        expected = {name: tuple(part.shape) for name, part in fresh.parts()}
        found = {name: tuple(part.shape) if torch.is_tensor(part) else type(part) for name, part in state.items()}
        if found != expected:
            raise ValueError(
                f"state has the parts {found}; with {rows} environments this policy needs {expected}. It comes from "
                "another configuration, or its parts are not of one batch."
            )
        states = fresh.map(lambda name, part: part.new_empty(part.shape).copy_(state[name]))
        for name, part in states.parts():
            if not is_finite(part):
                raise ValueError(f"state holds a number in {name} that is not finite in {part.dtype}.")
        self.policy_states = states

    def initial_states(self, rows: int) -> LayerStates:
        """The states of `rows` environments before their first observation."""
        frames = self.action_head.weight.new_empty(rows, 1, self.config.hidden_size)
        return LayerStates(layer.mixer.initial_state(frames) for layer in self.model.layers)

    def select_action(self, observation) -> torch.Tensor | np.ndarray:
        """
        The action for the next observation of an episode, (observation_size,), or for several environments at once,
        (batch, observation_size); a policy that reads pixels also takes pictures as they are, (channels, height, width)
        or a batch of them. A refused observation changes no state, nor does one, or a state, so large that the action
        would not be finite.

        A NumPy array gives an array, a tensor a tensor on its device, both in the floating dtype of the observation.
        For whole numbers, lists and whatever else converts to a tensor, the action has the dtype of the policy (in
        NumPy, which has no bfloat16, float32 in its place), and for the latter two it is a tensor on its device.
        """
        action, states = self.next_action(observation, self.policy_states)
        # As a module sets what is neither a parameter nor a module, without asking which of them it is.
        object.__setattr__(self, "policy_states", states)
        return action

    def next_action(self, observation, states: LayerStates | None) -> tuple[torch.Tensor | np.ndarray, LayerStates]:
        """
        What `select_action` returns, and the states after it, from given states in place of the kept ones: any number
        of episodes can run side by side. None is the state before the first observation.
        """
        compiled = None if states is None else type(self).compiled_step
        stepped = None if compiled is None else compiled(self, observation, states)
        return self.next_action_by_modules(observation, states) if stepped is None else stepped

    @torch.no_grad()
    def next_action_by_modules(self, observation, states: LayerStates | None):
        """What `next_action` does, whatever it is given and whatever has been done to the policy."""
        weight = self.action_head.weight
        is_array = isinstance(observation, np.ndarray)
        # A copy: torch takes no view of an array that runs backwards, and warns of one that is read-only.
        given = np.array(observation) if is_array else observation
        # Offloaded weights are on the meta device between calls; what fetches them moves the inputs too.
        device = "cpu" if weight.is_meta else weight.device
        frames = self.model.flat_observations(as_numbers("observation", given, dtype=weight.dtype, device=device))
        size = self.config.observation_size
        if frames.dim() not in (1, 2) or frames.shape[-1] != size:
            raise ValueError(f"observation has shape {tuple(frames.shape)}; it must be ({size},) or (batch, {size}).")
        if not is_finite(frames):
            raise ValueError(f"observation holds a number that is not finite in {frames.dtype}, the policy's dtype.")
        action, states = self.step(frames.reshape(-1, 1, size), states)
        action = action.view(*frames.shape[:-1], self.config.action_size)
        if is_array:
            action = as_array(action, observation.dtype)
        # What needed no conversion is of the policy's own dtype and device, as the action is.
        elif frames is not observation and torch.is_tensor(observation):
            dtype = observation.dtype if observation.is_floating_point() else action.dtype
            action = action.to(observation.device, dtype)
        return action, states

    @known_method
    def step(self, frames: torch.Tensor, states: LayerStates | None) -> tuple[torch.Tensor, LayerStates]:
        """Actions (batch, action_size) for frames (batch, 1, observation_size), and the states after them."""
        after = LayerStates(states or [None] * len(self.model.layers))
        if states is not None and states.rows != len(frames):
            raise ValueError(
                f"observation is of {len(frames)} environments; this episode has {states.rows}. Call reset() to start "
                "another."
            )
        hidden_states = self.model.run_blocks(self.model.embed_observations(frames), None, None, after)
        actions = self.action_head(hidden_states[:, 0])[..., : self.config.action_size]
        # Every number of a state is read by the step that writes it, so that one that overflows shows in the action.
        if not is_finite(actions):
            raise ValueError(describe_overflow(actions, frames, states))
        return actions, after


def is_finite(x: torch.Tensor) -> bool:
    """Whether all numbers are; by one operation in place of the five of `isfinite().all()`, for the control loop."""
    return x.numel() == 0 or math.isfinite(torch.linalg.vector_norm(x, math.inf).item())


def describe_overflow(actions: torch.Tensor, frames: torch.Tensor, states: LayerStates | None) -> str:
    rows = (~actions.isfinite()).any(-1).nonzero()[:, 0]
    kept = [part[rows].abs().amax() for _, part in states.parts() if part.numel()] if states else []
    return (
        f"The action for this observation is not finite in environments {rows.tolist()}: the largest number there is "
        f"{frames[rows].abs().max().item():.3g} in observation and {max(map(float, kept), default=0.0):.3g} in the "
        f"state before it. They are too large for {frames.dtype}, or a weight of the policy is not finite. The state "
        "stays as it was; reset() starts an episode."
    )


def chosen_rows(environments, count: int) -> torch.Tensor:
    """The numbers (chosen,) of the environments that a list, array or tensor of numbers, or a mask (count,), means."""
    chosen = torch.as_tensor(environments)
    if chosen.dtype == torch.bool and chosen.shape == (count,):
        return chosen.nonzero()[:, 0]
    whole = chosen.numel() == 0 or not (chosen.is_floating_point() or chosen.is_complex())
    if chosen.dtype == torch.bool or chosen.dim() != 1 or not whole:
        raise ValueError(
            f"environments has shape {tuple(chosen.shape)} and dtype {chosen.dtype}; it must be a list of whole "
            f"numbers or a boolean mask of shape {(count,)}."
        )
    for number in chosen.tolist():
        if not 0 <= number < count:
            raise ValueError(f"environments hold {number}; this episode has {count}, so they must be 0 to {count - 1}.")
    return chosen.long().unique()


def as_array(action: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    if action.dtype == torch.bfloat16:
        action = action.float()
    array = action.numpy(force=True)
    return array if dtype == array.dtype or dtype.kind != "f" else array.astype(dtype)
