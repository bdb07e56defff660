"""The shell game: what an observer sees determines the answer, by the rules of the paper and by no other clue."""

import numpy as np
import pytest
import torch

from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning
from mamba3_nplr.datasets_scripts.shell_game import ShellGame, no_tracking_prior
from mamba3_nplr.datasets_scripts.shell_game_episodes import SLOTS, swapping_cups
from mamba3_nplr.datasets_scripts.tasks import make_task


def track(observations, frames):
    """Follows the ball through the observations of one episode."""
    slot = int(observations[0, 10:15].argmax())
    t = 0
    while t < frames:
        heights = observations[t, 5:10]
        if not heights.any():
            t += 1
            continue
        # A motion: the two cups away from rest, until all heights are 0 again.
        left = int(np.nonzero(~np.isclose(observations[t, :5], SLOTS, atol=1e-6))[0].min())
        slot = {left: left + 1, left + 1: left}.get(slot, slot)
        while observations[t, 5:10].any():
            t += 1
    return slot


SETS = [("shell", "test_standard"), ("shell", "test_extended"), ("shell_jitter", "train"), ("shell_jitter", "test_48")]


@pytest.mark.parametrize(("name", "split"), SETS)
def test_observations_determine_the_ball(name, split):
    rows = make_task(name).rows(split, 0, 100)
    for i in range(100):
        assert track(rows["observations"][i], rows["num_frames"][i]) == rows["ball_slot"][i]
    assert (rows["num_swaps"] == (rows["swaps"] >= 0).sum(1)).all()


def test_frames_of_fixed_timing():
    rows = make_task("shell").rows("validation", 0, 50)
    observations = rows["observations"]
    assert observations.shape == (50, 213, 16)
    assert make_task("shell").rows("test_extended", 0, 2)["observations"].shape == (2, 405, 16)
    assert (observations[:, :5, 10:15].sum(-1) == 1).all() and not observations[:, 5:, 10:15].any()
    assert (observations[:, -12:, 15] == 1).all() and not observations[:, :-12, 15].any()
    moving = observations[..., 5:10].any(-1)
    for row in range(50):
        for window in range(16):
            start = 5 + 12 * window
            assert not moving[row, start : start + 4].any()
            # The eighth frame of a motion shows the cups at rest again.
            assert moving[row, start + 4 : start + 11].all() == (rows["swaps"][row, window] >= 0)
            assert not moving[row, start + 11]


def test_cups_are_sorted_and_at_rest_in_their_slots():
    observations = make_task("shell").rows("validation", 0, 50)["observations"]
    x, y = observations[..., :5], observations[..., 5:10]
    assert (np.diff(x, axis=-1) >= 0).all()
    assert ((y >= 0) & (y <= 0.5)).all() and ((y > 0).sum(-1) <= 1).all()
    assert (x[~y.any(-1)] == SLOTS).all()


def test_where_the_cups_meet_nothing_tells_them_apart():
    assert swapping_cups(0.5, 0) == swapping_cups(0.5, 1)
    assert swapping_cups(0.25, 0) != swapping_cups(0.25, 1)
    # Lifting the other cup mirrors the picture.
    left_x, right_x, left_y, right_y = swapping_cups(0.25, 0)
    assert (left_x, right_x, right_y, left_y) == swapping_cups(0.25, 1)


def test_the_path():
    for j in range(9):
        left_x, right_x, left_y, right_y = swapping_cups(j / 8, 0)
        assert left_x + right_x == pytest.approx(0.5)
        assert right_x - left_x == pytest.approx(0.5 * abs(np.cos(np.pi * j / 8)), abs=1e-5)
        assert left_y + right_y == pytest.approx(0.5 * np.sin(np.pi * j / 8), abs=1e-5)


