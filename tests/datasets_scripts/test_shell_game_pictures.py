"""Pictures of the shell game show cups, ball and cue, and nothing that tells cups apart."""

import numpy as np
import pytest

from mamba3_nplr.datasets_scripts.shell_game_episodes import SLOTS, swapping_cups
from mamba3_nplr.datasets_scripts.shell_game_pictures import (
    BALL_COLOR,
    CUP_COLOR,
    HAND_COLOR,
    LAMP_OFF,
    LAMP_ON,
    LEFT,
    LIP_COLOR,
    WIDTH,
    draw_frames,
)
from mamba3_nplr.datasets_scripts.shell_hand import REST, hide_cups
from mamba3_nplr.datasets_scripts.tasks import make_task

SIZES = [(32, 64), (240, 480)]
AT_REST = np.concatenate([SLOTS, np.zeros(11)]).astype(np.float32)


def near(frame, *colors):
    """Which pixels are nearer to one of these colours than a sixth of the whole range."""
    return np.any([np.abs(frame.astype(int) - color).max(-1) < 42 for color in colors], axis=0)


def with_swap(tau, lifted, pair=1):
    left_x, right_x, left_y, right_y = swapping_cups(tau, lifted)
    observation = AT_REST.copy()
    observation[[pair, pair + 1]] = SLOTS[pair] + np.array([left_x, right_x])
    observation[[5 + pair, 6 + pair]] = left_y, right_y
    return observation


@pytest.mark.parametrize("size", SIZES)
def test_cups_stand_where_the_numbers_say(size):
    observations = make_task("shell").rows("validation", 0, 3)["observations"][:, ::7].reshape(-1, 16)
    observations[:, 10:] = 0
    for observation, frame in zip(observations, draw_frames(observations, *size), strict=True):
        columns = near(frame, CUP_COLOR, LIP_COLOR).any(0)
        x = LEFT + WIDTH * (np.arange(size[1]) + 0.5) / size[1]
        distance = np.abs(x[:, None] - observation[:5]).min(1)
        assert columns[distance < 0.15].all() and not columns[distance > 0.25].any()


@pytest.mark.parametrize("size", SIZES)
def test_a_lifted_cup_is_higher(size):
    heights = []
    for tau in (0.0, 0.15, 0.3, 0.5):
        frame = draw_frames(with_swap(tau, 0)[None], *size)[0]
        heights.append(size[0] - np.nonzero(near(frame, CUP_COLOR).any(1))[0].min())
    assert heights == sorted(heights) and heights[-1] > heights[0] + size[0] / 4


@pytest.mark.parametrize("size", SIZES)
def test_the_ball_is_seen_while_it_is_revealed(size):
    for slot in range(5):
        observation = AT_REST.copy()
        observation[10 + slot] = 1
        ball = near(draw_frames(observation[None], *size)[0], BALL_COLOR)
        x = LEFT + WIDTH * (np.nonzero(ball)[1] + 0.5) / size[1]
        assert ball.sum() > 3 and np.abs(x - SLOTS[slot]).max() < 0.15
        shown = draw_frames(AT_REST[None], *size, ball_slot=np.array([slot]))[0]
        assert np.array_equal(shown, draw_frames(observation[None], *size)[0])
    assert not near(draw_frames(AT_REST[None], *size), BALL_COLOR).any()


@pytest.mark.parametrize("size", SIZES)
def test_the_cue_is_seen(size):
    on = AT_REST.copy()
    on[15] = 1
    for observation, color in ((AT_REST, LAMP_OFF), (on, LAMP_ON)):
        frame = draw_frames(observation[None], *size)[0]
        assert near(frame[-1], color).all()
        # By the order of channels, rows and columns, the last number is where the loss looks for the cue.
        assert (frame.transpose(2, 0, 1).ravel()[-1] > 0.5) == bool(observation[15])


@pytest.mark.parametrize("size", SIZES)
def test_cups_look_alike(size):
    """Where they meet it does not show which is lifted; after a swap nothing is left of it."""
    frames = draw_frames(np.stack([with_swap(0.5, 0), with_swap(0.5, 1)]), *size)
    assert np.array_equal(*frames)
    assert np.array_equal(draw_frames(with_swap(1.0, 0)[None], *size), draw_frames(AT_REST[None], *size))
    # The picture of a cup does not depend on its slot: the picture of all at rest is its own mirror image.
    at_rest = draw_frames(AT_REST[None], *size)[0]
    assert np.abs(at_rest.astype(int) - at_rest[:, ::-1]).max() <= 1


@pytest.mark.parametrize("size", SIZES)
def test_the_hand_covers_what_it_hides(size):
    over = hide_cups(AT_REST, np.array([0.0, 0.0], dtype=np.float32))
    frame = draw_frames(over[None], *size)[0]
    cups = near(frame, CUP_COLOR).any(0)
    x = LEFT + WIDTH * (np.arange(size[1]) + 0.5) / size[1]
    assert not cups[np.abs(x) < 0.75].any() and cups[np.abs(np.abs(x) - 1) < 0.1].all()
    assert near(frame, HAND_COLOR).sum() > size[0] * size[1] / 8
    at_rest = draw_frames(hide_cups(AT_REST, REST)[None], *size)[0]
    bare = draw_frames(AT_REST[None], *size)[0]
    assert np.array_equal(near(at_rest, CUP_COLOR, LIP_COLOR), near(bare, CUP_COLOR, LIP_COLOR))


def test_a_picture_does_not_depend_on_those_beside_it():
    observations = make_task("shell_hand").rows("validation", 0, 2)["observations"].reshape(-1, 18)
    together = draw_frames(observations, 32, 64)
    assert together.shape == (426, 32, 64, 3) and together.dtype == np.uint8
    for row in (0, 31, 32, 425):
        assert np.array_equal(together[row], draw_frames(observations[row : row + 1], 32, 64)[0])
    assert draw_frames(observations[:0], 32, 64).shape == (0, 32, 64, 3)


def test_small_pictures_are_the_large_ones_from_afar():
    observations = make_task("shell_hand").rows("validation", 0, 1)["observations"][0, ::9]
    small, large = (draw_frames(observations, *size).astype(float) for size in ((32, 64), (256, 512)))
    from_afar = large.reshape(len(large), 32, 8, 64, 8, 3).mean((2, 4))
    assert np.abs(from_afar - small).mean() < 3


@pytest.mark.parametrize("size", SIZES)
def test_cups_that_overlap_have_the_colour_of_one(size):
    both, one = AT_REST.copy(), AT_REST.copy()
    both[[1, 2, 6, 7]] = -0.05, 0.05, 0.0, 0.1
    one[[1, 2, 6, 7]] = -0.05, -0.05, 0.0, 0.0
    frames = draw_frames(np.stack([both, one]), *size)
    row, column = int((1.0 - 0.2) / 1.35 * size[0]), int((0.0 - LEFT) / WIDTH * size[1])
    assert near(frames[:, row, column], CUP_COLOR).all()
