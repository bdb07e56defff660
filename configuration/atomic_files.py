"""Files that are whole or not there, whatever happens while they are written."""

import contextlib
import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None

ABANDONED = 24 * 3600  # seconds


def write_atomically(path: Path, write: Callable[[Path], object], wait: bool = True) -> None:
    """
    Calls `write` with a name beside `path` and renames: whatever happens, `path` is whole or not there. The name is
    another each time, for several may write; what a killed process left is removed after a day. Without `wait` for the
    disk this holds unless the machine fails.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part{glob.escape(path.suffix)}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part{path.suffix}")
    try:
        write(part)
        if wait:
            sync(part)
        os.replace(part, path)
        if wait:
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


@contextlib.contextmanager
def only_writer(folder: str | Path | None) -> Iterator[None]:
    """
    Waits until no other thread or process is the writer of a folder, which is made if need be, and is it then. The
    system gives it free when a process ends, however it ends. Where it knows no such locks, and for None, nobody waits.
    """
    if folder is None or fcntl is None or Path(folder).is_file():
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk: a rename may otherwise get there first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
