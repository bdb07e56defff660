"""The pipelines: words to group elements, observations to actions; by the package and by a checkpoint's own code."""

import json
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import pipeline

from helpers.model_cases import SIZES, build
from helpers.without_package import BLOCKER
from mamba3_nplr import (
    Mamba3NPLRConfig,
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
)
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.pipelines import read_permutation


def tracker(model_class=Mamba3NPLRForSequenceClassification, **changes):
    task = make_task("s3", inputs="generators")
    return build(model_class, dtype=torch.float32, **task.model_fields | task.model_names | changes)


@pytest.fixture
def policy():
    return build(Mamba3NPLRForBehaviorCloning, dtype=torch.float32)


def close_to(expected):
    """Within 1e-5 of the RMS: a sequence of another length or in pieces is rounded otherwise."""
    return pytest.approx(expected, rel=0, abs=1e-5 * float(np.sqrt(np.mean(np.square(expected)))))


@pytest.mark.parametrize("model_class", [Mamba3NPLRForSequenceClassification, Mamba3NPLRForTokenClassification])
def test_a_word_gives_the_element_at_every_prefix(model_class, tmp_path):
    tracker(model_class).save_pretrained(tmp_path)
    track = pipeline("state-tracking", model=str(tmp_path))
    model = model_class.from_pretrained(tmp_path)
    word = torch.tensor([0, 1, 1, 0])
    with torch.no_grad():
        output = model(word[None], **{} if "Token" in model_class.__name__ else {"output_prefix_logits": True})
    probabilities = output.get("prefix_logits", output.logits)[0].softmax(-1)
    entries = track("s0 s1 s1 s0")
    elements = make_task("s3").algebra.elements
    assert [entry["element"] for entry in entries] == probabilities.argmax(-1).tolist()
    assert [entry["score"] for entry in entries] == pytest.approx(probabilities.max(-1).values.tolist())
    for entry, token in zip(entries, ["s0", "s1", "s1", "s0"], strict=True):
        assert entry["permutation"] == elements[entry["element"]].tolist() and entry["token"] == token
        assert entry["label"] == " ".join(map(str, entry["permutation"]))
    for same in ([0, 1, 1, 0], word, word.numpy(), ("s0 s1 s1 s0",)):
        found = track(same)
        assert (found[0] if isinstance(same, tuple) else found) == entries
    # Each prefix is answered as if it were the whole word, and several words are answered each on its own.
    for words, expected in (
        (["s0 s1", [1], "s0"], [entries[:2], track("s1"), entries[:1]]),
        ((x for x in ["s0", "s0 s1 s1"]), [entries[:1], entries[:3]]),
    ):
        found = list(track(words))
        assert [[x["label"] for x in word] for word in found] == [[x["label"] for x in word] for word in expected]
        scores = [[[x["score"] for x in word] for word in words] for words in (found, expected)]
        assert scores[0] == [pytest.approx(x, abs=1e-6) for x in scores[1]]


def test_the_letters_of_a_word_are_those_of_its_task():
    assert make_task("s5_generators").model_names["token_names"] == ["s0", "s1", "s2", "s3"]
    assert make_task("z5").model_names["token_names"] == ["g0", "g1", "g2", "g3", "g4"]
    names = make_task("s5_generators").model_names
    assert names["id2label"][24] == "1 0 2 3 4" and names["label2id"]["1 0 2 3 4"] == 24


def test_only_permutations_are_read_as_such():
    assert read_permutation("1 0 2") == [1, 0, 2] and read_permutation("0") == [0]
    for label in ("on", "LABEL_0", "0 0", "1 2", "0 1 x", ""):
        assert read_permutation(label) is None, label


def test_words_without_names_are_numbers():
    track = pipeline("state-tracking", model=tracker(token_names=None, id2label=None, label2id=None))
    assert track("0 1 1") == track([0, 1, 1])
    assert track("0")[0]["token"] == 0 and track("0")[0]["permutation"] is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("s0 s2", "Letter 1 of the word, 's2', is unknown. The letters are: s0, s1."),
        ("", "of at least one letter"),
        (np.zeros((2, 3), dtype=int), "has shape .2, 3."),
        (np.zeros(3), "type torch.float64"),
        ([0, 7], "vocab_size|7"),
        (["s0", "s0 x"], "Letter 1 of the word, 'x', is unknown"),
        ([["s0"]], "A word must be an array of numbers; given: list"),
        (None, "A word must be an array of numbers; given: NoneType"),
        ([[]], "of at least one letter"),
        ([], "of at least one letter"),
        ([-1], "input_ids hold -1"),
    ],
)
def test_what_is_no_word_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        pipeline("state-tracking", model=tracker())(word)


