"""
Compiles C++ source on first use into a shared library, kept in a cache that several processes may share.

A library is named after what it was made from and for, and after its own checksum, so that one rename publishes both.
What does not have its checksum, or could have been written by others, is never loaded: it would run as this user.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from transformers.utils import logging

from ...hub.atomic_files import sync

logger = logging.get_logger(__name__)

# No -ffast-math: linked into a shared library it would change the floating-point mode of the whole process.
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
]
COMPILERS = ("c++", "g++", "clang++")
# A machine with much other work has been seen to take 250.
SECONDS_TO_COMPILE = 1200

CPUINFO = Path("/proc/cpuinfo")
# Its lines that tell processors apart; others change with time or from core to core.
PROCESSOR_LINES = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}  # x86
PROCESSOR_LINES |= {"features", "cpu implementer", "cpu architecture", "cpu variant", "cpu part", "cpu revision"}  # ARM
PROCESSOR_LINES |= {"isa", "uarch", "mvendorid", "marchid", "mimpid", "cpu", "revision"}  # RISC-V, POWER


def compiler() -> str | None:
    """The system's C++ compiler, or None. The variable CXX chooses another, and may hold options of it."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and words_of(name):
            return name
    return None


def words_of(command: str) -> list[str]:
    """The program that a command names, and its options; nothing if there is no such program."""
    if shutil.which(command):
        return [command]
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that never ends
        return []
    return words if words and shutil.which(words[0]) else []


def compiler_or_error() -> list[str]:
    if sys.platform == "win32":
        raise OSError("Windows compilers are not supported")
    chosen, found = os.environ.get("CXX"), compiler()
    if chosen and chosen != found:
        logger.warning(f"CXX={chosen!r} names no program; {found or 'nothing'} is used instead.")
    if found is None:
        raise OSError(f"no C++ compiler was found ({', '.join(COMPILERS)}, or the one that CXX names)")
    return words_of(found)


def cache_folder() -> Path:
    """MAMBA3_NPLR_CACHE, or a folder in the user's cache. Variables that are empty count as not set."""
    chosen = os.environ.get("MAMBA3_NPLR_CACHE")
    if chosen:
        folder = Path(chosen).expanduser()
        if not folder.is_absolute():
            # It would be somewhere else, with what others may have put there, in each working directory.
            raise OSError(f"MAMBA3_NPLR_CACHE={chosen!r} is a relative path, and must be an absolute one")
        return folder
    for users in (os.environ.get("XDG_CACHE_HOME"), "~/.cache"):
        # The XDG specification wants relative paths to be ignored.
        if users and Path(users).expanduser().is_absolute():
            return Path(users).expanduser() / "mamba3_nplr"
    raise OSError(f"HOME={os.environ.get('HOME')!r} is not a place for a cache; MAMBA3_NPLR_CACHE names another")


@cache
def load_library(name: str, source: str, definitions: tuple[str, ...] = ()) -> ctypes.CDLL:
    """
    The compiled source; raises OSError or subprocess.CalledProcessError if it is not available. `definitions` are flags
    for the compiler, such as -DNAME=VALUE.
    """
    folder, stem = cache_folder(), f"{name}-{library_key(source, definitions)}"
    refuse_untrusted(folder)
    for path in sorted(folder.glob(f"{stem}-*.so")):
        fault = why_bad(path)
        if fault is not None:
            logger.warning(f"{path} is not loaded, and removed: {fault}.")
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # made with other libraries of the system, where several machines share a home
            logger.warning(f"{path} cannot be loaded here: {error}.")
    return ctypes.CDLL(str(build(source, folder / stem, definitions)))


def library_key(source: str, definitions: tuple[str, ...] = ()) -> str:
    """
    Tells apart libraries from other source, for another processor or system, or by a compiler that was chosen. It needs
    no compiler: a library can be used where there is none.
    """
    system = [platform.system(), platform.machine(), *platform.libc_ver(), str(sys.maxsize)]
    text = "\0".join([source, *FLAGS, *definitions, *system, processor(), chosen_compiler()])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


