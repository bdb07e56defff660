"""The checkpoints in the folder of a run: which there are, and which of them are whole."""

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..modeling.hub.atomic_files import remove_parts
from ..modeling.hub.contents import damaged_files

UNFINISHED = ".unfinished"  # where checkpoints are until they are whole, and once more when they are deleted


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def files_in(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that was written is there as it was: copies may be cut short, and disks change bits."""
    return not damaged_files(checkpoint)


def all_checkpoints(folder) -> list[Path]:
    """The checkpoints of a run, whole or not, oldest first."""
    steps = {path: path.name.rpartition("-")[2] for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def whole_checkpoints(folder) -> list[Path]:
    """The whole checkpoints of a run, oldest first; what was half written, cut short or changed does not count."""
    return [path for path in all_checkpoints(folder) if is_whole(path)]


def last_whole_checkpoint(folder) -> Path | None:
    return next(filter(is_whole, reversed(all_checkpoints(folder))), None)


def remove_unfinished(folder: Path) -> None:
    """Deletes what a killed run has left half written or half deleted. Nothing may be writing there."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    remove_parts(folder)
