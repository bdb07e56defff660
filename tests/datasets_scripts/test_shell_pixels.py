"""The shell game from pixels: the frames of the same episodes, drawn for the model only."""

import numpy as np
import pytest
import torch

from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning
from mamba3_nplr.datasets_scripts.shell_game_pictures import draw_pixels
from mamba3_nplr.datasets_scripts.tasks import TASKS, make_task


@pytest.mark.parametrize("settings", [{}, {"jitter": True}, {"jitter": True, "packed": True}])
def test_a_model_sees_the_frames_of_the_game(settings):
    game, pixels = (make_task(name, batch_size=3, **settings) for name in ("shell", "shell_pixels"))
    expected, found = game.batch(1, 2), pixels.batch(1, 2)
    assert expected.keys() == found.keys()
    for name in expected.keys() - {"observations"}:
        assert torch.equal(expected[name], found[name])
    frames = expected["observations"]
    assert found["observations"].dtype == torch.uint8 and found["observations"].shape == (
        *frames.shape[:2],
        3 * 32 * 64,
    )
    for row, frame in ((0, 0), (0, 50), (len(frames) - 1, frames.shape[1] - 1)):
        drawn = draw_pixels(frames[row, frame][None].numpy())[0]
        assert np.array_equal(found["observations"][row, frame].view(3, 32, 64).numpy(), drawn)


def test_all_else_is_the_game():
    game, pixels = make_task("shell"), make_task("shell_pixels")
    for name, column in game.rows("test_standard", 0, 4).items():
        assert np.array_equal(column, pixels.rows("test_standard", 0, 4)[name])
    assert pixels.features() == game.features() and pixels.test_sizes == game.test_sizes


def test_the_cue_weighs_as_with_numbers():
    task = make_task("shell_pixels", batch_size=2)
    observations = task.batch(0, 0)["observations"]
    assert (observations[:, -12:, -1] > 0.5).all() and not (observations[:, :-12, -1] > 0.5).any()
    policy = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(**task.model_fields))
    assert policy.config.cue_weight == TASKS["shell"].model_fields["cue_weight"] == 20
    assert policy(**task.batch(0, 0)).loss.isfinite()


@torch.no_grad()
def test_a_new_model_tells_frames_apart():
    """What they differ in is far above the number that the first norm adds to a variance."""
    torch.manual_seed(0)
    task = make_task("shell_pixels", batch_size=4)
    policy = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(**task.model_fields))
    hidden_states = policy.model.embed_observations(task.batch(0, 0)["observations"]).flatten(0, 1)
    differences = hidden_states - hidden_states.mean(0)
    assert differences.var() > 10 * policy.config.norm_eps
