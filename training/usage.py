"""What the user got wrong, said by name and before any work."""

import tempfile
from pathlib import Path


class UsageError(ValueError):
    """Something is wrong with what the user asked for; the message says what, and what is allowed."""


def checked(function, *arguments, **fields):
    """Calls a function whose errors are about what the user gave, and makes usage errors of them."""
    try:
        return function(*arguments, **fields)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        # Strict configurations raise errors of their own, which wrap ours.
        if type(error).__module__.startswith("huggingface_hub"):
            raise UsageError(" ".join(str(error).split())) from error
        raise


def make_folder(name: str, folder: Path) -> None:
    """Makes the folder of the argument `name`, and makes sure that files can be written there, before all work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise UsageError(f"{name}={str(folder)!r} cannot be written: {error}.") from error
