"""What a run leaves beside its weights: its settings, the versions it ran with, and what it found."""

import json
import platform
import re
import shlex
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from ..modeling.hub.atomic_files import write_atomically
from .arguments import TrainingRun

RUN, RESULTS, CARD_FILE, PLOT = "run.json", "results.json", "README.md", "results.png"
# By which mathematics a run is made. The number is raised by whatever changes what the same command finds, but for
# rounding: the equations of a model, its first weights, what a task draws or measures, presets, the order of batches.
# Faster code for the same equations is no such change. A run of another number is not resumed, and not in the tables.
MATHEMATICS = 1
PACKAGES = ("mamba3_nplr", "torch", "transformers", "accelerate", "safetensors", "numpy")


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2)
    # Lists of numbers on one line: accuracy by position would otherwise be thousands of lines.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
    write_atomically(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def environment() -> dict[str, str | int | None]:
    """Versions of what computes the results, and what it runs on; `threads` are those of torch in this process."""
    # The metadata of torch do not always tell its build, such as +cpu.
    versions = {name: version(name) for name in PACKAGES} | {"torch": torch.__version__}
    return {
        "python": platform.python_version(),
        **versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "git": git_revision(),
    }


def processor() -> str | None:
    """The name that the processor gives itself; Linux does not know it of every kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def git_revision() -> str | None:
    """The revision of this file's repository, if it is in one; "+" marks changes since."""

    def git(*arguments):
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside a repository that is not its own.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def run_settings(run: TrainingRun) -> dict:
    """The settings of a run; `--config` reads them."""
    return {
        "arguments": run.arguments,
        "command": command(run),
        "mathematics": MATHEMATICS,
        "environment": environment(),
    }


def command(run: TrainingRun) -> str:
    """A command that trains the same model: names, and what differs from what they stand for."""
    names = {"task": run.task_name, "model": run.model_name, "preset": run.preset, "seed": run.args.seed}
    words = ["python", "train_hf.py"]
    for name, value in (names | run.changed).items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def mean_figure(summary: dict) -> float:
    """The main metric of a run, from 0 to 1, over all its test sets: what its seeds are compared by."""
    return statistics.mean(figures[summary["metric"]] for figures in summary["results"].values())


def summary(
    run: TrainingRun, settings: dict, model: nn.Module, results: dict, losses: dict[int, float], seconds: float | None
) -> dict:
    """
    Args:
        settings: Those of the run when it began: the revision may be another one by now.
        losses: The mean loss since the entry before, by the number of updates.
        seconds: Of the training, without the tests.
    """
    return {
        "task": run.task_name,
        "model": run.model_name,
        "preset": run.preset,
        "seed": run.args.seed,
        "parameters": model.num_parameters(),
        "updates": run.args.max_steps,
        "batch_size": run.task.batch_size,
        "last_loss": next(reversed(losses.values()), None),
        "logged_updates": list(losses),
        "logged_losses": list(losses.values()),
        "metric": run.task.main_metric,
        "results": results,
        "seconds": None if seconds is None else round(seconds, 1),
        **{name: settings[name] for name in ("command", "mathematics", "environment")},
    }