def processor() -> str:
    """What this processor is and can do. A library for another one may use instructions that end the process here."""
    if sys.platform == "darwin":
        names = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features", "hw.optional"]
        return subprocess.run(["/usr/sbin/sysctl", "-i", *names], capture_output=True, text=True, check=True).stdout
    with contextlib.suppress(OSError):
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        pairs = {tuple(part.strip() for part in line.partition(":")[::2]) for line in lines}
        known = [f"{name}: {value}" for name, value in sorted(pairs) if name.lower() in PROCESSOR_LINES]
        if known:
            return "\n".join(known)
    # Elsewhere only the compiler can tell, by the macros that it defines for these instructions.
    macros = [*compiler_or_error(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    return run_compiler(macros)


def chosen_compiler() -> str:
    """CXX, or if that is a script what it says: it may add options, and lie elsewhere the next time."""
    chosen = os.environ.get("CXX", "")
    words = words_of(chosen) if chosen else []
    with contextlib.suppress(OSError):  # a program that may be run but not read
        if words:
            with open(shutil.which(words[0]), "rb") as program:
                if program.read(2) == b"#!":
                    return "\0".join([program.read().decode(errors="replace"), *words[1:]])
    return chosen


def refuse_untrusted(folder: Path) -> None:
    """Raises OSError where someone else could put a library into a folder, or another folder in its place."""
    place = folder.resolve()
    if place.exists():
        reason = why_untrusted(place)
        if reason is not None:
            raise OSError(f"the folder of compiled code {reason}; MAMBA3_NPLR_CACHE names another place")
    for above in place.parents:
        mode = above.stat().st_mode if above.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OSError(
                f"the folder of compiled code {place} is inside {above}, which everyone may change; MAMBA3_NPLR_CACHE "
                "names another place"
            )


def why_untrusted(path: Path) -> str | None:
    """Why others could have changed a file or a folder, or None."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user ({found.st_uid})"
    # Where all users have a group of their own, with their own number, files are open to it by default.
    group = stat.S_IWGRP if found.st_gid != found.st_uid else 0
    if found.st_mode & (stat.S_IWOTH | group):
        return f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def why_bad(path: Path) -> str | None:
    """Why a library must not be loaded, or None. A damaged one would end the process, now or in use."""
    try:
        reason = why_untrusted(path)
        if reason is None and checksum(path) != path.stem.rpartition("-")[2]:
            reason = "it is damaged, for its checksum is not the one in its name"
        return reason
    except OSError as error:
        return str(error)


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def build(source: str, stem: Path, definitions: tuple[str, ...] = ()) -> Path:
    """
    Compiles in a folder of its own and renames: the library `STEM-CHECKSUM.so` is whole or not there, however many
    processes build it.
    """
    command, folder = [*compiler_or_error(), *FLAGS, *definitions], stem.parent
    # Before, and not after: on a busy machine someone may wait for minutes and wonder.
    logger.warning(
        f"Compiling {stem.name.partition('-')[0]} for this processor, which takes some seconds, once: models then run "
        f"several times faster. It is kept as {stem}-*.so."
    )
    start = time.perf_counter()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_untrusted(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as own:
        code, made = Path(own) / "source.cpp", Path(own) / "library.so"
        code.write_text(source, encoding="utf-8")
        run_compiler([*command, str(code), "-o", str(made)])
        made.chmod(0o755)
        sync(made)
        path = folder / f"{stem.name}-{checksum(made)}.so"
        os.replace(made, path)
        sync(folder)
    logger.info(f"Compiled {path} in {time.perf_counter() - start:.1f} s.")
    return path


def run_compiler(command: list[str]) -> str:
    """What a compiler prints. It runs for a limited time, and the programs that it starts end with it."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, start_new_session=True) as process:
        try:
            outputs = process.communicate(timeout=SECONDS_TO_COMPILE)
        except BaseException as error:  # an interruption too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                text = f"{command[0]} did not finish in {SECONDS_TO_COMPILE} s, and was stopped"
                raise TimeoutError(text) from None
            raise
    printed, errors = (output.decode(errors="replace") for output in outputs)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, printed, errors)
    return printed
