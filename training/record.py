"""What a finished run leaves beside its weights: settings, versions, results and a model card."""

import json
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from ..configuration.citations import bibtex
from ..configuration.presets import MODELS
from ..modeling.hub.atomic_files import write_atomically
from ..modeling.hub.contents import damaged_files, describe_damage, has_checksums
from .arguments import LAST, TrainingRun, UsageError
from .checkpoints import all_checkpoints, last_whole_checkpoint
from .evaluation import main_metric

RUN, RESULTS, CARD_FILE, PLOT = "run.json", "results.json", "README.md", "results.png"
# What a user may have in a folder before the run, and would lose.
OVERWRITTEN = (CARD_FILE, PLOT, "config.json", "model.safetensors", "trainer_state.json")
PACKAGES = ("mamba3_nplr", "torch", "transformers", "accelerate", "safetensors", "numpy")

CARD = """
# {model} on {task}

{description} The model has {parameters:,} parameters and was trained for {updates:,} updates of {batch_size} fresh
sequences each, with the `{preset}` preset and seed {seed}.

## Results

Share of the test sequences whose {figure} is right. *Chance* is the best guess that does not follow the state. The test
sets share no random numbers with training; this is one run with one seed.

| Test set | {size_name} | {model} | Chance |
| --- | --- | --- | --- |
{rows}
{plot}
`results.json` has all figures{more}.

## Use

```python
{example}
```

{explanation} Where `mamba3_nplr` is installed, `import mamba3_nplr` replaces
`trust_remote_code=True`.

## Training

```bash
{command}
```

gives the same run again with the versions that it ran with; `run.json` has its settings in full:

{versions}

## Limits

It knows one synthetic task, and only inputs drawn as in that task. What it does on sequences longer than those it was
trained on is in the table, and nothing is known about longer ones. It was trained in {precision}; other precisions were
not tried.

## Citation

The paper of the tasks and the reflection, and that of the model it is compared with or built on:

```bibtex
{citations}
```
"""

DESCRIPTIONS = {
    "AutoModelForSequenceClassification": "Reads words over the group {group} and predicts the product of each prefix.",
    "AutoModelForBehaviorCloning": "Plays the shell game: five like cups are swapped, and it reaches for the ball.",
}

EXAMPLES = {
    "AutoModelForSequenceClassification": """from transformers import pipeline

checkpoint = "{name}"
track = pipeline("state-tracking", model=checkpoint, trust_remote_code=True)
for prefix in track("{word}"):
    print(prefix["token"], prefix["permutation"], prefix["score"])""",
    "AutoModelForBehaviorCloning": """import numpy as np
from transformers import pipeline

checkpoint = "{name}"
act = pipeline("behavior-cloning", model=checkpoint, trust_remote_code=True)
actions = act(np.zeros((213, 16)))  # an episode at once
for action in act(iter(np.zeros((5, 16)))):  # or one observation at a time
    print(action)""",
}

