"""
What the Hub's client leaves unchecked: in its cache a large file is named by its checksum, so that a damaged download
can be told, and removed before anyone computes with it.
"""

import re
from pathlib import Path

from transformers.utils import CONFIG_NAME, cached_file

from .checksums import checksum

HUB_OPTIONS = ("cache_dir", "revision", "subfolder")


def refuse_damaged(repository: str, names: list[str], error: Exception | None = None) -> None:
    """
    Raises an error if there are names of files that were damaged, and removed.

    Args:
        error: What the damage has led to, if anything.
    """
    if names:
        raise OSError(
            f"{', '.join(names)} of {repository} did not arrive as uploaded: the checksum is another. The local copy "
            "has been removed; load again to download it again."
        ) from error


def discard_damaged_weights(repository, options: dict) -> list[str]:
    """
    Removes the damaged weights of a model from the local cache and returns their names. A folder has none, and neither
    has None, which stands for weights that were handed over.

    Args:
        options: Keywords of `from_pretrained`, of which those count that say where in the cache the files are.
    """
    if repository is None or Path(repository).is_dir():
        return []
    where = {name: options[name] for name in HUB_OPTIONS if options.get(name)}
    config = find_file(repository, CONFIG_NAME, local_files_only=True, **where)
    return [] if config is None else discard_damaged(Path(config).parent, "*.safetensors")


def find_file(checkpoint: str | Path, name: str, **options) -> str | None:
    """Where a file of a folder or repository is, once downloaded if need be; None if it cannot be had."""
    # transformers loads optional files so, and has no public keywords for it.
    return cached_file(
        str(checkpoint),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )


def discard_damaged(snapshot: Path, pattern: str) -> list[str]:
    """Removes damaged files from a repository's folder in the cache, and returns their names there."""
    damaged = [path for path in sorted(snapshot.glob(pattern)) if is_damaged(path)]
    for path in damaged:
        path.resolve().unlink()
        path.unlink()
    return [path.relative_to(snapshot).as_posix() for path in damaged]


def is_damaged(path: Path) -> bool:
    stored = path.resolve()
    # Revisions share files: one that was damaged may be gone already.
    is_large = stored.exists() and re.fullmatch("[0-9a-f]{64}", stored.name)
    return bool(is_large) and checksum(stored) != stored.name


__all__ = ["discard_damaged", "discard_damaged_weights", "find_file", "refuse_damaged"]
