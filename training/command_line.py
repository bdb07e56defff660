"""What a command line and a configuration file say, field by field; nothing of it is put together here."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration.presets import MODELS, PRESETS
from ..datasets_scripts.tasks import TASKS
from .usage import UsageError

LAST = "last"  # the value of --resume_from_checkpoint if none is given


@dataclass
class RunArguments:
    """What this program adds to the fields of TrainingArguments."""

    _argument_group_name = "what to train"

    task: str = field(default="s5_generators", metadata={"help": f"one of {', '.join(TASKS)}"})
    model: str = field(default="nplr", metadata={"help": f"one of {', '.join(MODELS)}"})
    preset: str = field(
        default="quick",
        metadata={"help": "; ".join(f"{name}: {preset.description}" for name, preset in PRESETS.items())},
    )
    config: str | None = field(
        default=None,
        metadata={"help": "YAML or JSON file with any of these fields, such as the run.json of an earlier run"},
    )
    consistency: float = field(
        default=0.0,
        metadata={"help": "weight at the end of the term by which heads read the same where the same is to be known"},
    )
    consistency_start: float = field(default=0.12, metadata={"help": "part of the run after which it begins, with 1"})
    consistency_full: float = field(default=0.6, metadata={"help": "part of the run after which it has grown"})
    consistency_limit: float = field(
        default=0.0,
        metadata={"help": "heads of which a larger part than this is unexplained are read no more; 0: all are read"},
    )
    consistency_noise: float = field(
        default=0.0,
        metadata={"help": "variance of noise in what heads read, over what is unexplained; it grows with the weight"},
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "how many processes must have been started; fewer or more are an error"}
    )


class ParsedTrainingArguments(TrainingArguments):
    _argument_group_name = "how to train: fields of transformers.TrainingArguments"


# Shown by --help; --help_all shows every field, as transformers describes it.
OFTEN_USED = {
    "output_dir": "where checkpoints and results go (default: runs/TASK-MODEL-PRESET-seedSEED)",
    "resume_from_checkpoint": "resume from this checkpoint or, with no value, from the last whole one in output_dir",
    "seed": "of the first weights and of all batches",
    "max_steps": "updates; a curriculum is stretched to them",
    "learning_rate": "largest learning rate",
    "lr_scheduler_type": "cosine, constant, linear, ...",
    "per_device_train_batch_size": "rows for a process and pass; task.batch_size follows, or give that one",
    "gradient_accumulation_steps": "parts in which a process works through its share of a batch",
    "bf16": "mixed precision",
    "use_cpu": "even if there is a GPU",
    "logging_steps": "updates between log entries; below 1 a part of the run",
    "eval_steps": "the same between evaluations on the validation set",
    "save_steps": "the same between checkpoints",
    "save_total_limit": "checkpoints that are kept",
    "report_to": "tensorboard (default if installed), trackio, wandb, none, ...",
    "push_to_hub": "upload the model, with its card when it is finished",
    "hub_model_id": "under this name",
    "hub_strategy": "every_save: the model of each checkpoint too; end: only the finished one",
}

# Fields of TrainingArguments that cannot be honoured here, and what to use instead.
REFUSED = {
    "num_train_epochs": "every update gets a fresh batch, so there are no epochs: give --max_steps",
    "label_smoothing_factor": "it is a field of the model: give --model.label_smoothing",
    "auto_find_batch_size": "the batch of a step is fixed: give --gradient_accumulation_steps to save memory",
    "ignore_data_skip": "a resumed run continues with the batch of its step",
    "save_only_model": "a run could not be resumed: delete the checkpoints once it has finished",
}

# Fields whose default follows from others.
SETTLED_LATER = ("max_steps", "num_train_epochs", "output_dir", "per_device_train_batch_size", "report_to")


def parse_fields(arguments: list[str]) -> tuple[dict, dict, dict]:
    """Our own fields, those of TrainingArguments, and the defaults of the latter in transformers."""
    parser = make_parser()
    own_names = [f.name for f in dataclasses.fields(RunArguments)]
    defaults = {action.dest: parser.get_default(action.dest) for action in parser._actions}
    names = parse_names(parser, arguments)
    parser.set_defaults(**PRESETS[names["preset"]].training | MODELS[names["model"]].training)
    parser.set_defaults(**dict.fromkeys(SETTLED_LATER))
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        refuse_unknown(unknown[0], parser, MODELS[names["model"]].model_type)
    values = vars(namespace)
    for name, reason in REFUSED.items():
        if values[name] != parser.get_default(name):
            raise UsageError(f"--{name} cannot be used: {reason}.")
    values["num_train_epochs"] = defaults["num_train_epochs"]
    if isinstance(values["lr_scheduler_kwargs"], str):
        # Given by a preset it is none, and records must not tell the two apart.
        values["lr_scheduler_kwargs"] = read_value(values["lr_scheduler_kwargs"])
    return {name: values.pop(name) for name in own_names}, values, defaults


def parse_names(parser: HfArgumentParser, arguments: list[str]) -> dict[str, str]:
    """The task, the model and the preset that a command line names."""
    given = vars(parser.parse_known_args(arguments)[0])
    for kind, known in (("task", TASKS), ("model", MODELS), ("preset", PRESETS)):
        check_name(kind, given[kind], known)
    return {kind: given[kind] for kind in ("task", "model", "preset")}


def make_parser(everything: bool = False) -> HfArgumentParser:
    """
    Args:
        everything: Whether the help describes all fields of TrainingArguments, and not only those often used.
    """
    parser = HfArgumentParser(
        [RunArguments, ParsedTrainingArguments],
        prog="train_hf.py",
        usage="train_hf.py [--task TASK] [--model MODEL] [--preset PRESET] [--FIELD VALUE ...]\n"
        "       train_hf.py compare --models MODEL ... [the same]\n"
        "       train_hf.py evaluate CHECKPOINT [--task TASK]",
        description="Trains a model on a task.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    resume = parser._option_string_actions["--resume_from_checkpoint"]
    resume.nargs, resume.const = "?", LAST
    parser._option_string_actions["--report_to"].nargs = "+"
    of_transformers = {f.name for f in dataclasses.fields(TrainingArguments)}
    for action in parser._actions:
        action.option_strings = action.option_strings[:1]  # the help need not repeat names with hyphens
        if action.dest in of_transformers:
            help_of_others = " ".join(action.help.split()) if everything and action.help else argparse.SUPPRESS
            action.help = OFTEN_USED.get(action.dest, help_of_others)
            action.metavar = action.metavar or "VALUE"
    return parser


def split_overrides(arguments: list[str]) -> tuple[dict, list[str]]:
    """Takes `--model.FIELD VALUE` and `--task.FIELD VALUE` out of a command line."""
    overrides, rest, waiting = {}, [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith(("--model.", "--task.")):
            rest.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"--{name} needs a value.")
            value = waiting.pop(0)
        overrides[name] = read_value(value)
    return overrides, rest


def read_value(text: str):
    """A value as in JSON, or else the text itself."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def find_config(arguments: list[str]) -> str | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    return finder.parse_known_args(arguments)[0].config


