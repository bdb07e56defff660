"""Evaluation: the same figures however sequences are cut into passes, and passes of bounded size."""

import numpy as np
import pytest
import torch

from helpers.training_program import TINY_MODEL
from mamba3_nplr import Mamba3NPLRConfig
from mamba3_nplr.datasets_scripts.shell_game import no_tracking_prior
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.evaluation import evaluate, join, predict
from mamba3_nplr.training.models import load_model, new_model

SETTINGS = {
    "s5_generators": {"test_lengths": (9, 40), "test_size": 10, "length": 9},
    "shell": {"test_windows": (16, 4), "test_size": 10},
    "shell_jitter": {"test_windows": (1, 4), "test_size": 10, "packed": False},
}


def make(name, **settings):
    task = make_task(name, **SETTINGS[name] | settings)
    return task, new_model(task, Mamba3NPLRConfig(**TINY_MODEL, **task.model_fields)).double().eval()


def whole_prediction(model, task, rows):
    """Without pieces, state or batches of rows."""
    inputs = {name: x for name, x in task.model_inputs(rows).items() if name != "labels"}
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        if "input_ids" in inputs:
            return model(**inputs, output_prefix_logits=True).prefix_logits.argmax(-1).numpy()
        return model(**inputs).actions.numpy()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("batch_size", "piece_length"), [(10, 1000), (4, 7), (1, 33)])
def test_figures_do_not_depend_on_the_passes(name, batch_size, piece_length):
    task, model = make(name)
    expected = {}
    for split in task.test_sizes:
        rows = task.rows(split, 0, 10)
        expected[split] = task.metrics(whole_prediction(model, task, rows), rows)
    found = evaluate(model.float(), task, batch_size=batch_size, piece_length=piece_length)
    assert [*found] == [*expected]
    for split, metrics in expected.items():
        assert {key: x for key, x in found[split].items() if key != "chance"} == metrics


@pytest.mark.parametrize("name", SETTINGS)
def test_predictions_in_pieces_are_those_of_the_whole(name):
    task, model = make(name)
    rows = task.rows([*task.splits][2], 0, 5)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in task.model_inputs(rows).items()}
    found, expected = predict(model, task, inputs, 6), whole_prediction(model, task, rows)
    if found.dtype.kind == "i":
        assert np.array_equal(found, expected)
    else:
        inside = np.arange(found.shape[1]) < rows["num_frames"][:, None]
        assert np.abs(found - expected)[inside].max() < 1e-6 * np.abs(expected).max()  # predictions are float32


def test_no_pass_is_longer_than_a_piece():
    task, model = make("s5_generators", test_lengths=(500,))
    shapes = []
    model.model.register_forward_pre_hook(
        lambda module, arguments, keywords: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    evaluate(model.float(), task, batch_size=4, piece_length=32)
    assert {rows for rows, _ in shapes} == {4, 2} and {length for _, length in shapes} == {32, 500 % 32}


def test_packed_training_evaluates_alike():
    task, model = make("shell_jitter")
    packed, _ = make("shell_jitter", packed=True)
    assert evaluate(model.float(), task) == evaluate(model, packed)


def test_the_model_is_left_as_it_was():
    task, model = make("s5_generators")
    for training in (True, False):
        model.float().train(training)
        evaluate(model, task, ["validation"])
        assert model.training is training


def test_chance():
    task, model = make("s5_generators")
    assert evaluate(model.float(), task, ["test_9"])["test_9"]["chance"] == task.baseline
    task, model = make("shell_jitter")
    assert evaluate(model.float(), task, ["test_4"])["test_4"]["chance"] == pytest.approx(no_tracking_prior(4))
    task, model = make("shell", test_size=7)
    swaps = task.rows("test_standard", 0, 7)["num_swaps"]
    found = evaluate(model.float(), task, ["test_standard"])["test_standard"]["chance"]
    assert found == pytest.approx(np.mean([no_tracking_prior(int(k)) for k in swaps]))


def test_names():
    assert make_task("z5").main_metric == "final_accuracy" and make_task("shell").main_metric == "success"
    task, model = make("s5_generators")
    with pytest.raises(ValueError, match="split='test_7' is unknown"):
        evaluate(model, task, ["test_7"])


def test_join_pads():
    joined = join([np.ones((2, 3, 2)), np.ones((1, 5, 2))])
    assert joined.shape == (3, 5, 2) and joined[0, 3:].sum() == 0 and joined[2].sum() == 10


def test_a_checkpoint_may_have_been_trained_with_another_loss(tmp_path):
    task, model = make("shell")
    model.config.cue_weight, model.config.episode_loss = 1.0, True
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), task, "refused").config.cue_weight == 1
