"""One training run as settings: names and presets, a file and single fields from the command line, made into one."""

import argparse
import dataclasses
import difflib
import json
import math
import os
import tempfile
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration.presets import HEADS, MODELS, PRESETS
from ..datasets_scripts.task import Task
from ..datasets_scripts.tasks import TASKS, make_task
from .evaluation import scalars
from .limits import check_numbers

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
    num_processes: int | None = field(
        default=None, metadata={"help": "how many processes must have been started; fewer or more are an error"}
    )


class ParsedTrainingArguments(TrainingArguments):
    _argument_group_name = "how to train: fields of transformers.TrainingArguments"


# Shown by --help; --help_all shows every field, as transformers describes it.
OFTEN_USED = {
    "output_dir": "where checkpoints and results go (default: runs/TASK-MODEL-PRESET-seedSEED)",
    "resume_from_checkpoint": "go on from this checkpoint or, with no value, from the last whole one in output_dir",
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
    "ignore_data_skip": "a resumed run goes on with the batch of its step",
    "save_only_model": "a run could not be resumed: delete the checkpoints once it has finished",
}

# Fields whose default follows from others.
SETTLED_LATER = ("max_steps", "num_train_epochs", "output_dir", "per_device_train_batch_size", "report_to")

# Beginnings of what may differ between a run and its continuation: none of it touches weights or logged figures, but
# for the rounding of sums.
MAY_CHANGE = (
    "dataloader_",
    "disable_tqdm",
    "gradient_accumulation_steps",
    "hub_",
    "log_level",
    "push_to_hub",
    "report_to",
    "run_name",
    "save_",
    "use_cpu",
)


class UsageError(ValueError):
    """Something is wrong with what the user asked for; the message says what, and what is allowed."""


@dataclass(frozen=True)
class TrainingRun:
    """
    Args:
        task_name, model_name, preset: Names.
        task: The task, its batches as large as all processes together need them.
        config: Configuration of the model.
        args: For Trainer.
        arguments: All of this by the names of the command line, to be saved and read again.
        changed: Those of them that differ from what the names stand for.
    """

    task_name: str
    model_name: str
    preset: str
    task: Task
    config: PreTrainedConfig
    args: TrainingArguments
    arguments: dict
    changed: dict

    @cached_property
    def auto_class(self) -> str:
        """Name of the Auto class whose model learns the task."""
        return head_of(self.task)

    def differences(self, earlier: dict) -> list[str]:
        """What this run would do otherwise than one with the arguments `earlier`."""
        now = json.loads(json.dumps(self.arguments))
        names = [name for name in {**earlier, **now} if not name.startswith(MAY_CHANGE)]
        changed = [name for name in names if earlier.get(name) != now.get(name)]
        return [f"{name} there: {earlier.get(name)!r}, now: {now.get(name)!r}" for name in changed]


def head_of(task: Task) -> str:
    return HEADS["input_ids" if "vocab_size" in task.model_fields else "observations"]


def parse_run(arguments: list[str]) -> TrainingRun:
    """The run that a command line describes. Later has precedence: preset, file, command line."""
    own, values, task, fields, resolved = resolve(arguments)
    check_processes(own["num_processes"])
    settle_reports(values)
    names = [f"--{name}={own[name]}" for name in ("task", "model", "preset")]
    named = resolve([*names, f"--seed={values['seed']}"])[-1]
    args = make_training_arguments(values)
    check_best_metric(args, task)
    return TrainingRun(
        task_name=own["task"],
        model_name=own["model"],
        preset=own["preset"],
        task=task,
        config=build(AutoConfig.for_model, MODELS[own["model"]].model_type, **task.model_names | fields),
        args=args,
        arguments=resolved,
        changed={x: y for x, y in resolved.items() if named.get(x) != y and not x.startswith(MAY_CHANGE)},
    )


