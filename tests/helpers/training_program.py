"""train_hf.py as a module, a tiny run of it, and a way to end a run in its middle."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

from helpers.places import ROOT
from mamba3_nplr.training import trainer

PROGRAM = ROOT / "train_hf.py"
TINY_MODEL = {"hidden_size": 12, "state_size": 6, "head_dim": 4, "num_rope_pairs": 2}
# The curriculum grows to the end; log entries (every 2 updates) and checkpoints (every 3) do not fall together.
TINY = [
    *[f"--model.{name}={value}" for name, value in TINY_MODEL.items()],
    "--task.batch_size=4",
    "--task.curriculum_part=1",
    "--max_steps=8",
    "--logging_steps=2",
    "--save_steps=3",
    "--eval_steps=4",
    "--report_to=none",
    "--disable_tqdm=true",
    "--use_cpu",
]
WORDS = [*TINY, "--task.length=8", "--task.start_length=2", "--task.test_size=6", "--task.test_lengths=[8,20]"]
EPISODES = [*TINY, "--task=shell_jitter", "--task.windows=2", "--task.max_swaps=2", "--task.start_swaps=0"]
EPISODES += ["--task.test_size=6", "--task.test_windows=[1,3]"]


def load_program():
    specification = importlib.util.spec_from_file_location("train_hf", PROGRAM)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def log_of(folder):
    """All log entries of a run, but for what clocks say."""
    entries = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "train_runtime" not in entry]


def call_at_step(step, action):
    """Calls `action` before the update of this number, counted from 0."""
    training_step = trainer.ResumableTrainer.training_step

    def act(self, *arguments, **keywords):
        if self.state.global_step == step:
            action(self)
        return training_step(self, *arguments, **keywords)

    return act


def kill_while_saving(step):
    """SIGKILL when all files of the checkpoint of this step are there but for the last."""
    write_contents = trainer.write_contents

    def kill(folder, names):
        if folder.name == f"checkpoint-{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        write_contents(folder, names)

    trainer.write_contents = kill


if __name__ == "__main__":
    kill_while_saving(int(sys.argv[1]))
    load_program().main(sys.argv[2:])