EXPLANATIONS = {
    "AutoModelForSequenceClassification": "`AutoModelForSequenceClassification` loads the model itself, whose "
    "`prefix_logits` are\nthose of every prefix.",
    "AutoModelForBehaviorCloning": "`AutoModel` loads the policy itself: `reset()` starts an episode, "
    "`select_action(observation)` is a step.",
}


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2)
    # Lists of numbers on one line: accuracy by position would otherwise be thousands of lines.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
    write_atomically(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def environment() -> dict[str, str]:
    """Versions of what computes the results."""
    # The metadata of torch do not always tell its build, such as +cpu.
    versions = {name: version(name) for name in PACKAGES} | {"torch": torch.__version__}
    machine = f"{platform.system()} {platform.machine()}"
    return {"python": platform.python_version(), **versions, "machine": machine, "git": git_revision()}


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


def run_record(run: TrainingRun) -> dict:
    """The settings of a run; `--config` reads them."""
    return {"arguments": run.arguments, "command": command(run), "environment": environment()}


def command(run: TrainingRun) -> str:
    """A command that trains the same model: names, and what differs from what they stand for."""
    names = {"task": run.task_name, "model": run.model_name, "preset": run.preset, "seed": run.args.seed}
    words = ["python", "train_hf.py"]
    for name, value in (names | run.changed).items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def find_checkpoint(run: TrainingRun) -> str | None:
    """The checkpoint to go on from. A run is mixed neither with another in its folder nor with other settings."""
    folder, asked = Path(run.args.output_dir), run.args.resume_from_checkpoint
    if asked is None:
        if all_checkpoints(folder) or (folder / RESULTS).exists():
            raise UsageError(
                f"output_dir={str(folder)!r} holds a run. Give --resume_from_checkpoint to go on with it, or another "
                "--output_dir."
            )
        lost = [name for name in OVERWRITTEN if (folder / name).exists()]
        if lost:
            raise UsageError(
                f"output_dir={str(folder)!r} holds {', '.join(lost)}, which the run would overwrite. Give another "
                "--output_dir."
            )
        return None
    if asked == LAST:
        checkpoint = find_last(folder)
        if checkpoint is None:
            return None  # the run was ended before its first checkpoint, or starts anew
    else:
        checkpoint, damaged = Path(asked), damaged_files(Path(asked))
        if damaged:
            raise UsageError(
                f"resume_from_checkpoint={asked!r} is no whole checkpoint: {describe_damage(damaged)}. The last one in "
                f"{folder}: {last_whole_checkpoint(folder) or 'none'}."
            )
    if not has_checksums(checkpoint):
        print(f"{checkpoint} is of an earlier version: only the sizes of its files were compared.", file=sys.stderr)
    earlier = json.loads((checkpoint / RUN).read_text(encoding="utf-8"))["arguments"]
    differences = run.differences(earlier)
    if differences:
        raise UsageError(f"{checkpoint} comes from a run with other settings ({'; '.join(differences)}).")
    return str(checkpoint)


def find_last(folder: Path) -> Path | None:
    """The last whole checkpoint of a run; says which later ones are not whole, and why."""
    for checkpoint in reversed(all_checkpoints(folder)):
        damaged = damaged_files(checkpoint)
        if not damaged:
            return checkpoint
        print(f"{checkpoint} is not whole and not used: {describe_damage(damaged)}.", file=sys.stderr)
    if all_checkpoints(folder):
        print(f"{folder} has no whole checkpoint: the run starts anew.", file=sys.stderr)
    return None


def summary(run: TrainingRun, model: nn.Module, results: dict, losses: dict[int, float]) -> dict:
    """
    Args:
        losses: The mean loss since the entry before, by the number of updates.
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
        "metric": main_metric(run.task),
        "results": results,
        "command": command(run),
        "environment": environment(),
    }


def model_card(run: TrainingRun, summary: dict, name: str, plot: bool = False) -> str:
    """
    Args:
        name: The folder or repository from which the example loads.
        plot: Whether there is a picture of the results.
    """
    words = run.auto_class == "AutoModelForSequenceClassification"
    metric, results = summary["metric"], summary["results"]
    rows = [
        f"| `{split}` | {size:,} | {100 * results[split][metric]:.2f} % | {100 * results[split]['chance']:.2f} % |"
        for split, size in run.task.test_sizes.items()
    ]
    text = CARD.format(
        model=run.model_name,
        task=run.task_name,
        description=DESCRIPTIONS[run.auto_class].format(group=getattr(run.task, "group", "")),
        parameters=summary["parameters"],
        updates=summary["updates"],
        batch_size=summary["batch_size"],
        preset=run.preset,
        seed=run.args.seed,
        figure="last product" if words else "reach",
        size_name="Length" if words else "Windows",
        rows="\n".join(rows),
        plot=f"\n![{metric.replace('_', ' ')} by size of the test set]({PLOT})\n" if plot else "",
        more=", accuracy by position too" if words else ", success for each number of swaps too",
        example=EXAMPLES[run.auto_class].format(name=name, word=" ".join((run.config.token_names or [])[:3])),
        explanation=EXPLANATIONS[run.auto_class],
        command=summary["command"],
        versions=", ".join(f"{key} {value}" for key, value in summary["environment"].items() if value),
        citations=bibtex(*MODELS[run.model_name].papers),
        precision="bfloat16" if run.args.bf16 else "float16" if run.args.fp16 else "float32",
    )
    return f"---\n{metadata(run, summary).to_yaml()}\n---\n{text}"


def metadata(run: TrainingRun, summary: dict) -> ModelCardData:
    words = run.auto_class == "AutoModelForSequenceClassification"
    metric = "accuracy" if words else "success-rate"
    results = [
        EvalResult(
            task_type="text-classification" if words else "robotics",
            task_name="group word problem" if words else "shell game",
            dataset_type=run.task_name,
            dataset_name=run.task_name,
            dataset_split=split,
            metric_type=metric,
            metric_name=summary["metric"].replace("_", " "),
            metric_value=figures[summary["metric"]],
        )
        for split, figures in summary["results"].items()
    ]
    return ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        tags=["state-tracking", "mamba3", "state-space-model", run.task_name, run.config.model_type],
        model_name=f"{run.model_name} on {run.task_name}",
        eval_results=results,
    )
