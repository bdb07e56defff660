"""The trained models in checkpoints/ load, and reach what is recorded of them."""

import json

import pytest

from helpers.places import ROOT
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.evaluation import evaluate
from mamba3_nplr.training.models import auto_loader

FOLDERS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_reaches_what_is_recorded(folder):
    run = json.loads((ROOT / "results" / "runs" / f"{folder.name}.json").read_text(encoding="utf-8"))
    task = make_task(run["task"])
    model = auto_loader(task).from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == run["parameters"]
    recorded = {name: results[run["metric"]] for name, results in run["results"].items()}
    [trained] = [name for name, size in task.test_sizes.items() if size == task.trained_size]
    # What is neither all right nor chance shows a change of the weights that is too small for the former.
    splits = {trained, min(recorded, key=lambda name: abs(recorded[name] - 0.5))}
    found = {name: results[run["metric"]] for name, results in evaluate(model, task, splits).items()}
    # Another processor rounds otherwise, which may decide some sequences in a thousand.
    assert found == pytest.approx({name: recorded[name] for name in splits}, abs=0.01)


def test_what_is_there_carries_no_code():
    assert FOLDERS
    for folder in FOLDERS:
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
        assert "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
