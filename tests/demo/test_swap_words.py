"""Words on the page: read in any spelling, followed as the models do, in pieces as well as whole."""

import base64

import numpy as np
import pytest
import torch

import swap_words
from browser import in_sentences
from mamba3_nplr.datasets_scripts.tasks import make_task
from swap_words import TASKS, SwapWords, predictions, read_letters
from trained_models import TrainedModels


def unpack(text):
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8)


@pytest.mark.parametrize("text", ["s0 s3 s1", "0 3 1", "031", "S0,s3; 1", "  s0s3s1\n"])
def test_spellings_of_one_word(text):
    assert read_letters(make_task("s5_generators"), text).tolist() == [0, 3, 1]


BAD = [
    (
        {"task": "s5_generators", "text": "s0 s4"},
        "Letter 2 of the word, 's4', is unknown. The letters are s0, s1, s2 and s3",
    ),
    ({"task": "s5_generators", "text": "s0 hello"}, "Letter 2 of the word, 'h', is unknown."),
    ({"task": "z5", "text": "s1"}, "Letter 1 of the word, 's1', is unknown. The letters are g0, g1, g2, g3 and g4."),
    (
        {"task": "s5_generators", "text": "  "},
        "The number of letters is 0; it must be a whole number from 1 to 100,000.",
    ),
    ({"task": "s5_generators", "text": "0" * 100_001}, "The number of letters is 100001;"),
    ({"task": "s5_generators", "text": 3}, "The word is 3; it must be text."),
    ({"task": "s5_generators", "length": 0}, "The number of letters is 0;"),
    ({"task": "s5_generators", "length": 100_001}, "The number of letters is 100001;"),
    ({"task": "s9", "text": "0"}, "task is 's9'; it must be one of s5_generators, z5."),
]


@pytest.mark.parametrize(("request_", "sentence"), BAD)
def test_bad_words_get_a_sentence(request_, sentence, models):
    assert in_sentences(SwapWords(models).follow)(request_)["error"].startswith(sentence)


@pytest.mark.parametrize("task", TASKS)
def test_pieces_of_a_word_are_the_whole(task, models, monkeypatch):
    monkeypatch.setattr(swap_words, "PIECE", 7)
    letters = swap_words.random_letters(make_task(task), 40)
    for model in models.of_task(task).values():
        with torch.no_grad():
            whole = model(torch.from_numpy(letters)[None], output_prefix_logits=True).prefix_logits[0].argmax(-1)
        assert predictions(model, letters).tolist() == whole.tolist()


@pytest.mark.parametrize("task", TASKS)
def test_what_the_browser_is_told_of_a_word(task, models):
    words = SwapWords(models)
    answer, described = words.follow(task, length=300), words.describe()[task]
    letters, truth = unpack(answer["letters"]), unpack(answer["truth"])
    assert answer["length"] == len(letters) == len(truth) == 300
    # The points move by each letter as the browser draws them.
    points = list(range(5))
    for letter, element in zip(letters, truth, strict=True):
        points = [points[place] for place in described["moves"][letter]]
        assert points == described["arrangements"][element]
    assert [model["name"] for model in answer["models"]] == list(models.of_task(task)) == list(described["models"])
    for model, told in zip(models.of_task(task).values(), answer["models"], strict=True):
        predicted = predictions(model, letters.astype(np.int64))
        assert unpack(told["predicted"]).tolist() == predicted.tolist()
        wrong = [t for t in range(300) if predicted[t] != truth[t]]
        assert told["right"] == 300 - len(wrong) and told["first_wrong"] == (wrong[0] if wrong else None)


def test_without_models_there_is_the_truth(tmp_path):
    words = SwapWords(TrainedModels(tmp_path))
    answer = words.follow("s5_generators", text="s0 s0")
    assert answer["models"] == [] and unpack(answer["truth"]).tolist()[1] == 0
    assert all(not described["models"] for described in words.describe().values())


def test_random_words_are_fresh_and_of_the_length_asked_for(models):
    words = SwapWords(models)
    first, second = (words.follow("z5", length=50)["letters"] for _ in range(2))
    assert first != second and len(unpack(first)) == 50
