"""States of mixers in a cache of transformers: read as they were written, whatever parts they have."""

from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache

from helpers.model_cases import small_config
from mamba3_nplr.modeling.recurrent_cache import check_cache, read_state, write_state


class OnePart(NamedTuple):
    h: torch.Tensor


class ThreeParts(NamedTuple):
    h: torch.Tensor
    last: torch.Tensor
    nothing: torch.Tensor  # as an option of a model may leave it


STATES = [OnePart((2, 5)), OnePart((2, 3, 4)), ThreeParts((2, 3, 4), (2, 6), (2, 0, 7))]


@pytest.mark.parametrize("shapes", STATES, ids=str)
def test_a_state_is_read_as_it_was_written(shapes):
    cache, layers = DynamicCache(config=small_config()), range(2)
    states = [type(shapes)(*(torch.randn(shape) for shape in shapes)) for _ in layers]
    assert all(read_state(cache, layer, lambda: shapes) is None for layer in layers)
    for _ in range(2):
        for layer in layers:
            write_state(cache, layer, states[layer])
        check_cache(cache, len(layers), shapes)
        for layer in layers:
            found = read_state(cache, layer, lambda: shapes)
            assert type(found) is type(shapes)
            assert all(torch.equal(a, b) for a, b in zip(found, states[layer], strict=True))
