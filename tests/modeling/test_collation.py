"""Rows of different lengths as a batch: the padding changes no loss."""

import numpy as np
import pytest
import torch

from helpers.model_cases import build
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification, pad_sequences

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


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["lists", "arrays", "tensors"])
@pytest.mark.parametrize("order", [1, -1])
def test_the_numbers_of_a_batch_do_not_depend_on_which_row_comes_first(kind, order):
    whole, parts = [[0, 1], [2, 3]], [[0.25, 1.5], [2, 3.75], [0.5, 0.5]]
    rows = [{"observations": kind(x), "labels": kind(x)} for x in (whole, parts)]
    batch = pad_sequences(rows[::order])
    for name in ("observations", "labels"):
        found = batch[name].flip(0) if order == -1 else batch[name]
        assert found.dtype == torch.float32
        assert found[0, :2].tolist() == whole and found[1].tolist() == parts
    single = [{"input_ids": [1], "labels": kind([x])[0]} for x in (3, 0.5)]
    assert pad_sequences(single[::order])["labels"].tolist() == [3, 0.5][::order]


def test_rows_may_be_of_different_kinds_and_precisions():
    given = [[1, 2], np.array([0.5]), torch.tensor([0.1, 3.0], dtype=torch.float64), np.array([7], dtype=np.uint8)]
    batch = pad_sequences([{"observations": x} for x in given])
    assert batch["observations"].dtype == torch.float32
    assert batch["observations"].tolist() == [[1, 2], [0.5, 0], [pytest.approx(0.1), 3], [7, 0]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64"])
def test_whole_numbers_stay_so_and_hold_the_label_of_padding(dtype):
    rows = [np.array([1, 2, 3], dtype=dtype), [4], np.array([5, 6], dtype="int64"), []]
    batch = pad_sequences([{"input_ids": x, "labels": x} for x in rows])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100], [5, 6, -100], [-100] * 3]


def test_what_a_model_multiplies_is_never_of_whole_numbers():
    for name in ("observations", "inputs_embeds"):
        assert pad_sequences([{name: [[1, 2]]}, {name: np.array([[3, 4]])}])[name].dtype == torch.float32
    assert pad_sequences([{"input_ids": []}])["input_ids"].dtype == torch.int64


def test_a_boolean_mask_stays_one_and_boolean_labels_do_not():
    rows = [{"input_ids": [1] * len(x), "attention_mask": x, "labels": x} for x in ([True, False], [True])]
    batch = pad_sequences(rows)
    assert torch.equal(batch["attention_mask"], torch.tensor([[True, False], [True, False]]))
    assert batch["labels"].tolist() == [[1, 0], [1, -100]]
    mixed = pad_sequences([{"input_ids": [1, 1], "attention_mask": x} for x in ([True, False], [1, 1])])
    assert mixed["attention_mask"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"observations": [[1, 2], [3]]}, "Row 1: observations must be an array of numbers; given: list. .*length 2"),
        ({"observations": [[1, None]]}, "Row 1: observations must be an array of numbers"),
        ({"observations": np.array([[1], "a"], dtype=object)}, "Row 1: observations must be an array of numbers"),
        ({"observations": [[1j, 2]]}, "Row 1: observations must be real numbers; given: complex ones"),
        ({"observations": [[1, 2, 3]]}, r"Row 1 has observations of shape \(1, 3\); row 0 has \(2, 2\), and only"),
        ({"observations": []}, r"Row 1 has observations of shape \(0,\); row 0 has \(2, 2\)"),
        ({"labels": 1}, r"Row 1 has labels of shape \(\); row 0 has \(2,\)"),
        ({"attention_mask": [1]}, r"Row 1 has attention_mask of shape \(1,\); with observations of length 2 .* \(2,\)"),
        ({"position_ids": [0, 1, 2]}, r"Row 1 has position_ids of shape \(3,\); with observations of length 2"),
    ],
)
def test_a_row_that_does_not_fit_is_named(second, message):
    first = {"observations": [[1, 2], [3, 4]], "labels": [1, 2], "attention_mask": [1, 1], "position_ids": [0, 1]}
    with pytest.raises(ValueError, match=message):
        pad_sequences([first, first | second])
