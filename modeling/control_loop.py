"""A policy in a control loop: one observation in, one action out, with a state for each environment in between."""

import numpy as np
import torch

from .recurrent_cache import LayerStates


class ControlLoopMixin:
    """
    Steps of a policy that has its base model under `model` and the map to actions under `action_head`. Before the first
    action `policy_states` is None; a step replaces it and changes no tensor in it.
    """

    policy_states: LayerStates | None = None

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
        """Goes on from what `get_state` returned, also in a copy of this policy or on another device."""
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
        self.policy_states = fresh.map(lambda name, part: part.new_empty(part.shape).copy_(state[name]))

    def initial_states(self, rows: int) -> LayerStates:
        """The states of `rows` environments before their first observation."""
        frames = self.action_head.weight.new_empty(rows, 1, self.config.hidden_size)
        return LayerStates(layer.mixer.initial_state(frames) for layer in self.model.layers)

    @torch.no_grad()
    def select_action(self, observation) -> torch.Tensor | np.ndarray:
        """
        The action for the next observation of an episode, (observation_size,), or for several environments at once,
        (batch, observation_size). A refused observation changes no state.

        A NumPy array gives an array, a tensor a tensor on its device, both in the floating dtype of the observation.
        For whole numbers, lists and whatever else converts to a tensor, the action has the dtype of the policy (in
        NumPy, which has no bfloat16, float32 in its place), and for the latter two it is a tensor on its device.
        """
        weight = self.action_head.weight
        is_array = isinstance(observation, np.ndarray)
        # A copy: torch takes no view of an array that runs backwards, and warns of one that is read-only.
        given = np.array(observation) if is_array else observation
        frames = torch.as_tensor(given, dtype=weight.dtype, device=weight.device)
        size = self.config.observation_size
        if frames.dim() not in (1, 2) or frames.shape[-1] != size:
            raise ValueError(f"observation has shape {tuple(frames.shape)}; it must be ({size},) or (batch, {size}).")
        if not frames.isfinite().all():
            raise ValueError("observation holds a number that is not finite.")
        action = self.step(frames.reshape(-1, 1, size)).view(*frames.shape[:-1], self.config.action_size)
        if is_array:
            return as_array(action, observation.dtype)
        # What needed no conversion is of the policy's own dtype and device, as the action is.
        if frames is observation or not torch.is_tensor(observation):
            return action
        return action.to(observation.device, observation.dtype if observation.is_floating_point() else action.dtype)

    def step(self, frames: torch.Tensor) -> torch.Tensor:
        """Actions (batch, action_size) for frames (batch, 1, observation_size), on the kept states."""
        states = LayerStates(self.policy_states or [None] * len(self.model.layers))
        if self.policy_states is not None and states.rows != len(frames):
            raise ValueError(
                f"observation is of {len(frames)} environments; this episode has {states.rows}. Call reset() to start "
                "another."
            )
        hidden_states = self.model.run_blocks(self.model.embed_observations(frames), None, None, states)
        self.policy_states = states
        return self.action_head(hidden_states[:, 0])[..., : self.config.action_size]


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