def read_file(path: str | None) -> tuple[dict, list[str]]:
    """The fields of a file, as overrides and as the arguments of a command line."""
    if path is None:
        return {}, []
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"config={path!r} cannot be read as YAML or JSON: {error}") from error
    fields = content.get("arguments", content) if isinstance(content, dict) else content
    if not isinstance(fields, dict):
        raise UsageError(f"config={path!r} is not allowed: the file, or `arguments` in it, must hold names and values.")
    overrides, arguments = {}, []
    for name, value in fields.items():
        if str(name).startswith(("model.", "task.")):
            # In YAML 1e-3 is a text.
            overrides[name] = read_value(value) if isinstance(value, str) else value
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *(json.dumps(x) if isinstance(x, bool | dict) else str(x) for x in values)]
    return overrides, arguments


def part(overrides: dict, prefix: str) -> dict:
    """The overrides of the model, or of the task, by their own names."""
    chosen = {name.partition(".")[2]: x for name, x in overrides.items() if name.startswith(f"{prefix}.")}
    return {name: tuple(x) if isinstance(x, list) and prefix == "task" else x for name, x in chosen.items()}


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f"Did you mean `{close[0]}`? " if close else ""
        raise UsageError(f"{kind}={name!r} is unknown. {hint}The {kind}s are: {', '.join(known)}.")


def refuse_unknown(argument: str, parser: argparse.ArgumentParser, model_type: str) -> None:
    if not argument.startswith("--"):
        raise UsageError(f"{argument!r} is not expected here: fields are given as --FIELD VALUE.")
    name = argument[2:].partition("=")[0].replace("-", "_")
    fields = [f"model.{f.name}" for f in dataclasses.fields(CONFIG_MAPPING[model_type])]
    fields += [f"task.{f.name}" for task in TASKS.values() for f in dataclasses.fields(task)]
    # Someone may have forgotten the first part of a name.
    whole = {field.partition(".")[2]: field for field in fields} | {
        action.dest: action.dest for action in parser._actions
    }
    close = difflib.get_close_matches(name, [*whole, *fields], n=1)
    hint = f"Did you mean `--{whole.get(close[0], close[0])}`?" if close else "train_hf.py --help lists the fields."
    raise UsageError(f"--{name} is unknown. {hint}")
