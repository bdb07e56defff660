"""A list of the files that were written into a folder: which are ours, and whether they are still as they were."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from .atomic_files import write_atomically
from .checksums import checksum

CONTENTS = "contents.json"  # the files that were written into a folder, with their sizes and checksums; comes last
LINK = "is a symbolic link"
LISTED = {"size": int, "sha256": str}  # of each file


def write_contents(folder: Path, names: Iterable[str]) -> None:
    """Lists the files of a folder that have been written, by their paths in it. What else is there is none of ours."""
    paths = {name: folder / name for name in sorted(names)}
    listed = {name: {"size": path.stat().st_size, "sha256": checksum(path)} for name, path in paths.items()}
    write_atomically(folder / CONTENTS, lambda part: part.write_text(json.dumps(listed, indent=2), encoding="utf-8"))


def read_contents(folder: Path) -> dict[str, dict]:
    """Path in `folder` -> size and sha256 of each file that was written there. Raises OSError or ValueError."""
    path = folder / CONTENTS
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(listed, dict) or not listed:
        raise ValueError("it lists no files")
    # Earlier versions wrote sizes only.
    listed = {name: {"size": entry} if type(entry) is int else entry for name, entry in listed.items()}
    for name, entry in listed.items():
        if not isinstance(entry, dict) or {x: type(y) for x, y in entry.items()} not in (LISTED, {"size": int}):
            raise ValueError(f"{name!r} has no size and checksum in it")
    return listed


def has_checksums(folder: Path) -> bool:
    return all("sha256" in entry for entry in read_contents(folder).values())


def damaged_files(folder: Path) -> dict[str, str]:
    """Path in `folder` -> what has happened to it, of every listed file that is not as it was written."""
    try:
        listed = read_contents(folder)
    except FileNotFoundError:
        return {CONTENTS: "is not there"}
    except (OSError, ValueError) as error:
        return {CONTENTS: f"cannot be read ({error})"}
    found = {name: damage(folder, name, **entry) for name, entry in listed.items()}
    return {name: what for name, what in found.items() if what}


def damage(folder: Path, name: str, size: int, sha256: str | None = None) -> str | None:
    """What has happened to a file since it was listed; None if nothing."""
    path = folder / name
    try:
        # A name, too, may lead out of the folder.
        if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
            return LINK
        if not path.is_file():
            return "is not there"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size:,} bytes instead of {size:,}"
        return "has been changed" if sha256 is not None and checksum(path) != sha256 else None
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"


def describe_damage(damaged: dict[str, str]) -> str:
    return "; ".join(f"{name} {what}" for name, what in damaged.items())