def test_the_demonstrators():
    track_rows, reach_rows = (make_task("shell", demonstrator=d).rows("validation", 0, 30) for d in ("track", "reach"))
    assert (track_rows["observations"] == reach_rows["observations"]).all()
    assert (track_rows["labels"][:, -12:] == reach_rows["labels"][:, -12:]).all()
    assert not reach_rows["labels"][:, :-12].any()
    assert not track_rows["labels"][..., 1].any()
    start = track_rows["observations"][:, 0, 10:15].argmax(-1)
    for row in range(30):
        slot, reached = start[row], track_rows["labels"][row, :, 0]
        assert (reached[: 5 + 11] == SLOTS[slot]).all()
        for window, pair in enumerate(track_rows["swaps"][row]):
            complete = 5 + 12 * window + 11
            assert reached[complete - 1] == SLOTS[slot]
            slot = {pair: pair + 1, pair + 1: pair}.get(slot, slot) if pair >= 0 else slot
            assert reached[complete] == SLOTS[slot]


def test_swaps_are_drawn_as_the_paper_says():
    rows = make_task("shell", batch_size=8192).arrays(0, 0)
    counts = np.bincount(rows["num_swaps"], minlength=17)
    assert len(counts) == 17 and (abs(counts - 8192 / 17) < 5 * np.sqrt(8192 / 17)).all()
    pairs = np.bincount(rows["swaps"][rows["swaps"] >= 0], minlength=4)
    assert (abs(pairs / pairs.sum() - 0.25) < 0.01).all()
    chosen = (rows["swaps"] >= 0).mean(0)
    assert (abs(chosen - 0.5) < 0.03).all()
    slots = np.bincount(rows["observations"][:, 0, 10:15].argmax(-1)) / 8192
    assert (abs(slots - 0.2) < 0.03).all()


def test_timing_jitter():
    task = make_task("shell_jitter", batch_size=4096)
    rows = task.arrays(0, 0)
    # Five reveal and twelve response frames, 16 motions of 10 and 17 waits of 0.8 x 4 + 0.2 x 40 on average.
    assert abs(rows["num_frames"].mean() - (5 + 12 + 16 * 10 + 17 * 11.2)) < 3
    assert rows["num_frames"].min() >= 5 + 12 + 16 * 4
    for row in range(20):
        end = rows["num_frames"][row]
        observations = rows["observations"][row]
        assert not observations[end:].any() and (observations[end - 12 : end, 15] == 1).all()
        assert not observations[: end - 12, 15].any()
    for windows in (16, 32, 48, 64, 96, 128):
        test = make_task("shell_jitter").rows(f"test_{windows}", 0, 3)
        assert (test["num_swaps"] == windows).all() and test["swaps"].shape == (3, windows)


@pytest.mark.parametrize("windows", [0, 1, 8, 16])
@pytest.mark.parametrize(("name", "times"), [("shell", [1, 2]), ("shell_jitter", [1, 2, 3, 4, 6, 8])])
def test_episodes_are_tested_at_the_windows_of_training_and_beyond(name, times, windows):
    task = make_task(name, windows=windows, max_swaps=windows, test_size=3)
    assert list(task.test_sizes.values()) == ([windows * x for x in times] if windows else [0])
    assert task.settings["test_windows"] == tuple(task.test_sizes.values())
    for split, size in task.test_sizes.items():
        assert task.rows(split, 0, 3)["swaps"].shape == (3, size)
    chosen = make_task(name, windows=windows, max_swaps=windows, test_windows=(5, 3))
    assert list(chosen.test_sizes.values()) == [5, 3] and chosen.settings["test_windows"] == (5, 3)


def test_the_tests_of_the_paper():
    assert make_task("shell").test_sizes == {"test_standard": 16, "test_extended": 32}
    assert make_task("shell_jitter").test_sizes == {f"test_{x}": x for x in (16, 32, 48, 64, 96, 128)}


def test_the_swap_curriculum():
    task = make_task("shell_curriculum")
    largest = [task.largest_swaps(step) for step in range(0, 20_000, 100)]
    assert largest[0] == 1 and largest == sorted(largest) and set(largest[120:]) == {16}
    assert task.arrays(0, 0)["num_swaps"].max() == 1
    assert make_task("shell").largest_swaps(0) == 16


PRIORS = {0: 100.0, 4: 38.28, 8: 30.98, 12: 27.11, 16: 24.72, 20: 23.15, 24: 22.11, 28: 21.41, 32: 20.94}


