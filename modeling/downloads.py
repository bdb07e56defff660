"""
What the Hub's client leaves unchecked: in its cache a large file is named by its checksum, so that a damaged download
can be told, and removed before anyone computes with it.
"""

import re
from pathlib import Path

from transformers.utils import CONFIG_NAME, cached_file

from ..configuration.checksums import checksum

HUB_OPTIONS = ("cache_dir", "revision", "subfolder")


def discard_damaged_weights(repository, options: dict) -> list[str]:
    """
    Removes the damaged weights of a repository from the local cache and returns their names. A folder has none, and
    neither has None, which stands for weights that were handed over.

    Args:
        options: Keywords of `from_pretrained`, of which those count that say where in the cache the files are.
    """
    if repository is None or Path(repository).is_dir():
        return []
    config = cached_file(
        str(repository),
        CONFIG_NAME,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{name: options[name] for name in HUB_OPTIONS if options.get(name)},
    )
    damaged = [] if config is None else [path for path in Path(config).parent.glob("*.safetensors") if is_damaged(path)]
    for path in damaged:
        path.resolve().unlink()
        path.unlink()
    return [path.name for path in damaged]


def is_damaged(path: Path) -> bool:
    stored = path.resolve()
    return re.fullmatch("[0-9a-f]{64}", stored.name) is not None and checksum(stored) != stored.name


__all__ = ["discard_damaged_weights"]
