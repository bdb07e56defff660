"""The shell game with a hand: its speed is limited, and it hides what it covers and nothing else."""

import numpy as np
import pytest

from mamba3_nplr.datasets_scripts.shell_game import ShellGame
from mamba3_nplr.datasets_scripts.shell_game_episodes import SLOTS, observe
from mamba3_nplr.datasets_scripts.shell_game_table import Table, TableWithHand
from mamba3_nplr.datasets_scripts.shell_hand import COVER, REST, SPEED, hand_path, hide_cups, move_hand, reached_slot
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.evaluation import join


@pytest.fixture
def random():
    return np.random.default_rng(0)


def wander(random, rows, frames, largest=1.5):
    """Actions that change their mind every few frames."""
    targets = random.uniform(-largest, largest, size=(rows, -(-frames // 5), 2)).astype(np.float32)
    return np.repeat(targets, 5, axis=1)[:, :frames]


def test_the_speed_of_the_hand_is_limited(random):
    path = hand_path(wander(random, 50, 200))
    ways = np.linalg.norm(np.diff(path, axis=1), axis=-1)
    assert ways.max() <= SPEED + 1e-6 and (ways > 0.99 * SPEED).mean() > 0.5
    assert (path[:, 0] == REST).all() and np.abs(path).max() <= 1  # it does not leave the table


def test_the_hand_goes_straight_to_where_it_should_and_stays():
    targets = np.array([[x, y] for x in (-1.0, -0.3, 0.7) for y in (-1.0, 0.0, 0.9)], dtype=np.float32)
    path = hand_path(np.repeat(targets[:, None], 15, axis=1))
    way, whole = path - REST, targets - REST
    assert np.abs(way[..., 0] * whole[:, None, 1] - way[..., 1] * whole[:, None, 0]).max() < 1e-6
    needed = np.ceil(np.linalg.norm(whole, axis=-1) / SPEED - 1e-4).astype(int)
    for row, frames in enumerate(needed):
        assert (path[row, frames:] == targets[row]).all(), row
        assert frames == 0 or (path[row, frames - 1] != targets[row]).any()
    assert needed.max() > 8 and np.linalg.norm([1, 1]) / SPEED < 12  # every cup can be reached after the cue


def test_a_cup_is_hidden_exactly_where_the_hand_covers_it(random):
    rows = make_task("shell").rows("validation", 0, 40)["observations"].reshape(-1, 16)
    hand = random.uniform(-1, 1, size=(len(rows), 2)).astype(np.float32)
    seen = hide_cups(rows, hand)
    assert np.array_equal(seen[:, [*range(10, 15), 17]], rows[:, 10:]) and np.array_equal(seen[:, 15:17], hand)
    for before, after, place in zip(rows[:2000], seen[:2000], hand[:2000], strict=True):
        cups = {(float(x), float(y)) for x, y in zip(before[:5], before[5:10], strict=True)}
        shown = [(float(x), float(y)) for x, y in zip(after[:5], after[5:10], strict=True)]
        covered = {cup for cup in cups if np.hypot(*(np.array(cup) - place)) < COVER}
        assert set(shown) == (cups - covered) | ({tuple(place.tolist())} if covered else set())
        assert shown == sorted(shown)
    covering = (np.linalg.norm(np.stack([rows[:, :5], rows[:, 5:10]], -1) - hand[:, None], axis=-1) < COVER).sum(1)
    assert np.bincount(covering)[:4].min() > 100  # none, and one, two and three cups


def test_a_hand_out_of_the_way_sees_everything():
    game, hand = make_task("shell"), make_task("shell_hand")
    for split in ("validation", "test_extended"):
        expected, found = game.rows(split, 0, 50), hand.rows(split, 0, 50)
        before_it_moves = slice(0, -11)
        observations = found["observations"][:, before_it_moves]
        assert np.array_equal(np.delete(observations, [15, 16], -1), expected["observations"][:, before_it_moves])
        assert (observations[..., 15:17] == REST).all()
        assert np.array_equal(found["ball_slot"], expected["ball_slot"])
        assert np.array_equal(found["labels"][:, -12:], expected["labels"][:, -12:])
        assert (found["labels"][:, :-12] == REST).all()


def episode_with(pairs, start):
    """What is seen of an episode with these swaps, and where the ball ends."""
    count = len(pairs)
    pair = np.array([pairs])
    ends = 5 + 12 * np.arange(1, count + 1)[None]
    motions, cue = np.full((1, count), 8), ends[:, -1] + 4
    swapping = np.ones_like(pair, dtype=bool)
    slots = np.array([start])
    return observe(slots, pair, np.zeros_like(pair), swapping, ends, motions, cue, cue + 12)[0]


def test_a_hand_over_the_ball_sees_nothing_of_its_swaps():
    """Whether it went left or right, and whether it came back: the same is seen."""
    over_it = np.array([0.0, 0.0], dtype=np.float32)
    left, right = ([hide_cups(frame, over_it) for frame in episode_with([pair], 2)] for pair in (1, 2))
    assert np.array_equal(left, right)
    out_of_the_way = [hide_cups(frame, REST) for frame in episode_with([1], 2)]
    assert not np.array_equal([hide_cups(frame, REST) for frame in episode_with([2], 2)], out_of_the_way)


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("demonstrator", ["reach", "track"])
def test_the_demonstrators_hand_ends_at_the_ball(demonstrator, jitter):
    task = make_task("shell_hand", demonstrator=demonstrator, jitter=jitter, guided=False, test_size=100)
    for split in ("validation", *task.test_sizes):
        rows = task.rows(split, 0, 100)
        assert task.metrics(rows["labels"], rows)["success"] == 1
        inside = np.arange(rows["observations"].shape[1]) < rows["num_frames"][:, None]
        assert not rows["observations"][~inside].any() and not rows["labels"][~inside].any()
        path = hand_path(rows["labels"])[:, :-1]
        assert np.array_equal(rows["observations"][..., 15:17][inside], path[inside])


@pytest.mark.parametrize("jitter", [False, True])
def test_a_recorded_hand_does_not_tell_where_the_ball_is(jitter):
    task = make_task("shell_hand", windows=1, max_swaps=1, jitter=jitter, batch_size=2000)
    rows = task.arrays(0, 0)
    ends = rows["observations"][np.arange(2000), rows["num_frames"] - 1, 15:17]
    led_to = reached_slot(ends)
    table = np.zeros((5, 5))
    np.add.at(table, (led_to, rows["ball_slot"]), 1)
    # Of 25 cells of 80 each, as chance has it: chi-square with 24 degrees of freedom.
    assert task.metrics(rows["labels"], rows)["success"] == 1 and ((table - 80) ** 2 / 80).sum() < 65
    honest = make_task("shell_hand", windows=1, max_swaps=1, jitter=jitter, batch_size=2000, guided=False).arrays(0, 0)
    ends = honest["observations"][np.arange(2000), honest["num_frames"] - 1, 15:17]
    assert np.array_equal(reached_slot(ends), rows["ball_slot"]) and np.array_equal(honest["labels"], rows["labels"])


def test_recorded_hands_do_not_depend_on_how_rows_are_read():
    task = make_task("shell_hand", jitter=True)
    whole = task.rows("train", 0, 9)
    parts = [task.rows("train", 0, 4), task.rows("train", 4, 9)]
    for name, column in whole.items():
        assert np.array_equal(join([part[name] for part in parts]), column), name
    shares = [make_task("shell_hand", batch_size=6).arrays(1, 2, rank, 3)["observations"] for rank in range(3)]
    assert np.array_equal(np.concatenate(shares), make_task("shell_hand", batch_size=6).arrays(1, 2)["observations"])


def test_only_where_the_hand_ends_counts(random):
    ends = np.array([[0.5, 0.0], [0.74, 0.0], [0.76, 0.0], [0.5, 0.24], [0.5, 0.26], [0.0, -1.0], [-1.0, -0.1]])
    assert reached_slot(ends).tolist() == [3, 3, 4, 3, -1, -1, 0]
    task = make_task("shell_hand", windows=2, max_swaps=2)
    rows = task.rows("validation", 0, 60)
    actions = wander(random, 60, rows["labels"].shape[1])
    late = actions.copy()
    late[:, -12:] = rows["labels"][:, -12:]
    # In 12 frames the hand gets to any cup from wherever it has been.
    assert task.metrics(late, rows)["success"] == 1
    too_late = actions.copy()
    too_late[:, -12:] = REST
    too_late[:, -2:] = rows["labels"][:, -2:]
    assert task.metrics(too_late, rows)["success"] == 0


def test_metrics_are_those_of_the_table(random):
    """What the hand would do by given actions, whatever it sees on the way, offline and played."""
    task = make_task("shell_hand", windows=3, max_swaps=3, jitter=True)
    rows = task.rows("train", 4, 44)
    actions = wander(random, 40, rows["labels"].shape[1], largest=1.0)
    actions[20:, -40:] = rows["ball_slot"][20:, None, None] * [0.5, 0.0] - [1.0, 0.0]
    table = TableWithHand(task, "train", 40)
    table.start(np.arange(40), 4, 40)
    success = np.zeros(40)
    for frame in range(actions.shape[1]):
        running = ~table.ended
        success += table.act(actions[:, frame], running).success
    found = task.metrics(actions, rows)
    assert found["success"] == success.mean() and 0 < found["success"] < 1
    assert found == task.outcome(success, rows)


def test_it_is_the_game_with_the_same_random_numbers():
    assert make_task("shell_hand").key == ShellGame().key
    hand, game = (make_task(name, batch_size=8).arrays(3, 5) for name in ("shell_hand", "shell"))
    assert all(np.array_equal(hand[name], game[name]) for name in ("swaps", "num_swaps", "ball_slot", "num_frames"))
    batch = make_task("shell_hand", batch_size=8).batch(3, 5)
    assert (
        batch["observations"].shape == (8, 213, 18) and make_task("shell_hand").model_fields["observation_size"] == 18
    )


def test_the_smallest_motion_arrives():
    hand = np.array([[0.1, 0.2]], dtype=np.float32)
    for target in ([0.1 + 1e-7, 0.2], [0.3, 0.2], [-0.1, 0.2]):
        assert np.array_equal(move_hand(hand, np.array([target])), np.array([target], dtype=np.float32))
    assert np.abs(SLOTS).max() == 1


def test_the_frames_after_the_cue_weigh_more():
    """The loss finds the cue in the last number of an observation."""
    task = make_task("shell_hand", batch_size=3)
    observations = task.batch(0, 0)["observations"]
    assert (observations[:, -12:, -1] > 0.5).all() and not (observations[:, :-12, -1] > 0.5).any()
    assert task.model_fields["cue_weight"] == 20


@pytest.mark.parametrize("kind", [Table, TableWithHand])
def test_episodes_that_are_not_named_stay_as_they_are(kind, random):
    task = make_task("shell_hand", windows=1, max_swaps=1)
    table = kind(task, "train", 6)
    table.start(np.arange(6), 0, 6)
    named = np.arange(6) < 3
    for _ in range(30):
        before = table.observe(), table.frame.copy()
        ending = table.act(random.uniform(-1, 1, size=(6, 2)), named)
        assert np.array_equal(table.observe()[~named], before[0][~named]) and not ending.ended[~named].any()
        assert np.array_equal(table.frame - before[1], named)
