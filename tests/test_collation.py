"""Rows of different lengths as a batch: the padding changes no loss."""

import numpy as np
import pytest
import torch
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification, pad_sequences
from model_cases import build

LENGTHS = (3, 7, 5)


def rows_of(kind):
    random = np.random.default_rng(0)
    if kind == "words":
        words = [random.integers(0, 5, size=length) for length in LENGTHS]
        return [{"input_ids": x.tolist(), "labels": x.tolist()} for x in words]
    shapes = [(length, 16) for length in LENGTHS]
    return [{"observations": random.normal(size=x), "labels": random.normal(size=(x[0], 2))} for x in shapes]


@pytest.mark.parametrize("kind", ["words", "episodes"])
def test_padding_changes_no_loss(kind):
    model_class = Mamba3NPLRForSequenceClassification if kind == "words" else Mamba3NPLRForBehaviorCloning
    model, rows = build(model_class, dtype=torch.float32), rows_of(kind)
    batch = pad_sequences(rows)
    assert batch["attention_mask"].sum(1).tolist() == list(LENGTHS)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()  # Trainer counts the others
    alone = [model(**pad_sequences([row])).loss.item() for row in rows]
    assert "attention_mask" not in pad_sequences(rows[:1])
    assert model(**batch).loss.item() == pytest.approx(np.average(alone, weights=LENGTHS), rel=1e-5)


def test_what_is_no_argument_of_the_models_is_left_out():
    noted = [row | {"num_swaps": 3, "swaps": [1] * i, "name": "a"} for i, row in enumerate(rows_of("episodes"))]
    assert pad_sequences(noted).keys() == {"observations", "labels", "attention_mask"}


def test_a_label_for_the_whole_sequence_stays_one():
    batch = pad_sequences([{"input_ids": [1, 2], "labels": 3}, {"input_ids": [1], "labels": 0}])
    assert batch["labels"].tolist() == [3, 0] and batch["input_ids"].tolist() == [[1, 2], [1, 0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty: a batch needs at least one row"),
        ([{"foo": [1, 2]}], "Row 0 has the keys foo; it needs one of input_ids, observations, inputs_embeds, and may"),
        ([{}], "Row 0 has the keys none; it needs one of input_ids"),
        ([{"input_ids": [1]}, {"labels": [1]}], "Row 1 has the keys labels; it needs one of input_ids"),
        ([{"input_ids": [1], "labels": 1}, {"input_ids": [1]}], "Row 1 has the keys input_ids; row 0 has input_ids, l"),
    ],
)
def test_rows_that_make_no_batch_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        pad_sequences(rows)
