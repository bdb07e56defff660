"""`load_dataset` of datasets with a check of what has arrived: the Hub's client itself compares nothing but sizes."""

import shutil
from pathlib import Path

import datasets
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name

from ..modeling.hub.downloads import discard_damaged, refuse_damaged
from ..modeling.hub.errors import NOTHING_LOADED, clear_errors


def load_dataset(path: str, *arguments, **options):
    """
    As `datasets.load_dataset`. Files of a repository of the Hub that did not arrive as they were uploaded are removed
    and refused. A stream (`streaming=True`) keeps no file that could be compared, and is not checked.
    """
    try:
        with clear_errors(path, "loaded", NOTHING_LOADED, options.get("token")):
            loaded = datasets.load_dataset(path, *arguments, **options)
    except Exception as error:
        refuse_damaged(path, discard_damaged_data(path), error)
        raise
    damaged = discard_damaged_data(path)
    if damaged:
        discard_prepared(loaded)
    refuse_damaged(path, damaged)
    return loaded


def discard_damaged_data(path: str) -> list[str]:
    """Removes the damaged files of a dataset from the local cache and returns their names; a folder has none."""
    if Path(path).exists():
        return []
    snapshots = Path(HF_HUB_CACHE, repo_folder_name(repo_id=path, repo_type="dataset"), "snapshots")
    return [name for snapshot in snapshots.glob("*") for name in discard_damaged(snapshot, "**/*.parquet")]


def discard_prepared(loaded) -> None:
    """Removes what datasets has made of damaged files: it would be taken again."""
    splits = loaded.values() if isinstance(loaded, dict) else [loaded]
    for split in splits:
        for file in getattr(split, "cache_files", []):
            shutil.rmtree(Path(file["filename"]).parent, ignore_errors=True)
