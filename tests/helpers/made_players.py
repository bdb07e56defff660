"""Models for the page, with weights that nobody has trained: what is tested does not depend on how well they play."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.datasets_scripts.tasks import TASKS
from mamba3_nplr.training.models import new_model

TASKS_OF_PAGE = ("s5_generators", "z5", "shell", "shell_jitter")
MODELS_OF_PAGE = ("nplr_exact", "nplr", "mamba3")


def save_player(folder: Path, task: str, model: str, seed: int = 0) -> Path:
    """Saves one as TASK-MODEL-seedSEED, as small as that can be while it still has several heads."""
    preset, wanted = MODELS[model], TASKS[task]
    fields = {"hidden_size": 16, "head_dim": 8, "state_size": 8, "num_rope_pairs": 2}
    fields |= wanted.model_fields | wanted.model_names | preset.fields_of(wanted.auto_class)
    torch.manual_seed(sum(map(ord, task + model)) + seed)
    made = new_model(wanted, AutoConfig.for_model(preset.model_type, **fields))
    place = folder / f"{task}-{model}-seed{seed}"
    made.save_pretrained(place)
    return place


def called_directly(policy: torch.nn.Module, observations: np.ndarray) -> np.ndarray:
    """Actions (frames, 2) for a whole episode in one call, without a page or a control loop."""
    with torch.no_grad():
        return policy(observations=torch.from_numpy(observations)[None]).actions[0].numpy()


def save_players(folder: Path) -> Path:
    """Those that the page would like to have, in a folder."""
    for task in TASKS_OF_PAGE:
        for model in MODELS_OF_PAGE:
            save_player(folder, task, model)
    return folder