def test_observations_give_actions(policy):
    act = pipeline("behavior-cloning", model=policy)
    episodes = torch.randn(2, 7, 16)
    with torch.no_grad():
        expected = policy(observations=episodes).actions.numpy()
    assert np.array_equal(act(episodes), expected)
    for one in (episodes[0], episodes[0].numpy(), episodes[0].tolist()):
        assert act(one) == close_to(expected[0])
    longer = act([episodes[0], episodes[1, :3]])
    assert [x.shape for x in longer] == [(7, 2), (3, 2)]
    assert longer[1] == close_to(expected[1, :3])


@pytest.mark.parametrize("model_class", [Mamba3NPLRForSequenceClassification, Mamba3NPLRForTokenClassification])
def test_words_in_batches_are_answered_as_one_at_a_time(model_class):
    model = tracker(model_class)
    words = ["s0 s1 s1", [1], "s0 s1 s0 s0 s1", "s1 s1", "s0"]
    expected = [pipeline("state-tracking", model=model)(word) for word in words]
    in_two = pipeline("state-tracking", model=model, batch_size=2)
    for found in (in_two(words), in_two(words, batch_size=8), list(in_two(x for x in words))):
        assert [[x.pop("score") for x in word] for word in found] == [
            pytest.approx([x["score"] for x in word], abs=1e-6) for word in expected
        ]
        assert found == [[{k: v for k, v in x.items() if k != "score"} for x in word] for word in expected]


def test_episodes_in_batches_are_answered_as_one_at_a_time(policy):
    act = pipeline("behavior-cloning", model=policy)
    shapes = [(7, 16), (2, 3, 16), (1, 16), (4, 16), (1, 5, 16)]
    episodes = [torch.randn(shape) for shape in shapes]
    expected = [act(episode) for episode in episodes]
    calls = []
    policy.register_forward_pre_hook(lambda *given: calls.append(given[2]), with_kwargs=True)
    for size, shapes in ((2, [(3, 7, 16), (2, 4, 16), (1, 5, 16)]), (8, [(6, 7, 16)])):
        found = act(episodes, batch_size=size)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert all(x == close_to(y) for x, y in zip(found, expected, strict=True))
        assert [call["observations"].shape for call in calls] == shapes
        # Where something is padded it is masked: it costs nothing, and could hold anything.
        masked = [call["attention_mask"] for call in calls]
        assert [None if x is None else int(x.sum()) for x in masked] == ([13, 5, None] if size == 2 else [23])
        calls.clear()


def test_a_stream_reads_when_asked_and_keeps_its_state(policy):
    act = pipeline("behavior-cloning", model=policy)
    episode, read = torch.randn(6, 16), []
    whole = act(episode)

    def observations():
        for number, observation in enumerate(episode):
            read.append(number)
            yield observation

    policy.reset()
    first, second = act(observations()), act(iter(episode.numpy()))
    for number in range(6):
        assert next(first) == close_to(whole[number]) and read == list(range(number + 1))
        assert next(second) == close_to(whole[number])
        assert policy.select_action(episode[number]).numpy() == close_to(whole[number])
    assert next(first, None) is None
    several = list(act(iter(episode[:, None].expand(6, 3, 16))))
    assert several[5].shape == (3, 2) and several[5][2] == close_to(whole[5])


def test_streams_and_the_control_loop_in_threads_keep_apart(policy):
    act = pipeline("behavior-cloning", model=policy)
    episodes = np.random.default_rng(0).normal(size=(3, 40, 16)).astype(np.float32)
    runs = [
        lambda: list(act(iter(episodes[0]))),
        lambda: list(act(iter(episodes[1]))),
        lambda: [policy.select_action(observation) for observation in episodes[2]],
    ]
    with ThreadPoolExecutor(3) as threads:
        compiled = [run() for run in runs]
        policy.reset()
        assert np.array_equal([done.result() for done in [threads.submit(run) for run in runs]], compiled)
        policy.reset()
        meeting = threading.Barrier(1)

        def meet(*given):
            meeting.wait(60)

        # Where somebody hooks modules they are called, which rounds otherwise than one compiled call.
        policy.model.embed_observations.register_forward_hook(meet)
        policy.action_head.register_forward_hook(meet)
        alone = [run() for run in runs]
        policy.reset()
        # At every step all three are inside it at the same time, both before and after the state is computed.
        meeting = threading.Barrier(3)
        found = [done.result() for done in [threads.submit(run) for run in runs]]
    assert np.array_equal(found, alone)


