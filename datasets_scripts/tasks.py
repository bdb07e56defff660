"""The tasks by name. The settings of `z5`, `s5_generators`, `shell` and `shell_jitter` are those of the paper."""

import difflib
from dataclasses import fields, replace

from .shell_game import ShellGame
from .shell_hand import ShellHand
from .shell_pixels import ShellPixels
from .task import Task
from .words import GroupWords

TASKS: dict[str, Task] = {
    "z5": GroupWords(group="z5", inputs="elements"),
    "s5_generators": GroupWords(group="s5", start_length=8, total_steps=60_000),
    "s3": GroupWords(group="s3", inputs="elements"),
    "s4": GroupWords(group="s4", inputs="elements", start_length=8),
    "a5": GroupWords(group="a5", inputs="elements", start_length=8),
    "shell": ShellGame(),
    "shell_curriculum": ShellGame(start_swaps=1),
    # Packed: padding to the longest episode of a batch would cost a quarter more.
    "shell_jitter": ShellGame(jitter=True, packed=True, test_size=1024),
    "shell_hand": ShellHand(),
    "shell_pixels": ShellPixels(),
}
# Those whose dataset would be that of another: they differ from it only in how training makes its batches.
UNPUBLISHED = ("shell_curriculum", "shell_pixels")


def make_task(name: str, **settings) -> Task:
    """The task called `name`, with some of its settings changed."""
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown. The tasks are: {', '.join(TASKS)}.")
    known = [field.name for field in fields(TASKS[name])]
    for setting, value in settings.items():
        if setting not in known:
            close = difflib.get_close_matches(setting, known, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else f"The settings are: {', '.join(known)}."
            raise ValueError(f"Task {name!r} has no setting `{setting}` (given: {value!r}). {hint}")
    return replace(TASKS[name], **settings)