@pytest.mark.parametrize(("swaps", "percent"), PRIORS.items())
def test_the_no_tracking_prior_is_the_papers(swaps, percent):
    assert round(100 * no_tracking_prior(swaps), 2) == percent


def test_success():
    task = make_task("shell_jitter")
    rows = task.rows("validation", 0, 200)
    assert task.metrics(rows["labels"], rows)["success"] == 1
    noisy = rows["labels"] + np.random.default_rng(0).normal(0, 0.2, rows["labels"].shape)
    assert task.metrics(noisy, rows)["success"] > 0.99
    wrong = task.metrics(-rows["labels"] + 0.5, rows)
    assert wrong["success"] < 0.3
    assert sum(v * (rows["num_swaps"] == k).sum() for k, v in wrong["success_by_swaps"].items()) == pytest.approx(
        wrong["success"] * 200
    )


def test_the_task_weighs_the_cue_as_the_paper_does():
    for name in ("shell", "shell_curriculum", "shell_jitter"):
        assert Mamba3NPLRConfig(**make_task(name).model_fields).cue_weight == 20


@torch.no_grad()
def test_packed_and_padded_batches_have_the_same_loss():
    torch.manual_seed(0)
    padded, packed = (make_task("shell_jitter", batch_size=4, packed=packed) for packed in (False, True))
    model = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(**padded.model_fields)).double()
    losses = []
    for task in (padded, packed):
        batch = task.batch(0, 0)
        batch["observations"] = batch["observations"].double()
        losses.append(model(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    batch = padded.batch(0, 0)
    assert packed.batch(0, 0)["observations"].shape[1] == batch["attention_mask"].sum()
    # Trainer counts the labels that are not -100.
    assert (batch["labels"] != -100).sum() == 2 * batch["attention_mask"].sum()


@pytest.mark.parametrize("name", ["shell", "shell_jitter"])
def test_a_state_has_to_hold_the_balls_slot_in_frames_that_look_alike(name):
    task = make_task(name, batch_size=16, demonstrator="track", packed=False)
    arrays = task.arrays(0, 0)
    found = task.states(arrays)
    known, observations = found["states"] != -100, arrays["observations"]
    for kind, cue in ((0, 0.0), (1, 1.0)):
        seen = observations[known & (found["kinds"] == kind)]
        assert len(seen) > 100 and (seen == [*SLOTS, *[0] * 10, cue]).all()
    # The one that points at the ball in every frame says the same.
    assert (SLOTS[found["states"][known]] == arrays["labels"][known][:, 0]).all()
    inside = np.arange(known.shape[1]) < arrays["num_frames"][:, None]
    assert not known[~inside].any() and not known[:, :5].any() and known[:, 5:].sum() > 0.3 * inside.sum()


def test_states_are_laid_out_as_the_inputs_are():
    padded, packed = (make_task("shell_jitter", batch_size=4, packed=packed) for packed in (False, True))
    wanted, found = padded.batch(0, 0, with_states=True), packed.batch(0, 0, with_states=True)
    inside = wanted["attention_mask"].bool()
    for name in ("kinds", "states"):
        assert torch.equal(found[name], wanted[name][inside][None])
    assert (wanted["states"][~inside] == -100).all()
    assert packed.batch(0, 0).keys() == found.keys() - {"kinds", "states"}
    assert make_task("shell_hand").states(make_task("shell_hand").arrays(0, 0)) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_swaps": 17}, "max_swaps=17 is not allowed: windows=16"),
        ({"windows": -1}, "windows=-1"),
        ({"demonstrator": "point"}, "demonstrator='point' is not allowed.*track, reach"),
        ({"start_swaps": 20}, "start_swaps=20 is not allowed"),
        ({"test_windows": (-2,)}, "test_windows=-2"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ShellGame(**settings)


def test_episodes_without_windows():
    rows = ShellGame(windows=0, max_swaps=0).arrays(0, 0)
    assert rows["observations"].shape == (32, 5 + 4 + 12, 16)
    assert rows["swaps"].shape == (32, 0)
