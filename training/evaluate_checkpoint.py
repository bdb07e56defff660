"""
Evaluates a checkpoint, a folder or a repository of the Hub, on the test sets of a task.

    python train_hf.py evaluate CHECKPOINT [--task TASK] [--task.FIELD VALUE ...]
"""

import argparse
import json
import re
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from ..datasets_scripts.task import Task, check_at_least
from ..datasets_scripts.tasks import make_task
from ..modeling.auto import AutoModelForBehaviorCloning
from ..modeling.hub.errors import clear_errors
from . import record as run_record
from .arguments import UsageError, build, head_of, make_folder, part, split_overrides
from .evaluation import evaluate, main_metric


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
    check_options(given)
    check_checkpoint(given.checkpoint)
    trained_on, recorded = recorded_task(given.checkpoint, needed=given.task is None)
    name, changed = given.task or trained_on, part(overrides, "task")
    if name is None:
        raise UsageError(f"{given.checkpoint} has no {run_record.RUN}, so --task is needed.")
    task = build(make_task, name, **(recorded if given.task is None else {}) | changed)
    for split in given.splits or []:
        build(task.check_split, split, 0, 0)
    refusal = f"{given.checkpoint} was trained on {trained_on or 'another task'} and cannot do {name}"
    refusal += "".join(f", {setting}={value}" for setting, value in changed.items())
    model = load_model(given.checkpoint, task, refusal, given.trust_remote_code)
    results = evaluate(model.to(given.device), task, given.splits, given.batch_size, given.piece_length, progress=True)
    metric = main_metric(task)
    print(f"\n{given.checkpoint} on {name}, in per cent\n")
    print(f"| test set | {metric.replace('_', ' ')} | chance |\n| --- | --- | --- |")
    for split, found in results.items():
        print(f"| {split} | {100 * found[metric]:.2f} | {100 * found['chance']:.2f} |")
    if given.out:
        summary = {"checkpoint": given.checkpoint, "task": name, "metric": metric, "results": results}
        run_record.write_json(given.out, summary | {"environment": run_record.environment()})


def check_options(given: argparse.Namespace) -> None:
    """Refuses what would otherwise show in the middle of the work, or after it."""
    for name in ("batch_size", "piece_length"):
        build(check_at_least, name, getattr(given, name), 1)
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


def find_file(checkpoint: str, name: str, local_files_only: bool = False) -> str | None:
    return cached_file(
        checkpoint,
        name,
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def recorded_task(checkpoint: str, needed: bool) -> tuple[str | None, dict]:
    """
    The task that a checkpoint was trained on, and its settings, by its own record; None if there is none. A damaged one
    is an error only where it is needed.
    """
    path = find_file(checkpoint, run_record.RUN)
    if path is None:
        return None, {}
    try:
        arguments = json.loads(Path(path).read_text(encoding="utf-8"))["arguments"]
        return arguments["task"], part(arguments, "task")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not needed:
            return None, {}
        raise UsageError(f"{path} holds no record of a run ({error!r}): give --task.") from error


def load_model(checkpoint: str, task: Task, refusal: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """
    The model of a checkpoint, if it can do the task at all.

    Args:
        refusal: What to say if it cannot; the reason follows.
    """
    options = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint, **options)
        # Before the weights, about which transformers would have much to say.
        reason = why_not(config, task)
        if reason:
            raise UsageError(f"{refusal}: {reason}.")
        model, loading = auto_class(task).from_pretrained(checkpoint, output_loading_info=True, **options)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{checkpoint} cannot be loaded: {error}") from error
    if loading["missing_keys"]:
        raise UsageError(f"{refusal}: it has no weights called {', '.join(sorted(loading['missing_keys']))}.")
    return model


def why_not(config: PreTrainedConfig, task: Task) -> str | None:
    """Why a model of this configuration cannot do a task; None if it can."""
    head = head_of(task).removeprefix("AutoModel")
    architecture = (config.architectures or [head])[0]
    if not architecture.endswith(head):
        return f"it is a {architecture}, the task is for a model {head}"
    # How frames and episodes are weighed matters to the loss only.
    needed = {name: x for name, x in task.model_fields.items() if name not in ("cue_weight", "episode_loss")}
    found = {name: getattr(config, name, None) for name in needed}
    if found != needed:
        has, needs = (", ".join(f"{name}={x}" for name, x in sizes.items()) for sizes in (found, needed))
        return f"it has {has}, the task needs {needs}"
    # Two groups may have as many elements; a checkpoint that names its letters names its elements too.
    names = task.model_names if getattr(config, "token_names", None) else {}
    if any(getattr(config, name) != x for name, x in names.items()):
        return "its letters and elements have other names"
    return None
