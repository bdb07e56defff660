"""
Evaluates a checkpoint, a folder or a repository of the Hub, on the test sets of a task, or in its environment.

    python train_hf.py evaluate CHECKPOINT [--task TASK] [--task.FIELD VALUE ...] [--rollouts N]
"""

import argparse
import json
import re
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from transformers.utils import CONFIG_NAME

from ..datasets_scripts.task import check_at_least
from ..datasets_scripts.tasks import make_task
from ..modeling.hub.downloads import find_file
from ..modeling.hub.errors import clear_errors
from . import record
from .command_line import part, split_overrides
from .evaluation import evaluate
from .models import load_model
from .rollouts import check_rollouts, roll_out
from .usage import UsageError, checked, make_folder


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
    parser.add_argument(
        "--rollouts", type=int, metavar="N", help="let the policy act in N episodes of each test set; needs gymnasium"
    )
    parser.add_argument("--batch_size", type=int, default=128, help="sequences in a pass (default: %(default)s)")
    parser.add_argument("--piece_length", type=int, default=128, help="positions in a pass (default: %(default)s)")
    parser.add_argument("--device", default=device, help="(default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the checkpoint carries")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def evaluate_command(arguments: list[str]) -> None:
    overrides, arguments = split_overrides(arguments)
    given = make_parser().parse_args(arguments)
    check_options(given)
    check_checkpoint(given.checkpoint)
    trained_on, recorded = recorded_task(given.checkpoint, needed=given.task is None)
    name, changed = given.task or trained_on, part(overrides, "task")
    if name is None:
        raise UsageError(f"{given.checkpoint} has no {record.RUN}, so --task is needed.")
    task = checked(make_task, name, **(recorded if given.task is None else {}) | changed)
    for split in given.splits or []:
        checked(task.check_split, split, 0, 0)
    splits = given.splits or list(task.test_sizes)
    if given.rollouts is not None:
        check_rollouts(task, name, splits, given.rollouts)
    refusal = f"{given.checkpoint} was trained on {trained_on or 'another task'} and cannot do {name}"
    refusal += "".join(f", {setting}={value}" for setting, value in changed.items())
    model = load_model(given.checkpoint, task, refusal, given.trust_remote_code)
    model, acted = model.to(given.device), ""
    if given.rollouts is None:
        results = evaluate(model, task, splits, given.batch_size, given.piece_length, progress=True)
    else:
        results = roll_out(model, task, splits, given.rollouts, given.batch_size, progress=True)
        acted = f", acting in {given.rollouts:,} episodes of each test set"
    print(f"\n{given.checkpoint} on {name}{acted}, in per cent\n")
    print(f"| test set | {task.main_metric.replace('_', ' ')} | chance |\n| --- | --- | --- |")
    for split, found in results.items():
        print(f"| {split} | {100 * found[task.main_metric]:.2f} | {100 * found['chance']:.2f} |")
    if given.out:
        summary = {"checkpoint": given.checkpoint, "task": name, "metric": task.main_metric, "results": results}
        summary |= {} if given.rollouts is None else {"rollouts": given.rollouts}
        record.write_json(given.out, summary | {"environment": record.environment()})


def check_options(given: argparse.Namespace) -> None:
    """Refuses what would otherwise show in the middle of the work, or after it."""
    for name in ("batch_size", "piece_length", "rollouts"):
        if getattr(given, name) is not None:
            checked(check_at_least, name, getattr(given, name), 1)
    try:
        torch.zeros(1, device=given.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device={given.device!r} cannot be used here: {reason}") from error
    if given.out:
        make_folder("out", given.out.parent)
        if given.out.is_dir():
            raise UsageError(f"out={str(given.out)!r} is not allowed: it is a folder, and must be a file.")


def check_checkpoint(checkpoint: str) -> None:
    """Refuses at once what cannot be had: the libraries would ask the Hub again and again for half a minute."""
    if Path(checkpoint).is_dir():
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint):
        raise UsageError(
            f"CHECKPOINT={checkpoint!r} is not allowed: it must be a folder, and there is none of that name, or a "
            "repository of the Hub, USER/NAME."
        )
    try:
        with clear_errors(checkpoint, "found", "Try again."):
            HfApi().model_info(checkpoint, timeout=10)
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{checkpoint} is neither a folder here nor a repository that the Hub shows to the token in use, if any."
        ) from error
    except HfHubHTTPError:
        return  # the Hub can be reached, and loading has better words for what is wrong
    except (HTTPError, OSError) as error:
        if find_file(checkpoint, CONFIG_NAME, local_files_only=True) is None:
            raise UsageError(
                f"{checkpoint} is neither a folder here nor in the cache, and the Hub cannot be reached: {error}"
            ) from error


def recorded_task(checkpoint: str, needed: bool) -> tuple[str | None, dict]:
    """
    The task that a checkpoint was trained on, and its settings, by its own record; None if there is none. A damaged one
    is an error only where it is needed.
    """
    path = find_file(checkpoint, record.RUN)
    if path is None:
        return None, {}
    try:
        arguments = json.loads(Path(path).read_text(encoding="utf-8"))["arguments"]
        return arguments["task"], part(arguments, "task")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not needed:
            return None, {}
        raise UsageError(f"{path} holds no record of a run ({error!r}): give --task.") from error
