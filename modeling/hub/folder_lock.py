"""One process at a time in a folder. The kernel keeps the lock: it ends with its process, however that ends."""

import errno
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK = ".mamba3_nplr.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # of file systems that cannot lock
HELD: set[IO] = set()  # the files by which this process holds folders


class FolderInUseError(RuntimeError):
    """Another process works in a folder; the message says which."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds a folder that is there until the end of the block; if another holds it, raises FolderInUseError at once."""
    path, held = Path(folder, LOCK), False
    while not held:
        with open(path, "a+", encoding="utf-8") as file:
            claim(file, path)
            held = is_at(file, path)
            if held:
                file.truncate(0)
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since},\n")
                file.flush()
                HELD.add(file)
                try:
                    yield
                finally:
                    HELD.discard(file)
                    # While it is still held: whoever has opened it meanwhile finds that it is gone, and makes another.
                    path.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: str | Path | None) -> Iterator[None]:
    """
    Waits until no other thread or process is in such a block with the same folder, which is made if need be. It leaves
    no file there. Where there are no locks, and for None, nobody waits.
    """
    if folder is None or fcntl is None or Path(folder).is_file():
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of network file systems that cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # for a process that was forked off meanwhile has it too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def claim(file: IO[str], path: Path) -> None:
    try:
        if try_lock(file):
            return
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(f"{path.parent}: file system without locks; nothing else may work in it.", stacklevel=4)
        return
    file.seek(0)
    owner = file.read().strip() or "another process"
    raise FolderInUseError(
        f"{path.parent} is in use: {owner} works in it. Wait until that has ended, or give another folder."
    )


def try_lock(file: IO) -> bool:
    """Locks an open file unless another has: a process, or another opening of the file in this one."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "No locks on this system")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: IO, path: Path) -> bool:
    """Whether an open file is still the one at `path`, and has not been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def leave_to_parent() -> None:
    """A process that is forked off, such as one that loads data, would hold the folder after its parent was killed."""
    for file in HELD:
        file.close()
    HELD.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=leave_to_parent)
