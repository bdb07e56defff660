"""Label smoothing by Trainer, which keeps the labels to itself, and by the configuration of the model."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.model_cases import build, tokens
from helpers.scan_cases import error
from mamba3_nplr import Mamba3NPLRForSequenceClassification, Mamba3NPLRForTokenClassification
from mamba3_nplr.modeling import heads


@pytest.fixture
def warned(monkeypatch):
    messages = []
    monkeypatch.setattr(heads.logger, "warning_once", messages.append)
    return messages


def loss_of_trainer(model, folder, inputs):
    arguments = TrainingArguments(folder, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    items = (inputs["labels"] != -100).sum()
    return Trainer(model, arguments).compute_loss(model, dict(inputs), num_items_in_batch=items)


@pytest.mark.parametrize("head", [Mamba3NPLRForSequenceClassification, Mamba3NPLRForTokenClassification])
def test_trainer_smooths_as_the_model_does(head, tmp_path, warned):
    shape = (3,) if head is Mamba3NPLRForSequenceClassification else (3, 6)
    inputs = {"input_ids": tokens(3, 6), "labels": torch.randint(0, 5, shape)}
    inputs["labels"][-1] = -100
    model = build(head)
    found = loss_of_trainer(model, tmp_path, inputs)
    model.config.label_smoothing = 0.1
    assert error(found, model(**inputs).loss) < 1e-6  # Trainer sums in float32
    assert not warned


def test_labels_of_every_position_that_trainer_keeps_are_warned_of(tmp_path, warned):
    inputs = {"input_ids": tokens(3, 6), "labels": torch.randint(0, 5, (3, 6))}
    model = build(Mamba3NPLRForSequenceClassification)
    with pytest.raises(RuntimeError):
        loss_of_trainer(model, tmp_path, inputs)
    assert len(warned) == 1 and "label_smoothing_factor" in warned[0]
    assert "give label_smoothing in the configuration of the model" in warned[0]
    model(inputs["input_ids"], output_prefix_logits=True, num_items_in_batch=18)
    model(**inputs, num_items_in_batch=18)
    assert len(warned) == 1
