"""How a run ends when it does not finish: the errors that say so, as sentences, exit codes and a few words."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .checkpoints import CheckpointError
from .finite import NotFiniteError
from .usage import UsageError

# As torch says that the memory of a machine is not enough; for that of a GPU there is an error of its own.
NO_MEMORY = ("can't allocate memory", "not enough memory")


class StoppedError(Exception):
    """A signal ended the work before its end; `code` is what the program should exit with."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.code = 128 + number


class UploadError(Exception):
    """A finished run could not be uploaded."""


class FailedRunsError(Exception):
    """Some of several runs have failed; the message says which."""


@contextmanager
def exit_with_sentence(program: str = "train_hf.py") -> Iterator[None]:
    """What a user or a machine may cause ends a program with a sentence; anything else is a mistake, and a trace."""
    try:
        yield
    except UsageError as error:
        sys.exit(exit_with(f"{program}: error: {error}", 2))
    except (NotFiniteError, CheckpointError, UploadError, FailedRunsError) as error:
        sys.exit(exit_with(f"{program}: {error}", 1))
    except StoppedError as stopped:
        sys.exit(exit_with(str(stopped), stopped.code))
    except OSError as error:
        # Those of the operating system have a number; any other is a mistake of this program.
        if error.errno is None:
            raise
        advice = "Once that is fixed, give the same command again; a run resumes with --resume_from_checkpoint."
        sys.exit(exit_with(f"{program}: {error}. {advice}", 1))


def exit_with(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def in_few_words(error: BaseException) -> str:
    """Why a run has failed, for its place in a table."""
    text = " ".join(str(error).split())
    if isinstance(error, NotFiniteError):
        return "not finite"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return "out of memory"
    if isinstance(error, UsageError | CheckpointError | UploadError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
