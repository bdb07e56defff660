"""The states of recurrent mixers, kept in a transformers `Cache`."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

State = TypeVar("State", bound=tuple)


class LayerStates(list):
    """
    The state of each layer as it is, None before the first token: in a control loop to pack and unpack them into a
    transformers cache would take longer than to compute them.
    """

    @property
    def rows(self) -> int:
        return len(self[0][0])

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its name: the number of the layer and the field of the state."""
        for layer, state in enumerate(self):
            for field, part in state._asdict().items():
                yield f"{layer}.{field}", part

    def map(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> "LayerStates":
        """States whose tensors are what the function makes of these and their names."""
        made = iter([function(name, part) for name, part in self.parts()])
        return LayerStates(type(state)(*(next(made) for _ in state)) for state in self)

    def with_rows(self, rows: torch.Tensor, others: "LayerStates") -> "LayerStates":
        """A copy whose rows (chosen,) are those of `others`, in that order."""
        new = dict(others.parts())
        return self.map(lambda name, part: part.index_copy(0, rows, new[name].to(part.dtype)))


def read_state(cache: Cache | LayerStates | None, layer_idx: int, state_shapes: Callable[[], State]) -> State | None:
    """
    The state of a layer as a NamedTuple like that of `state_shapes`, which tells the shape of each part; None if the
    layer has seen no token.
    """
    if isinstance(cache, LayerStates):
        return cache[layer_idx]
    if cache is None or not cache.has_previous_state(layer_idx):
        return None
    h, rest = cache.get_recurrent_state(layer_idx), cache.get_conv_state(layer_idx)
    if torch.is_grad_enabled():
        # The cache is overwritten in place; the backward pass needs the values that were read.
        h, rest = h.clone(), rest.clone()
    shapes = state_shapes()
    sizes = [torch.Size(shape[1:]).numel() for shape in shapes[1:]]
    parts = rest.squeeze(-1).split(sizes, dim=1)
    return type(shapes)(h, *(part.view(shape) for part, shape in zip(parts, shapes[1:], strict=True)))


def write_state(cache: Cache | LayerStates | None, layer_idx: int, state: State) -> None:
    """Keeps a state: its first part as the recurrent state, the others together as a convolution state of width 1."""
    if cache is None:
        return
    if isinstance(cache, LayerStates):
        cache[layer_idx] = state
        return
    others = [part.flatten(1) for part in state[1:]]
    rest = torch.cat(others, dim=1) if others else state[0].new_empty(len(state[0]), 0)
    # A cache layer holds a state only once its convolution state has been written.
    cache.update_conv_state(rest[..., None], layer_idx)
    cache.update_recurrent_state(state[0], layer_idx)


def check_cache(cache: Cache, num_layers: int, shapes: tuple) -> None:
    """Raises an error if `cache` was not made for these layers, or holds states of other shapes than `shapes`."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; it must be a transformers Cache, such as the one a model "
            "returns with use_cache=True, or DynamicCache(config=model.config)."
        )
    recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    if len(recurrent) != num_layers or not all(recurrent):
        raise ValueError(
            f"past_key_values has {sum(recurrent)} recurrent layers of {len(recurrent)}; this model needs "
            f"{num_layers}. Make it with DynamicCache(config=model.config)."
        )
    expected = (tuple(shapes[0]), (shapes[0][0], sum(torch.Size(shape[1:]).numel() for shape in shapes[1:]), 1))
    for layer_idx in range(num_layers):
        if not cache.has_previous_state(layer_idx):
            continue
        kept = cache.get_recurrent_state(layer_idx), cache.get_conv_state(layer_idx)
        found = tuple(tuple(x.shape) for x in kept)
        if found != expected:
            raise ValueError(
                f"past_key_values holds states of shapes {found} in layer {layer_idx}; this model and batch need "
                f"{expected}. It comes from another configuration or batch."
            )
