"""What `train_hf.py --help` says: about the task and the model that the command line names."""

import dataclasses
import textwrap
from collections.abc import Iterable

from transformers import PreTrainedConfig, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration.presets import MODELS
from .arguments import resolve
from .command_line import OFTEN_USED, find_config, make_parser, parse_names, read_file, split_overrides


def help_text(arguments: Iterable[str] = (), everything: bool = False) -> str:
    """
    Args:
        arguments: A command line; the help is about the task, the model and the preset that it names.
        everything: Whether to describe all fields of TrainingArguments, and not only those often used.
    """
    parser = make_parser(everything)
    _, arguments = split_overrides(list(arguments))
    names = parse_names(parser, read_file(find_config(arguments))[1] + arguments)
    named = resolve([f"--{kind}={name}" for kind, name in names.items()])
    shown = dataclasses.fields(CONFIG_MAPPING[MODELS[names["model"]].model_type])
    inherited = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    of_model = [f"{f.name}={named.fields.get(f.name, f.default)!r}" for f in shown if f.name not in inherited]
    of_task = [f"{name}={x!r}" for name, x in named.task.settings.items()]
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
