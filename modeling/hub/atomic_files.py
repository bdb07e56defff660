"""Files that are whole or not there, whatever happens while they are written."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .folder_lock import try_lock

# Names of files that are being written. The digits make a name of its own for each process and thread; earlier
# versions had none.
PART = re.compile(r"\.(?P<name>.+(\.\w+))(\.[0-9a-f]{8})?\.part\2")


def write_atomically(path: Path, write: Callable[[Path], object], wait: bool = True) -> None:
    """
    Calls `write` with a name beside `path` and renames: whatever happens, `path` is whole or not there. Without `wait`
    for the disk that is so unless the machine fails.
    """
    remove_parts(path.parent, path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part{path.suffix}")
    try:
        # The lock shows others that the part has an owner, for as long as this process lives.
        with open(part, "xb") as held:
            lock_if_possible(held)
            write(part)
            if wait:
                sync(part)
            os.replace(part, path)
        if wait:
            sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_part(path: Path) -> bool:
    return PART.fullmatch(path.name) is not None


def remove_parts(folder: Path, of: Path | None = None) -> None:
    """Removes what killed processes have left in a folder of files that they were writing, or of one file."""
    for path in folder.iterdir():
        found = PART.fullmatch(path.name)
        if found and of in (None, path.with_name(found["name"])):
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                if try_lock(file):
                    path.unlink()


def lock_if_possible(file: IO) -> None:
    # Where there are no locks no part is ever swept.
    with contextlib.suppress(OSError):
        try_lock(file)


def publish_folder(part: Path, path: Path) -> None:
    """Gives a folder that has been written under another name, on the same disk, its own; none has it yet."""
    for file in part.rglob("*"):
        sync(file)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk: a rename may otherwise get there first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
