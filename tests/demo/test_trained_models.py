"""The page plays with what is there: the best seed of each model, without a list of them anywhere."""

import json

import pytest
import torch

from helpers.made_players import MODELS_OF_PAGE, TASKS_OF_PAGE, save_player
from helpers.places import ROOT
from trained_models import CHECKPOINTS, MODELS, TrainedModels


def write_results(folder, *figures):
    results = {f"test_{i}": {"success": figure} for i, figure in enumerate(figures)}
    (folder / "results.json").write_text(json.dumps({"metric": "success", "results": results}))


def test_every_task_has_its_models_in_the_order_of_the_page(models):
    for task in TASKS_OF_PAGE:
        assert list(models.of_task(task)) == list(MODELS) == list(MODELS_OF_PAGE)


def test_models_that_arrive_later_are_found(tmp_path):
    models = TrainedModels(tmp_path)
    assert models.of_task("shell") == {}
    for name in ("mamba3", "nplr"):
        save_player(tmp_path, "shell", name)
    assert list(models.of_task("shell")) == ["nplr", "mamba3"] and models.of_task("z5") == {}


def test_the_best_seed_plays(tmp_path):
    folders = [save_player(tmp_path, "shell", "nplr", seed) for seed in (0, 2, 10)]
    models = TrainedModels(tmp_path)
    assert models.folders("shell")["nplr"] == folders[0]  # nothing is known of them
    for folder, figures in zip(folders, [(1.0, 0.2), (0.7, 0.7), (0.5, 0.5)], strict=True):
        write_results(folder, *figures)
    assert models.folders("shell")["nplr"] == folders[1]
    write_results(folders[2], 0.9, 0.9)
    assert models.folders("shell")["nplr"] == folders[2]


@pytest.mark.parametrize("name", ["shell-nplr-seed0-track", "shell-nplr_norope-seed0", "shell-nplr", "walk-nplr-seed0"])
def test_folders_of_other_names_are_left_alone(name, tmp_path):
    save_player(tmp_path, "shell", "nplr").rename(tmp_path / name)
    assert TrainedModels(tmp_path).folders("shell") == {}


def test_a_model_is_loaded_once_and_computes_as_it_was_saved(checkpoints):
    models = TrainedModels(checkpoints)
    first, again = models.of_task("shell")["nplr"], models.of_task("shell")["nplr"]
    assert first is again and not first.training
    direct = type(first).from_pretrained(checkpoints / "shell-nplr-seed0")
    observations = torch.randn(1, 9, 16)
    assert torch.equal(first(observations=observations).actions, direct(observations=observations).actions)


def test_those_of_the_repository_load():
    assert ROOT / "checkpoints" == CHECKPOINTS
    models = TrainedModels()
    found = {task: models.of_task(task) for task in TASKS_OF_PAGE}
    kept = {path.name for path in CHECKPOINTS.iterdir()}
    assert any(found.values())
    for task, loaded in found.items():
        for name in loaded:
            assert any(folder.startswith(f"{task}-{name}-seed") for folder in kept)