def resolve(arguments: list[str]) -> tuple[dict, dict, Task, dict, dict]:
    """Our own fields, those of TrainingArguments, the task, the fields of the model, and all by their full names."""
    overrides, arguments = split_overrides(arguments)
    in_file, from_file = read_file(find_config(arguments))
    overrides = in_file | overrides
    own, values, defaults = parse_fields(from_file + arguments)
    build(check_numbers, values)
    model, given = MODELS[own["model"]], part(overrides, "task")
    settings = PRESETS[own["preset"]].task
    if own["preset"] == "paper":
        settings = settings | model.paper_task.get(own["task"], {})
    task = settle_sizes(build(make_task, own["task"], **settings | given), values, given)
    fields = model.fields | task.model_fields | part(overrides, "model")
    if values["output_dir"] is None:
        values["output_dir"] = f"runs/{own['task']}-{own['model']}-{own['preset']}-seed{values['seed']}"
    return own, values, task, fields, by_full_name(own, task, fields, values, defaults)


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


def help_text(arguments: Iterable[str] = (), everything: bool = False) -> str:
    """
    Args:
        arguments: A command line; the help is about the task, the model and the preset that it names.
        everything: Whether to describe all fields of TrainingArguments, and not only those often used.
    """
    parser = make_parser(everything)
    _, arguments = split_overrides(list(arguments))
    names = parse_names(parser, read_file(find_config(arguments))[1] + arguments)
    _, _, task, fields, _ = resolve([f"--{kind}={name}" for kind, name in names.items()])
    shown = dataclasses.fields(CONFIG_MAPPING[MODELS[names["model"]].model_type])
    inherited = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    of_model = [f"{f.name}={fields.get(f.name, f.default)!r}" for f in shown if f.name not in inherited]
    of_task = [f"{name}={x!r}" for name, x in task.settings.items()]
    hidden = [] if everything else [f.name for f in dataclasses.fields(TrainingArguments) if f.name not in OFTEN_USED]
    parts = [
        (f"fields of the model, here of {names['model']} (--model): --model.FIELD VALUE", of_model),
        (f"settings of the task, here of {names['task']} (--task): --task.FIELD VALUE", of_task),
        ("other fields of TrainingArguments (--help_all describes them): --FIELD VALUE", hidden),
    ]
    epilog = "\n\n".join(f"{title}\n{wrapped(names)}" for title, names in parts if names)
    return f"{parser.format_help()}\n{epilog}\n"


def wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


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


def build(function, *arguments, **fields):
    """Calls a constructor whose errors are about what the user gave."""
    try:
        return function(*arguments, **fields)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        # Strict configurations raise errors of their own, which wrap ours.
        if type(error).__module__.startswith("huggingface_hub"):
            raise UsageError(" ".join(str(error).split())) from error
        raise


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
    # Someone may have left out the first part of a name.
    whole = {field.partition(".")[2]: field for field in fields} | {
        action.dest: action.dest for action in parser._actions
    }
    close = difflib.get_close_matches(name, [*whole, *fields], n=1)
    hint = f"Did you mean `--{whole.get(close[0], close[0])}`?" if close else "train_hf.py --help lists the fields."
    raise UsageError(f"--{name} is unknown. {hint}")


def settle_sizes(task: Task, values: dict, given: dict) -> Task:
    """Makes updates and batch sizes agree, whether they were given for the task or for Trainer."""
    shares = int(os.environ.get("WORLD_SIZE", 1)) * values["gradient_accumulation_steps"]
    if values["per_device_train_batch_size"] is not None:
        batch_size = values["per_device_train_batch_size"] * shares
        if given.get("batch_size", batch_size) != batch_size:
            raise UsageError(
                f"--task.batch_size {given['batch_size']} and --per_device_train_batch_size "
                f"{values['per_device_train_batch_size']} times {shares} shares of a batch do not agree: give one."
            )
        task = build(dataclasses.replace, task, batch_size=batch_size)
    if task.batch_size % shares:
        raise UsageError(
            f"task.batch_size={task.batch_size} is not allowed: it must be a multiple of processes times "
            f"gradient_accumulation_steps, {shares}."
        )
    values["per_device_train_batch_size"] = task.batch_size // shares
    if values["max_steps"] is None:
        values["max_steps"] = task.total_steps
    elif "total_steps" not in given:
        task = build(dataclasses.replace, task, total_steps=values["max_steps"])
    return task


