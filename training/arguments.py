"""One training run as settings: names and presets, a file and single fields from the command line, made into one."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations

from ..configuration.presets import MODELS, PRESETS
from ..datasets_scripts.task import Task
from ..datasets_scripts.tasks import TASKS, make_task
from .command_line import RunArguments, find_config, parse_fields, part, read_file, split_overrides
from .consistency import Schedule
from .evaluation import scalars
from .limits import check_numbers
from .usage import UsageError, checked

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


@dataclass(frozen=True)
class TrainingRun:
    """
    Args:
        task_name, model_name, preset: Names.
        task: The task, its batches as large as all processes together need them.
        config: Configuration of the model.
        args: For Trainer.
        consistency: How much that term of the loss weighs; None without it.
        arguments: All of this by the names of the command line, to be saved and read again.
        changed: Those of them that differ from what the names stand for.
    """

    task_name: str
    model_name: str
    preset: str
    task: Task
    config: PreTrainedConfig
    args: TrainingArguments
    consistency: Schedule | None
    arguments: dict
    changed: dict

    def differences(self, earlier: dict) -> list[str]:
        """What this run would do differently from one with the arguments `earlier`."""
        now = json.loads(json.dumps(self.arguments))
        names = [name for name in {**earlier, **now} if not name.startswith(MAY_CHANGE)]
        changed = [name for name in names if earlier.get(name) != now.get(name)]
        return [f"{name} there: {earlier.get(name)!r}, now: {now.get(name)!r}" for name in changed]


class Resolved(NamedTuple):
    """
    What a command line comes to.

    Args:
        own: The fields of `RunArguments`.
        values: Those of TrainingArguments.
        task: The task.
        fields: Fields of the model's configuration.
        arguments: All of them by the names of the command line.
    """

    own: dict
    values: dict
    task: Task
    fields: dict
    arguments: dict


def parse_run(arguments: list[str]) -> TrainingRun:
    """The run that a command line describes. Later has precedence: preset, file, command line."""
    own, values, task, fields, resolved = resolve(arguments)
    check_processes(own["num_processes"])
    settle_reports(values)
    names = [f"--{name}={own[name]}" for name in ("task", "model", "preset")]
    named = resolve([*names, f"--seed={values['seed']}"]).arguments
    args = make_training_arguments(values)
    check_best_metric(args, task)
    return TrainingRun(
        task_name=own["task"],
        model_name=own["model"],
        preset=own["preset"],
        task=task,
        config=checked(AutoConfig.for_model, MODELS[own["model"]].model_type, **task.model_names | fields),
        args=args,
        consistency=make_schedule(own, task),
        arguments=resolved,
        changed={x: y for x, y in resolved.items() if named.get(x) != y and not x.startswith(MAY_CHANGE)},
    )


def resolve(arguments: list[str]) -> Resolved:
    """Puts together what a command line, the file that it names and the presets say."""
    overrides, arguments = split_overrides(arguments)
    in_file, from_file = read_file(find_config(arguments))
    overrides = in_file | overrides
    own, values, defaults = parse_fields(from_file + arguments)
    checked(check_numbers, own | values)
    model, preset, given = MODELS[own["model"]], PRESETS[own["preset"]], part(overrides, "task")
    settings = preset.task
    if preset.auto_class not in (None, TASKS[own["task"]].auto_class):
        raise UsageError(f"preset={own['preset']} is not allowed: {own['task']} is not one of its tasks.")
    if own["preset"] == "paper":
        settings = settings | model.paper_task.get(own["task"], {})
    task = settle_sizes(checked(make_task, own["task"], **settings | given), values, given)
    fields = model.fields_of(task.auto_class) | task.model_fields | part(overrides, "model")
    if values["output_dir"] is None:
        values["output_dir"] = f"runs/{own['task']}-{own['model']}-{own['preset']}-seed{values['seed']}"
    return Resolved(own, values, task, fields, by_full_name(own, task, fields, values, defaults))


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
        task = checked(dataclasses.replace, task, batch_size=batch_size)
    if task.batch_size % shares:
        raise UsageError(
            f"task.batch_size={task.batch_size} is not allowed: it must be a multiple of processes times "
            f"gradient_accumulation_steps, {shares}."
        )
    values["per_device_train_batch_size"] = task.batch_size // shares
    if values["max_steps"] is None:
        values["max_steps"] = task.total_steps
    elif "total_steps" not in given:
        task = checked(dataclasses.replace, task, total_steps=values["max_steps"])
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
    args = checked(TrainingArguments, **values | updates_between(values) | {"use_cpu": use_cpu})
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


def make_schedule(own: dict, task: Task) -> Schedule | None:
    """Of the term that makes a state last, for tasks and models that can have it."""
    if not own["consistency"]:
        return None
    if task.states(task.rows("validation", 0, 1)) is None:
        raise UsageError(f"consistency={own['consistency']} is not allowed: {own['task']} does not say what to know.")
    if MODELS[own["model"]].model_type == "input_dependent_s4":
        raise UsageError(f"consistency={own['consistency']} is not allowed: {own['model']} has no heads.")
    limit = own["consistency_limit"] or math.inf
    numbers = own["consistency"], own["consistency_start"], own["consistency_full"], limit, own["consistency_noise"]
    return checked(Schedule, *numbers)


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


def updates_between(values: dict) -> dict:
    """Intervals given as parts of the run, in updates; Trainer would warn of a change at each resumption."""
    intervals = {name: values[name] for name in ("logging_steps", "eval_steps", "save_steps")}
    return {name: math.ceil(x * values["max_steps"]) for name, x in intervals.items() if x is not None and 0 < x < 1}


def by_full_name(own: dict, task: Task, fields: dict, values: dict, defaults: dict) -> dict:
    """All settings that differ from the defaults of the libraries, by the names of the command line."""
    left_out = {"hub_token", "output_dir", "resume_from_checkpoint", "per_device_train_batch_size"}
    training = {name: x for name, x in values.items() if name not in left_out and x != defaults[name]}
    usual, kept = RunArguments(), (str, int, float, list, dict)
    terms = [name for name in own if name.startswith("consistency") and own[name] != getattr(usual, name)]
    return {
        **{name: own[name] for name in ("task", "model", "preset", *terms)},
        **{f"task.{name}": x for name, x in task.settings.items()},
        **{f"model.{name}": x for name, x in fields.items()},
        **{name: getattr(x, "value", x) for name, x in training.items() if isinstance(x, kept)},
    }
