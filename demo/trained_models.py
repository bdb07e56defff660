"""The trained models that the page plays with: those that are in the folder of checkpoints, the best seed of each."""

import json
import re
import threading
from pathlib import Path

import torch

from mamba3_nplr.datasets_scripts.tasks import TASKS
from mamba3_nplr.training.models import auto_loader
from mamba3_nplr.training.record import mean_figure

HERE = Path(__file__).resolve().parent
# In a Space they lie beside the page, in a checkout beside its folder.
CHECKPOINTS = next((x for x in (HERE / "checkpoints", HERE.parent / "checkpoints") if x.is_dir()), HERE / "checkpoints")
# Name in the folders -> on the page, in its order.
MODELS = {"nplr_exact": "NPLR (exact)", "nplr": "NPLR (paper)", "mamba3": "Mamba-3"}
FOLDER = re.compile(rf"(?P<task>{'|'.join(TASKS)})-(?P<model>{'|'.join(MODELS)})-seed(?P<seed>\d+)")


class TrainedModels:
    """
    Models by task, loaded when they are first asked for.

    Args:
        folder: Of folders called TASK-MODEL-seedSEED, each a checkpoint that `from_pretrained` loads.
    """

    def __init__(self, folder: Path = CHECKPOINTS):
        self.folder = folder
        self.loaded: dict[Path, torch.nn.Module] = {}
        self.lock = threading.Lock()

    def folders(self, task: str) -> dict[str, Path]:
        """The best folder of each model of a task, in the order of the page."""
        found: dict[str, list[tuple[float, int, Path]]] = {}
        for path in self.folder.glob("*/config.json"):
            named = FOLDER.fullmatch(path.parent.name)
            if named and named["task"] == task:
                rank = (-figure_of(path.parent), int(named["seed"]), path.parent)
                found.setdefault(named["model"], []).append(rank)
        return {model: min(found[model])[-1] for model in MODELS if model in found}

    def of_task(self, task: str) -> dict[str, torch.nn.Module]:
        """The model of each name that there is for a task. All visitors share them, so nobody may change them."""
        return {model: self.load(task, folder) for model, folder in self.folders(task).items()}

    def load(self, task: str, folder: Path) -> torch.nn.Module:
        # Two visitors at once would load it twice.
        with self.lock:
            if folder not in self.loaded:
                self.loaded[folder] = auto_loader(TASKS[task]).from_pretrained(folder)
            return self.loaded[folder]


def figure_of(folder: Path) -> float:
    """What its seed is compared by, as the checkpoint or the page of results has it; else 0."""
    for path in (folder / "results.json", folder.parents[1] / "results" / "runs" / f"{folder.name}.json"):
        if path.is_file():
            return mean_figure(json.loads(path.read_text(encoding="utf-8")))
    return 0.0
