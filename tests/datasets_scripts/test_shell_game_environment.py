"""The shell game as environments: the dataset's episodes, by gymnasium's own rules, one at a time or many as one."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pygame
import pytest
from gymnasium.utils.env_checker import check_env

from helpers.places import ROOT
from mamba3_nplr.datasets_scripts.tasks import make_task

GAME, HAND = "mamba3_nplr/ShellGame-v0", "mamba3_nplr/ShellHand-v0"
DATASETS = {
    "train": ({"windows": 3}, "shell", {"windows": 3, "max_swaps": 3}, "train"),
    "fewer swaps": ({"windows": 5, "max_swaps": 2}, "shell", {"windows": 5, "max_swaps": 2}, "train"),
    "validation": ({"split": "validation"}, "shell", {}, "validation"),
    "standard": ({"split": "test"}, "shell", {}, "test_standard"),
    "extended": ({"split": "test", "windows": 32}, "shell", {}, "test_extended"),
    "jitter": ({"jitter": True}, "shell_jitter", {}, "train"),
    "long jitter": ({"jitter": True, "windows": 48, "split": "test"}, "shell_jitter", {}, "test_48"),
    "no windows": ({"windows": 0}, "shell", {"windows": 0, "max_swaps": 0}, "train"),
}


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def episode(env, seed, choose=None):
    """All observations of an episode, its rewards and what the last step told; by default as the demonstrator acts."""
    observation, info = env.reset(seed=seed)
    observations, rewards, ended = [observation], [], False
    while not ended:
        action = info["demonstration"] if choose is None else choose(observation)
        observation, reward, ended, truncated, info = env.step(action)
        assert not truncated
        observations.append(observation)
        rewards.append(reward)
    return np.array(observations), rewards, info


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(("game", "dataset"), [(GAME, None), (HAND, "shell_hand")])
def test_a_seed_is_a_row_of_the_dataset(game, dataset, name):
    settings, task_name, task_settings, split = DATASETS[name]
    if dataset:
        task_settings = task_settings | {"jitter": task_name == "shell_jitter", "guided": False}
    task = make_task(dataset or task_name, **task_settings)
    env = gymnasium.make(game, **settings)
    for seed in (0, 7):
        rows = task.rows(split, seed, seed + 1)
        observations, rewards, info = episode(env, seed)
        assert np.array_equal(observations[:-1], rows["observations"][0, : rows["num_frames"][0]])
        assert np.array_equal(observations[-1], observations[-2])  # all stays as it is
        assert not any(rewards[:-1]) and rewards[-1] == 1
        assert info["success"] is True and info["chosen_slot"] == info["ball_slot"] == rows["ball_slot"][0]
        _, told = env.reset(seed=seed)
        assert told["episode"] == seed and told["num_swaps"] == rows["num_swaps"][0]
        assert np.array_equal(told["demonstration"], rows["labels"][0, 0])


def test_the_stream_goes_on_after_the_end_of_a_split():
    task = make_task("shell", test_size=5000)
    env = gymnasium.make(GAME, split="test")
    observations, _, _ = episode(env, 4500)
    assert np.array_equal(observations[:-1], task.rows("test_standard", 4500, 4501)["observations"][0])


@pytest.mark.parametrize("game", [GAME, HAND])
def test_an_episode_without_a_seed_is_another_that_the_last_seed_determines(game):
    env = gymnasium.make(game, windows=2)
    numbers = []
    for _ in range(2):
        env.reset(seed=5)
        numbers.append([env.reset()[1]["episode"] for _ in range(3)])
    assert numbers[0] == numbers[1] and len({5, *numbers[0]}) == 4
    env.reset(seed=6)
    assert env.reset()[1]["episode"] not in numbers[0]
    fresh = [gymnasium.make(game, windows=2).reset()[1]["episode"] for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_the_mean_of_the_response_chooses_the_slot():
    """The rule of the task, whatever was done before the cue; actions beyond the space count as they are."""
    task, env = make_task("shell", windows=1, max_swaps=1), gymnasium.make(GAME, windows=1)
    random = np.random.default_rng(0)
    for seed in range(20):
        rows = task.rows("train", seed, seed + 1)
        actions = random.normal(size=(rows["num_frames"][0], 2)).astype(np.float32)
        given = iter(actions)
        _, rewards, info = episode(env, seed, lambda _, given=given: next(given))
        assert rewards[-1] == info["success"] == task.metrics(actions[None], rows)["success"]


@pytest.mark.parametrize("observation", ["numbers", "pixels"])
@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("game", [GAME, HAND])
def test_gymnasium_has_nothing_to_say_against_it(game, jitter, observation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(game, windows=2, jitter=jitter, observation=observation)
        check_env(env.unwrapped)
        episode(env, 0)
        episode(env, 1, lambda _: env.action_space.sample())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("settings", [{"windows": 1}, {"windows": 2, "jitter": True}, {"windows": 1, "split": "test"}])
@pytest.mark.parametrize("game", [GAME, HAND])
def test_many_as_one_array_do_what_single_ones_do(game, settings, mode):
    ours = gymnasium.make_vec(game, num_envs=4, **settings)
    theirs = gymnasium.make_vec(game, num_envs=4, vectorization_mode=mode, **settings)
    assert type(ours).__name__.startswith("Shell") and type(ours) is not type(theirs)
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    ours.action_space.seed(0)
    try:
        for seed in (3, None, [9, None, 2, 7]):
            observations, told = ours.reset(seed=seed)
            compare((observations, told), theirs.reset(seed=seed))
            for step in range(150):  # several episodes, which end and start again at different times
                actions = ours.action_space.sample() if step % 40 < 20 else told["demonstration"]
                *arrays, told = ours.step(actions)
                compare((*arrays, told), theirs.step(actions))
    finally:
        theirs.close()


def compare(ours, theirs):
    *arrays, infos = ours
    *expected, expected_infos = theirs
    for found, x in zip(arrays, expected, strict=True):
        assert found.dtype == x.dtype and np.array_equal(found, x)
    assert infos.keys() == expected_infos.keys()
    for name, x in infos.items():
        assert x.dtype == expected_infos[name].dtype and np.array_equal(x, expected_infos[name]), name


def test_a_whole_batch_starts_again_at_once():
    """Fixed episodes all end together; the next step ignores the actions."""
    envs = gymnasium.make_vec(GAME, num_envs=3, windows=0)
    _, infos = envs.reset(seed=0)
    for _ in range(5 + 4 + 12):
        _, rewards, ended, _, infos = envs.step(infos["demonstration"])
    assert ended.all() and rewards.tolist() == [1, 1, 1]
    _, rewards, ended, _, infos = envs.step(np.zeros((3, 2), dtype=np.float32))
    assert not ended.any() and not rewards.any() and infos["_episode"].all() and len({*infos["episode"]}) == 3


@pytest.mark.parametrize("game", [GAME, HAND])
def test_what_was_returned_is_not_changed_later(game):
    envs = gymnasium.make_vec(game, num_envs=3, windows=0)
    returned, copies = [envs.reset(seed=0)[0]], []
    for _ in range(30):
        copies.append([np.copy(x) for x in returned])
        observations, rewards, ended, _, infos = envs.step(envs.action_space.sample())
        returned = [*returned, observations, rewards, ended, *infos.values()]
    for kept in copies:
        assert all(np.array_equal(x, y) for x, y in zip(kept, returned, strict=False))


@pytest.mark.parametrize("game", [GAME, HAND])
def test_pictures_for_people(game):
    env = gymnasium.make(game, windows=1, render_mode="rgb_array")
    _, info = env.reset(seed=0)
    first, ended = env.render(), False
    assert first.shape == (240, 480, 3) and first.dtype == np.uint8
    while not ended:
        before = env.render()
        _, _, ended, _, info = env.step(info["demonstration"])
    assert (env.render() != before).any()  # the ball is shown at the end
    envs = gymnasium.make_vec(game, num_envs=2, windows=1, render_mode="rgb_array")
    envs.reset(seed=0)
    assert np.array_equal(envs.render()[0], first)
    with pytest.warns(UserWarning, match="render_mode"):
        blind = gymnasium.make(game).unwrapped
        blind.reset(seed=0)
        blind.render()


def test_a_window_for_people():
    env = gymnasium.make(GAME, windows=0, render_mode="human")
    env.reset(seed=0)
    env.step(np.array([0.5, 0.0], dtype=np.float32))
    shown = pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1)
    assert np.array_equal(shown, env.unwrapped.game.pictures()[0])
    env.close()
    env.close()


def test_a_missing_pygame_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="pygame: pip install .*rgb_array"):
        gymnasium.make(GAME, render_mode="human")
    gymnasium.make(GAME, render_mode="rgb_array")


WRONG = [
    ({"windows": -1}, "windows=-1 is not allowed"),
    ({"max_swaps": 17}, "max_swaps=17 is not allowed: windows=16"),
    ({"jitter": 1}, "jitter=1 is not allowed"),
    ({"observation": "words"}, "observation='words' is not allowed: it must be one of numbers, pixels"),
    ({"split": "test_standard"}, "split='test_standard' is not allowed: it must be one of train, validation, test"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
@pytest.mark.parametrize("game", [GAME, HAND])
def test_wrong_settings_are_named(game, settings, message):
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(ValueError, match=message):
            make(game, **settings)


def test_other_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="render_mode='film' is not allowed"), pytest.warns(UserWarning):
        gymnasium.make(GAME, render_mode="film")
    with pytest.raises(ValueError, match="render_mode='human' is not allowed: it must be one of rgb_array"):
        gymnasium.make_vec(GAME, render_mode="human")
    with pytest.raises(ValueError, match="num_envs=0 is not allowed"):
        gymnasium.make_vec(GAME, num_envs=0)
    env, envs = gymnasium.make(GAME, windows=0).unwrapped, gymnasium.make_vec(GAME, num_envs=3)
    for one in (env, envs):
        with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
            one.step(one.action_space.sample())
        for seed in (-1, 1.5, True, 2**32):
            with pytest.raises(ValueError, match=f"seed={seed} is not allowed" if one is env else "seed=.*not allowed"):
                one.reset(seed=seed if one is env else [0, seed, 0])
        with pytest.raises(ValueError, match="options=.*is not allowed"):
            one.reset(options={"reset_mask": np.ones(3, dtype=bool)})
    with pytest.raises(ValueError, match="seed has 2 numbers; it must be one, or a list of num_envs=3"):
        envs.reset(seed=[1, 2])
    env.reset(seed=0)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"action has shape \(3,\); it must be \(2,\)"):
        env.step(np.zeros(3))
    with pytest.raises(ValueError, match=r"action has shape \(2, 2\); it must be \(3, 2\)"):
        envs.step(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="action holds a number that is not finite"):
        env.step(np.array([0.0, np.nan]))
    for _ in range(21):
        _, _, ended, _, _ = env.step(np.zeros(2))
    assert ended  # none of the refused actions counted
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(np.zeros(2))


FOUND = {
    "import mamba3_nplr, gymnasium": "mamba3_nplr/ShellGame-v0",
    "import gymnasium, mamba3_nplr": "mamba3_nplr/ShellHand-v0",
    "import gymnasium": "mamba3_nplr:mamba3_nplr/ShellGame-v0",
}


@pytest.mark.parametrize("imports", FOUND)
def test_a_new_program_finds_them(imports, tmp_path):
    code = f"{imports}\nprint(len(gymnasium.make({FOUND[imports]!r}).reset(seed=0)[0]))"
    done = run(code, tmp_path)
    assert done.stdout.split() == ["18" if "Hand" in FOUND[imports] else "16"] and not done.stderr


def test_importing_the_package_does_not_load_gymnasium(tmp_path):
    assert run("import sys, mamba3_nplr; print('gymnasium' in sys.modules)", tmp_path).stdout == "False\n"


def test_they_are_registered_once_and_leave_gymnasiums_own_alone(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('error')\nimport mamba3_nplr, gymnasium\n"
        "mamba3_nplr.registration.register()\n"
        "print(*[name for name in gymnasium.registry if 'mamba3' in name], 'CartPole-v1' in gymnasium.registry)"
    )
    assert run(code, tmp_path).stdout.split() == [GAME, HAND, "True"]


def run(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)


def test_what_plays_the_game_does_not_need_gymnasium():
    """So that a page or a robot can use it."""
    for name in ("shell_game_table", "shell_game_pictures", "shell_hand"):
        assert "gymnasium" not in (ROOT / "datasets_scripts" / f"{name}.py").read_text(encoding="utf-8")
