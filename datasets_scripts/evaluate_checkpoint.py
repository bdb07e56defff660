"""
Evaluates a checkpoint, a folder or a repository of the Hub, on the test sets of a task.

    python train_hf.py evaluate CHECKPOINT [--task TASK] [--task.FIELD VALUE ...]
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers.utils import cached_file

from ..modeling.auto import AutoModelForBehaviorCloning
from . import run_record
from .evaluation import evaluate, main_metric
from .task import Task
from .tasks import make_task
from .training_run import UsageError, build, head_of, part, split_overrides


def auto_class(task: Task) -> type:
    """The Auto class whose models learn a task."""
    own = {"AutoModelForBehaviorCloning": AutoModelForBehaviorCloning}
    name = head_of(task)
    return own.get(name) or getattr(transformers, name)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_hf.py evaluate",
        allow_abbrev=False,
        description="Evaluates a checkpoint on the test sets of a task. --task.FIELD VALUE changes a setting of it, as "
        "--task.test_lengths [64,8192] does.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder, or a repository of the Hub")
    parser.add_argument("--task", help="the task (default: the one in the checkpoint's run.json)")
    parser.add_argument("--splits", nargs="+", metavar="SPLIT", help="some of the test sets (default: all)")
    parser.add_argument("--batch_size", type=int, default=128, help="sequences in a pass (default: %(default)s)")
    parser.add_argument("--piece_length", type=int, default=128, help="positions in a pass (default: %(default)s)")
    parser.add_argument("--device", default=device, help="(default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the checkpoint carries")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def evaluate_command(arguments: list[str]) -> None:
    overrides, arguments = split_overrides(arguments)
    given = make_parser().parse_args(arguments)
    name, settings = given.task, part(overrides, "task")
    if name is None:
        name, recorded = recorded_task(given.checkpoint)
        settings = recorded | settings
    task = build(make_task, name, **settings)
    for split in given.splits or []:
        build(task.check_split, split, 0, 0)
    model = load_model(given.checkpoint, task, given.trust_remote_code).to(given.device)
    results = evaluate(model, task, given.splits, given.batch_size, given.piece_length, progress=True)
    metric = main_metric(task)
    print(f"\n{given.checkpoint} on {name}, in per cent\n")
    print(f"| test set | {metric.replace('_', ' ')} | chance |\n| --- | --- | --- |")
    for split, found in results.items():
        print(f"| {split} | {100 * found[metric]:.2f} | {100 * found['chance']:.2f} |")
    if given.out:
        summary = {"checkpoint": given.checkpoint, "task": name, "metric": metric, "results": results}
        run_record.write_json(given.out, summary | {"environment": run_record.environment()})


def recorded_task(checkpoint: str) -> tuple[str, dict]:
    """The task that a checkpoint was trained on, by its own record."""
    path = cached_file(checkpoint, run_record.RUN, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise UsageError(f"{checkpoint} has no {run_record.RUN}, so --task is needed.")
    arguments = json.loads(Path(path).read_text(encoding="utf-8"))["arguments"]
    return arguments["task"], part(arguments, "task")


def load_model(checkpoint: str, task: Task, trust_remote_code: bool = False):
    """The model of a checkpoint, if it can do the task at all."""
    try:
        model, loading = auto_class(task).from_pretrained(
            checkpoint, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{checkpoint} cannot be loaded: {error}") from error
    # How frames and episodes are weighed matters to the loss only.
    needed = {name: x for name, x in task.model_fields.items() if name not in ("cue_weight", "episode_loss")}
    found = {name: getattr(model.config, name, None) for name in needed}
    if found != needed or loading["missing_keys"]:
        raise UsageError(
            f"{checkpoint} was not trained on such a task: it has {found}"
            f"{' and another head' if loading['missing_keys'] else ''}, the task needs {needed}."
        )
    return model