def check_processes(wanted: int | None) -> None:
    """Stops if fewer processes were started than someone asked for: some launchers start one without a word."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    advice = "Start them with torchrun --nproc_per_node N train_hf.py ..."
    if wanted is not None and wanted != started:
        raise UsageError(f"num_processes={wanted} were asked for and {started} started. {advice}")
    if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ:
        raise UsageError(
            f"MASTER_ADDR is set, so a launcher was asked for several processes, but only this one started. {advice}"
        )


def settle_reports(values: dict) -> None:
    """TensorBoard by default where it is installed; what is asked for and missing is an error, before any training."""
    installed = get_available_reporting_integrations()
    if values["report_to"] is None:
        values["report_to"] = ["tensorboard"] if "tensorboard" in installed else ["none"]
    for name in values["report_to"]:
        if name not in ("all", "none", *installed):
            here = f"Installed here: {', '.join(installed) or 'nothing of the kind'}."
            raise UsageError(f"report_to={name} needs the package of that name: pip install {name}. {here}")


def make_training_arguments(values: dict) -> TrainingArguments:
    # Without this Accelerate would start processes on a machine without GPUs that do not know of each other.
    use_cpu = values["use_cpu"] or not torch.accelerator.is_available()
    args = build(TrainingArguments, **values | updates_between(values) | {"use_cpu": use_cpu})
    started = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != started:
        raise UsageError(f"{started} processes were started, but {args.world_size} of them work together.")
    # Several GPUs are used by several processes; without a launcher Trainer would split batches over threads.
    if args.n_gpu > 1:
        args._n_gpu = 1
    check_optimizer(args)
    return args


def check_optimizer(args: TrainingArguments) -> None:
    """Makes sure that the optimizer is installed, and that the schedule has all that it needs."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(
            f"optim={args.optim.value} with optim_args={args.optim_args} cannot be used: {error}"
        ) from error
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    try:
        warmup, options = args.get_warmup_steps(args.max_steps), dict(args.lr_scheduler_kwargs or {})
        get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps, scheduler_specific_kwargs=options)
    except (ValueError, TypeError) as error:
        given = f"lr_scheduler_type={args.lr_scheduler_type.value} with lr_scheduler_kwargs={args.lr_scheduler_kwargs}"
        raise UsageError(f"{given} is not allowed: {error}") from error


def check_best_metric(args: TrainingArguments, task: Task) -> None:
    """Trainer would look for it after the first evaluation, and for a loss if none is named."""
    if args.metric_for_best_model is None:
        return
    rows = task.rows("validation", 0, 1)
    measured = list(scalars(task.metrics(rows["labels"], rows)))
    if args.metric_for_best_model.removeprefix("eval_") not in measured:
        raise UsageError(
            f"metric_for_best_model={args.metric_for_best_model!r} is not allowed: measured are {', '.join(measured)}."
        )


def make_folder(name: str, folder: Path) -> None:
    """Makes the folder of the argument `name`, and makes sure that files can be written there, before all work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise UsageError(f"{name}={str(folder)!r} cannot be written: {error}.") from error


def updates_between(values: dict) -> dict:
    """Intervals given as parts of the run, in updates; Trainer would warn of a change at each resumption."""
    intervals = {name: values[name] for name in ("logging_steps", "eval_steps", "save_steps")}
    return {name: math.ceil(x * values["max_steps"]) for name, x in intervals.items() if x is not None and 0 < x < 1}


def by_full_name(own: dict, task: Task, fields: dict, values: dict, defaults: dict) -> dict:
    """All settings that differ from the defaults of the libraries, by the names of the command line."""
    left_out = {"hub_token", "output_dir", "resume_from_checkpoint", "per_device_train_batch_size"}
    training = {name: x for name, x in values.items() if name not in left_out and x != defaults[name]}
    return {
        **{name: own[name] for name in ("task", "model", "preset")},
        **{f"task.{name}": x for name, x in task.settings.items()},
        **{f"model.{name}": x for name, x in fields.items()},
        **{name: getattr(x, "value", x) for name, x in training.items() if isinstance(x, str | int | float | list)},
    }
