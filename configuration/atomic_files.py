"""Files that are whole or not there, whatever happens while they are written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a name beside `path` and renames: whatever happens, `path` is whole or not there."""
    part = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        write(part)
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def publish_folder(part: Path, path: Path) -> None:
    """Gives a folder that has been written under another name, on the same disk, its own; an older one is replaced."""
    for file in part.rglob("*"):
        sync(file)
    sync(part)
    older = path.with_name(f".{path.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if path.exists():
        os.replace(path, older)
    os.replace(part, path)
    sync(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk: a rename may otherwise get there first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