def test_what_is_done_to_the_policy_does_not_reach_a_stream(policy):
    act = pipeline("behavior-cloning", model=policy)
    episode = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    alone, stream = list(act(iter(episode))), act(iter(episode))
    disturb = [
        policy.reset,
        lambda: policy.select_action(episode[:3]),
        lambda: policy.reset([1]),
        lambda: policy.set_state(policy.get_state()),
        lambda: list(act(iter(episode[:2]))),
        lambda: act(episode),
    ]
    for expected, change in zip(alone, disturb, strict=True):
        change()
        kept = policy.get_state()
        assert next(stream) == close_to(expected)
        assert policy.get_state().keys() == kept.keys()
        assert all(torch.equal(part, kept[name]) for name, part in policy.get_state().items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"observations have shape \(0,\); they must be"),
        (np.zeros((0, 3, 16)), r"shape \(0, 3, 16\); they must be .* with at least one episode"),
        ("up", "observations must be an array of numbers; given: ndarray"),
        (None, "observations must be an array of numbers"),
        (np.zeros((3, 16)) * 1j, "observations must be real numbers; given: complex ones"),
        ([np.zeros((3, 16)), np.zeros((3, 4))], r"shape \(3, 4\)"),
        (np.full((3, 16), 1e39), "not finite, first in row 0, frame 0"),
    ],
    ids=str,
)
def test_what_is_no_episode_is_refused(policy, given, message):
    with pytest.raises(ValueError, match=message):
        pipeline("behavior-cloning", model=policy)(given)


def test_an_episode_may_have_no_frames(policy):
    act, episode = pipeline("behavior-cloning", model=policy), np.ones((3, 16), dtype=np.float32)
    assert act(np.zeros((0, 16))).shape == (0, 2) and act(np.zeros((2, 0, 16))).shape == (2, 0, 2)
    assert [x.shape for x in act([episode, episode[:0]], batch_size=2)] == [(3, 2), (0, 2)]
    assert list(act(iter(episode[:0]))) == []


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_wrong_batch_size_is_refused(policy, size):
    with pytest.raises(ValueError, match=f"batch_size={size}"):
        pipeline("behavior-cloning", model=policy)([np.zeros((3, 16))] * 2, batch_size=size)
    with pytest.raises(ValueError, match=f"batch_size={size}"):
        pipeline("state-tracking", model=tracker(), batch_size=size)(["s0", "s1"])


def test_other_checkpoints_and_options_are_refused(policy, tmp_path):
    policy.save_pretrained(tmp_path / "policy")
    tracker().save_pretrained(tmp_path / "tracker")
    with pytest.raises(ValueError, match="holds a Mamba3NPLRForBehaviorCloning; this pipeline needs"):
        pipeline("state-tracking", model=policy)
    with pytest.raises(ValueError, match="holds a Mamba3NPLRForSequenceClassification"):
        pipeline("behavior-cloning", model=str(tmp_path / "tracker"))
    with pytest.raises(TypeError, match="no option top_k"):
        pipeline("state-tracking", model=tracker())("s0", top_k=3)
    with pytest.raises(TypeError, match="A stream of observations, one at a time, takes no option batch_size"):
        pipeline("behavior-cloning", model=policy)(iter(np.zeros((3, 16))), batch_size=2)
    with pytest.raises(ValueError, match=r"shape \(16,\); they must be \(time, 16\)"):
        pipeline("behavior-cloning", model=policy)(np.zeros(16))
    with pytest.raises(StrictDataclassError, match="token_names=.*all different"):
        Mamba3NPLRConfig(**SIZES | {"token_names": ["a", "a"]})


WITHOUT_THE_PACKAGE = BLOCKER + textwrap.dedent(
    """
    import json
    import numpy as np
    from transformers import pipeline

    entries = pipeline("state-tracking", model="tracker", trust_remote_code=True)("s0 s1 s1")
    act = pipeline("behavior-cloning", model="policy", trust_remote_code=True)
    episode = np.load("episode.npy")
    assert np.allclose(act(episode), np.load("actions.npy"), atol=1e-5)
    assert np.allclose(list(act(iter(episode))), np.load("actions.npy"), atol=1e-5)
    act.save_pretrained("again")
    assert np.allclose(pipeline(model="again", trust_remote_code=True)(episode), np.load("actions.npy"), atol=1e-5)
    print(json.dumps(entries))
    assert not any(name.startswith("mamba3_nplr") for name in sys.modules)
    """
)


def test_a_checkpoint_carries_its_pipeline(policy, tmp_path):
    model = tracker()
    model.save_pretrained(tmp_path / "tracker")
    policy.save_pretrained(tmp_path / "policy")
    assert not hasattr(model.config, "custom_pipelines")
    episode = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    np.save(tmp_path / "episode.npy", episode)
    np.save(tmp_path / "actions.npy", pipeline("behavior-cloning", model=policy)(episode))
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout.splitlines()[-1])
    for found, expected in zip(entries, pipeline("state-tracking", model=model)("s0 s1 s1"), strict=True):
        assert found == expected | {"score": pytest.approx(expected["score"], rel=1e-5)}
