"""The models that learn a task, made anew or loaded from a checkpoint."""

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..datasets_scripts.task import Task
from ..modeling.families import HEADS, load
from .usage import UsageError


def head_of(task: Task) -> str:
    """How the names of the models end that learn a task."""
    return task.auto_class.removeprefix("AutoModel")


def auto_loader(task: Task) -> type:
    """The Auto class that makes and loads models for a task."""
    return load(HEADS[head_of(task)])


def new_model(task: Task, config: PreTrainedConfig) -> PreTrainedModel:
    """A model for a task, with its first weights."""
    return auto_loader(task).from_config(config)


def load_model(checkpoint: str, task: Task, refusal: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """
    The model of a checkpoint, if it can do the task at all.

    Args:
        refusal: What to say if it cannot; the reason follows.
    """
    options = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(checkpoint, **options)
        # Before the weights, about which transformers would have much to say.
        reason = why_not(config, task)
        if reason:
            raise UsageError(f"{refusal}: {reason}.")
        model, loading = auto_loader(task).from_pretrained(checkpoint, output_loading_info=True, **options)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{checkpoint} cannot be loaded: {error}") from error
    if loading["missing_keys"]:
        raise UsageError(f"{refusal}: it has no weights called {', '.join(sorted(loading['missing_keys']))}.")
    return model


def why_not(config: PreTrainedConfig, task: Task) -> str | None:
    """Why a model of this configuration cannot do a task; None if it can."""
    head = head_of(task)
    architecture = (config.architectures or [head])[0]
    if not architecture.endswith(head):
        return f"it is a {architecture}, the task is for a model {head}"
    needed = {name: x for name, x in task.model_fields.items() if name not in task.loss_fields}
    found = {name: getattr(config, name, None) for name in needed}
    if found != needed:
        has, needs = (", ".join(f"{name}={x}" for name, x in sizes.items()) for sizes in (found, needed))
        return f"it has {has}, the task needs {needs}"
    # Two groups may have as many elements; a checkpoint that names its tokens names its labels too.
    names = task.model_names if getattr(config, "token_names", None) else {}
    if any(getattr(config, name) != x for name, x in names.items()):
        return f"its {task.texts.vocabulary} have other names"
    return None
