"""Checksums of files, to know later whether they are still the same."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def checksum(path: Path) -> str:
    """The sha256 of a file, as the Hub names large files."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Path in `folder` -> checksum, of every file that matches one of the patterns."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): checksum(path) for path in sorted(paths)}


def changed_files(folder: Path, recorded: dict[str, str]) -> list[str]:
    """What has happened to recorded files since: a line for each that is not there or not the same."""
    found = []
    for name, expected in recorded.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is not there")
        elif checksum(path) != expected:
            found.append(f"{name} has been changed")
    return found
