"""What every mixer checks of its arguments, whatever runs it afterwards."""

import torch

from ..scan.sequences import check_sequences


def check_mixer_inputs(mixer, hidden_states, state, mask, cu_seqlens, index=None) -> torch.Tensor | None:
    """
    Raises an error that names the argument which does not fit the mixer or the other arguments; `state` is checked
    against `mixer.state_shapes`. With an index (see `Letters`) hidden_states are those of letters. Returns the mask as
    booleans.
    """
    size, tokens = mixer.config.hidden_size, "batch, length" if index is None else "letters"
    wrong_shape = hidden_states.dim() != 2 + (index is None) or hidden_states.shape[-1] != size
    if wrong_shape or not hidden_states.is_floating_point():
        raise ValueError(
            f"hidden_states have shape {tuple(hidden_states.shape)} and dtype {hidden_states.dtype}; they must be "
            f"({tokens}, hidden_size={size}) of a floating dtype."
        )
    batch, length = (hidden_states if index is None else index).shape[:2]
    mask = check_sequences(mask, cu_seqlens, batch, length)
    if state is not None:
        rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
        check_state(state, mixer.state_shapes(rows), hidden_states.device)
    return mask


def check_state(state: tuple, shapes: tuple, device: torch.device) -> None:
    """Raises an error that names the part of a state which has not the shape given for it in `shapes`."""
    if not isinstance(state, tuple) or len(state) != len(shapes):
        raise ValueError(f"state is {describe(state)}; it must be a {type(shapes).__name__}{shapes._fields}.")
    for name, part, shape in zip(shapes._fields, state, shapes, strict=True):
        usable = torch.is_tensor(part) and part.is_floating_point() and part.layout == torch.strided
        if not usable or part.device != device:
            raise ValueError(f"state.{name} is {describe(part)}; it must be a dense floating tensor on {device}.")
        if tuple(part.shape) != tuple(shape):
            raise ValueError(
                f"state.{name} has shape {tuple(part.shape)}; this mixer and batch need {tuple(shape)}. It comes from "
                "another configuration or batch."
            )


def describe(x) -> str:
    if torch.is_tensor(x):
        return f"a {x.layout} tensor of {x.dtype} on {x.device}"
    return f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple) else "")
