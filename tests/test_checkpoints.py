"""The trained models in checkpoints/ load, and reach what is recorded of them."""

import json
import math
import shlex
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from helpers.made_players import MODELS_OF_PAGE, TASKS_OF_PAGE
from helpers.places import ROOT
from mamba3_nplr.modeling.hub.contents import damaged_files
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.evaluation import evaluate, predict
from mamba3_nplr.training.models import auto_loader

FILES = {"config.json", "contents.json", "model.safetensors", "README.md", "results.json", "run.json"}
FRESH = 256  # sequences
FOLDERS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))


def recorded_run(folder):
    [path] = [path for part in ("runs", "exact") for path in (ROOT / "results" / part).glob(f"{folder.name}.json")]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_reaches_what_is_recorded(folder):
    run = recorded_run(folder)
    task = parse_run(shlex.split(run["command"])[2:]).task
    model = auto_loader(task).from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == run["parameters"]
    recorded = {name: results[run["metric"]] for name, results in run["results"].items()}
    [trained] = [name for name, size in task.test_sizes.items() if size == task.trained_size]
    # What is neither all right nor chance shows a change of the weights that is too small for the former.
    splits = {trained, min(recorded, key=lambda name: abs(recorded[name] - 0.5))}
    found = {name: results[run["metric"]] for name, results in evaluate(model, task, splits).items()}
    # Another processor rounds otherwise, which may decide some sequences in a thousand.
    assert found == pytest.approx({name: recorded[name] for name in splits}, abs=0.01)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_is_as_good_on_sequences_that_no_record_knows(folder):
    """As long as in training, those that would follow the last of its test set."""
    run = recorded_run(folder)
    task = parse_run(shlex.split(run["command"])[2:]).task
    [trained] = [name for name, size in task.test_sizes.items() if size == task.trained_size]
    first = task.test_size
    fresh = replace(task, test_size=first + FRESH).for_evaluation
    rows = fresh.rows(trained, first, first + FRESH)
    predicted = predict(auto_loader(task).from_pretrained(folder).eval(), fresh, fresh.model_inputs(rows), 128)
    found, recorded = fresh.metrics(predicted, rows)[run["metric"]], run["results"][trained][run["metric"]]
    # Both are shares of a sample, by luck as far apart as samples of what they have in common.
    together = (first * recorded + FRESH * found) / (first + FRESH)
    variance = max(together * (1 - together), 1 / (first + FRESH))
    assert abs(found - recorded) < 4.5 * math.sqrt(variance * (1 / first + 1 / FRESH))


def test_every_model_of_the_page_is_there():
    kept = {folder.name.rpartition("-seed")[0] for folder in FOLDERS}
    assert {f"{task}-{model}" for task in TASKS_OF_PAGE for model in MODELS_OF_PAGE} <= kept


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_its_card_says_what_is_recorded_and_how_to_load_it(folder, monkeypatch, capsys):
    run = recorded_run(folder)
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == run
    card = ModelCard.load(folder / "README.md")
    said = {result.dataset_split: result.metric_value for result in card.data.eval_results}
    assert said == {name: results[run["metric"]] for name, results in run["results"].items()}
    assert run["command"] in card.text and "trust_remote_code" not in card.text
    example = card.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(ROOT)
    exec(example, {})
    assert len(capsys.readouterr().out.splitlines()) >= 3  # a line for each letter or frame


def test_what_is_there_carries_no_code():
    assert FOLDERS
    for folder in FOLDERS:
        assert {path.name for path in folder.iterdir()} == FILES and not damaged_files(folder)
        assert "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
