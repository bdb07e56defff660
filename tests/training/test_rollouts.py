"""A policy that acts in the environment of a task does what it does offline, but for what its own actions change."""

import json

import gymnasium
import numpy as np
import pytest
import torch

from helpers.training_program import TINY, TINY_MODEL, load_program
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.evaluation import evaluate, predict
from mamba3_nplr.training.rollouts import roll_out

TASKS = {
    "shell": {"test_windows": (1, 3), "test_size": 60},
    "shell_jitter": {"test_windows": (1, 3), "test_size": 60},
    "shell_hand": {"test_windows": (1, 3), "test_size": 60},
    "shell_pixels": {"test_windows": (1, 3), "test_size": 60},
}
HAND = [*TINY, "--task=shell_hand", "--task.windows=2", "--task.max_swaps=2", "--task.test_size=8"]
HAND += ["--task.test_windows=[1,3]"]


def make(name, **settings):
    """A policy of random weights that are large enough to reach for different cups, in numbers that do not round."""
    task = make_task(name, **TASKS[name] | settings)
    policy = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(**TINY_MODEL, **task.model_fields)).double()
    torch.nn.init.normal_(policy.action_head.weight, std=0.5)
    return task, policy


@pytest.mark.parametrize("name", ["shell", "shell_jitter", "shell_pixels"])
def test_acting_succeeds_where_the_offline_evaluation_does(name):
    task, policy = make(name)
    offline = evaluate_double(policy, task)
    assert roll_out(policy, task, task.test_sizes, 60, batch_size=60) == offline
    assert all(0 < found["success"] < 1 and len(found["success_by_swaps"]) for found in offline.values())


def evaluate_double(policy, task):
    """The offline evaluation of a policy in float64: what it is shown is float32."""
    forward = policy.forward
    policy.forward = lambda observations, **rest: forward(observations.double(), **rest)
    try:
        return evaluate(policy, task)
    finally:
        del policy.forward


@pytest.mark.parametrize("name", TASKS)
def test_the_size_of_a_batch_changes_nothing(name):
    task, policy = make(name)
    expected = roll_out(policy, task, ["test_3"], 50, batch_size=50)
    for batch_size in (7, 128):
        assert roll_out(policy, task, ["test_3"], 50, batch_size=batch_size) == expected
    assert roll_out(policy, task, ["test_3"], 10)["test_3"] != expected["test_3"]


def test_episodes_that_follow_each_other_are_like_single_ones():
    """A policy that is reset where `infos` tells of a new episode knows nothing of the one before."""
    task, policy = make("shell_jitter", windows=1, max_swaps=1)
    envs = gymnasium.make_vec("mamba3_nplr/ShellGame-v0", num_envs=5, windows=1, jitter=True)
    observations, infos = envs.reset(seed=0)
    playing, successes = infos["episode"], {}
    for _ in range(400):
        observations, _, ended, _, infos = envs.step(policy.select_action(observations))
        successes |= {int(playing[i]): infos["success"][i] for i in np.nonzero(ended)[0]}
        if "episode" in infos:
            policy.reset(infos["_episode"])
            playing = np.where(infos["_episode"], infos["episode"], playing)
    assert len(successes) > 20 and 0 < np.mean([*successes.values()]) < 1
    for number, success in successes.items():
        rows = task.rows("train", number, number + 1)
        actions = predict(policy, task, {"observations": torch.from_numpy(rows["observations"]).double()}, 128)
        assert task.metrics(actions, rows)["success"] == success


