"""Games on the page: the task's own episodes, policies that play as the models do, and visitors who do not mix."""

import numpy as np
import pytest

import shell_games
from browser import in_sentences
from helpers.made_players import called_directly, save_player
from mamba3_nplr.datasets_scripts.shell_game_episodes import (
    CUPS,
    RESPONSE_FRAMES,
    SLOTS,
    X,
    Y,
    chosen_slot,
    swapping_cups,
)
from shell_games import TIMINGS, ShellGames, draw_episode, policies_of_timing
from trained_models import TrainedModels

SETTINGS = [(timing, swaps) for timing in TIMINGS for swaps in (0, 1, 16, 40)]


def cups_of(moves, frame):
    """Where the browser draws the cups, sorted as an observation has them."""
    cups = [(float(x), 0.0) for x in SLOTS]
    for move in moves:
        step = frame - move.start + 1
        if 0 < step < move.frames:
            left_x, right_x, left_y, right_y = swapping_cups(step / move.frames, move.lifted)
            origin = float(SLOTS[move.left])
            cups[move.left : move.left + 2] = [(origin + left_x, left_y), (origin + right_x, right_y)]
    return np.array(cups)


@pytest.mark.parametrize(("timing", "swaps"), SETTINGS)
def test_moves_are_all_that_is_seen_of_the_cups(timing, swaps):
    episode = draw_episode(timing, swaps, seed=7)
    moves = episode.moves()
    assert len(moves) == swaps and moves == sorted(moves)
    for frame, observation in enumerate(episode.observations):
        drawn = cups_of(moves, frame)
        assert np.allclose(observation[X:Y], drawn[:, 0], atol=1e-5), frame
        assert np.allclose(observation[Y : Y + CUPS], drawn[:, 1], atol=1e-5), frame


@pytest.mark.parametrize(("timing", "swaps"), SETTINGS)
def test_the_ball_goes_where_the_moves_take_it(timing, swaps):
    episode = draw_episode(timing, swaps, seed=8)
    slot = episode.revealed_slot
    for move in episode.moves():
        slot = {move.left: move.left + 1, move.left + 1: move.left}.get(slot, slot)
    assert slot == episode.ball_slot
    assert len(episode.observations) == episode.cue + RESPONSE_FRAMES


@pytest.mark.parametrize("timing", TIMINGS)
def test_policies_play_as_the_models_do_when_called_directly(timing, models):
    games = ShellGames(models)
    started = games.start(timing, 5, seed=11)
    ended = games.answer(started["game"], 1)
    episode = draw_episode(timing, 5, seed=11)
    policies = policies_of_timing(models, timing)
    assert started["frames"] == episode.cue
    assert [player["name"] for player in started["players"]] == list(policies)
    for before, after in zip(started["players"], ended["players"], strict=True):
        actions = called_directly(policies[before["name"]], episode.observations)
        assert np.allclose(before["path"] + after["path"], actions[:, 0], atol=2e-3)
        chosen = chosen_slot(actions[None], np.array([len(actions)]))[0]
        assert after["chosen"] == chosen and after["right"] == (chosen == episode.ball_slot)
    assert ended["ball"] == episode.ball_slot and ended["right"] == (episode.ball_slot == 0)


def test_games_side_by_side_do_not_mix(models):
    games = ShellGames(models)
    alone = {}
    for seed in (1, 2, 3):
        started = games.start("fixed", 6, seed=seed)
        alone[seed] = started["players"], games.answer(started["game"], 2)
    waiting = {seed: games.start("fixed", 6, seed=seed) for seed in alone}
    for seed in (2, 3, 1):
        assert (waiting[seed]["players"], games.answer(waiting[seed]["game"], 2)) == alone[seed]
    assert all(model.policy_states is None for model in models.of_task("shell").values())


def test_the_ball_is_not_told_before_the_answer(models):
    games = ShellGames(models)
    started = games.start("fixed", 3)
    assert set(started) == {"game", "frames", "reveal", "moves", "players", "chance"}
    assert all(len(player["path"]) == started["frames"] for player in started["players"])


def test_a_game_is_answered_once_and_fresh_ones_differ(models):
    games = ShellGames(models)
    first, second = games.start("fixed", 8), games.start("fixed", 8)
    assert first["game"] != second["game"] and first["moves"] != second["moves"]
    assert games.answer(first["game"], 5)["seed"] != games.answer(second["game"], 5)["seed"]
    with pytest.raises(ValueError, match="This game is over"):
        games.answer(first["game"], 5)


def test_the_oldest_games_are_forgotten(models, monkeypatch):
    monkeypatch.setattr(shell_games, "KEPT_GAMES", 2)
    games = ShellGames(models)
    first, second, third = (games.start("fixed", 0)["game"] for _ in range(3))
    assert "error" in in_sentences(games.answer)({"game": first, "cup": 1})
    assert games.answer(second, 1) and games.answer(third, 1)


def test_jittered_games_are_played_by_those_trained_so_if_they_are_there(tmp_path):
    folders = {
        (task, name): save_player(tmp_path, task, name)
        for task, name in (("shell", "nplr"), ("shell", "mamba3"), ("shell_jitter", "nplr"))
    }
    models = TrainedModels(tmp_path)
    playing = policies_of_timing(models, "jittered")
    expected = {"nplr": folders["shell_jitter", "nplr"], "mamba3": folders["shell", "mamba3"]}
    assert list(playing) == list(expected)
    assert all(playing[name] is models.loaded[folder] for name, folder in expected.items())
    assert list(policies_of_timing(TrainedModels(tmp_path / "none"), "fixed")) == []


BAD = [
    ({"timing": "odd", "swaps": 3}, "timing is 'odd'; it must be one of fixed, jittered."),
    ({"timing": "fixed", "swaps": 257}, "swaps is 257; it must be a whole number from 0 to 256."),
    ({"timing": "fixed", "swaps": -1}, "swaps is -1;"),
    ({"timing": "fixed", "swaps": 2.5}, "swaps is 2.5;"),
    ({"timing": "fixed", "swaps": float("nan")}, "swaps is nan;"),
    ({"timing": "fixed", "swaps": None}, "swaps is None;"),
    ({"timing": ["fixed"], "swaps": 1}, "timing is ['fixed'];"),
    ({"timing": "fixed", "swaps": 1, "seed": -4}, "seed is -4;"),
    ([], "A request is []; it must be a dict of named arguments."),
]


@pytest.mark.parametrize(("request_", "sentence"), BAD)
def test_bad_requests_get_a_sentence(request_, sentence, models):
    assert in_sentences(ShellGames(models).start)(request_)["error"].startswith(sentence)


@pytest.mark.parametrize("cup", [0, 6, "1", True, None])
def test_a_cup_that_is_not_there_is_refused_and_the_game_goes_on(cup, models):
    games = ShellGames(models)
    game = games.start("fixed", 2)["game"]
    assert in_sentences(games.answer)({"game": game, "cup": cup})["error"].startswith(f"cup is {cup!r}")
    assert "ball" in games.answer(game, 3)