class Demonstrator(torch.nn.Module):
    """Does what the task's demonstrator does, by its number of the frame; blind to what it sees, or not."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.frame = labels, 0

    def reset(self):
        self.frame = 0

    def select_action(self, observations):
        self.frame += 1
        return self.labels[:, min(self.frame, self.labels.shape[1]) - 1]


@pytest.mark.parametrize("name", TASKS)
def test_the_demonstrator_always_succeeds(name):
    task = make_task(name, **TASKS[name])
    for split in task.test_sizes:
        labels = task.rows(split, 0, 60)["labels"]
        found = roll_out(Demonstrator(labels), task, [split], 60)[split]
        assert found["success"] == 1 and set(found["success_by_swaps"].values()) == {1}


@pytest.mark.parametrize("name", TASKS)
def test_any_evaluation_set_can_be_played(name):
    """Whatever the task has of its own, such as fewer swaps than windows: what is played are the rows of the set."""
    task = make_task(name, **TASKS[name], windows=4, max_swaps=1)
    for split in task.splits:
        rows = task.rows(split, 0, 60)
        found = roll_out(Demonstrator(rows["labels"]), task, [split], 60)[split]
        assert found["success"] == 1 and [*found["success_by_swaps"]] == np.unique(rows["num_swaps"]).tolist()


def test_a_hand_that_sees_itself_may_end_elsewhere_than_offline():
    """Offline the policy is shown the demonstrator's hand; here, its own."""
    task, policy = make("shell_hand")
    seen = []
    policy.select_action = lambda observations: (
        seen.append(observations) or type(policy).select_action(policy, observations)
    )
    roll_out(policy, task, ["test_3"], 20)
    hands, shown = (x[..., 15:17] for x in (np.stack(seen, 1), task.rows("test_3", 0, 20)["observations"]))
    assert np.array_equal(hands[:, 0], shown[:, 0]) and not np.array_equal(hands, shown)


def test_the_policy_is_left_as_it_was():
    task, policy = make("shell")
    for training in (True, False):
        policy.train(training)
        policy.select_action(np.zeros((2, 16)))
        modes = []
        policy.select_action = lambda x, modes=modes: (
            modes.append(policy.training) or type(policy).select_action(policy, x)
        )
        roll_out(policy, task, ["test_1"], 3)
        del policy.select_action
        assert policy.training is training and policy.policy_states is None and not any(modes) and modes


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "hand"
    load_program().main([*HAND, f"--output_dir={out}"])
    return out


def test_a_trained_policy_acts_by_the_command(trained, tmp_path, capsys):
    program = load_program()
    program.main(["evaluate", str(trained), "--rollouts", "8", f"--out={tmp_path / 'acted.json'}", "--batch_size=3"])
    told = capsys.readouterr().out
    assert "acting in 8 episodes of each test set" in told and "| test_3 |" in told
    acted = json.loads((tmp_path / "acted.json").read_text())
    offline = json.loads((trained / "results.json").read_text())
    assert acted["rollouts"] == 8 and acted["task"] == offline["task"] == "shell_hand"
    assert acted["metric"] == offline["metric"] and [*acted["results"]] == [*offline["results"]]
    for split, found in acted["results"].items():
        assert found.keys() == offline["results"][split].keys()
        assert found["chance"] == offline["results"][split]["chance"]
        assert [*found["success_by_swaps"]] == [*offline["results"][split]["success_by_swaps"]]


REFUSED = [
    (["--rollouts", "9"], "rollouts=9 is not allowed: test_1 has 8 episodes"),
    (["--rollouts", "0"], "rollouts=0 is not allowed"),
    (["--rollouts", "2", "--task", "s5_generators"], "--rollouts cannot be used: s5_generators has no environment"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_played_is_refused(arguments, message, trained, capsys):
    with pytest.raises(SystemExit):
        load_program().main(["evaluate", str(trained), *arguments])
    assert message in capsys.readouterr().err


def test_a_missing_gymnasium_is_named(trained, capsys, monkeypatch):
    monkeypatch.setattr("mamba3_nplr.training.rollouts.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        load_program().main(["evaluate", str(trained), "--rollouts", "2"])
    assert "--rollouts needs gymnasium: pip install 'mamba3_nplr[gym]'" in capsys.readouterr().err
