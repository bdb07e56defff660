"""
Writes the tasks as a folder that is a dataset repository: Parquet files, a card and, with matplotlib, a picture.

    python -m mamba3_nplr.datasets_scripts.build OUT [--train_size N] [--tasks TASK ...]

A build that was stopped resumes when the same command is given again, and files that were changed since
they were written are built again.
"""

import argparse
import errno
import hashlib
import io
import itertools
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetInfo, SplitDict, SplitInfo
from tqdm.auto import tqdm

from ..modeling.hub.atomic_files import is_part, write_atomically
from ..modeling.hub.checksums import checksum
from ..modeling.hub.folder_lock import LOCK, FolderInUseError, folder_lock
from .card import dataset_card
from .columns import to_table
from .show import NO_MATPLOTLIB, can_draw, draw
from .task import Task, check_at_least
from .tasks import TASKS, UNPUBLISHED, make_task

SETTINGS = "build.json"
CARD = "README.md"  # written last
CHECKSUMS = "checksums.json"  # of all files but the card, to know later that a folder is still what was built


def build(out: Path, train_size: int = 100_000, names: list[str] | None = None) -> None:
    """Writes the tasks called `names`, all by default, into the folder `out`."""
    check_at_least("train_size", train_size, 1)
    tasks = {name: make_task(name) for name in names or published_names()}
    settings = {"train_size": train_size, "tasks": list(tasks), "versions": versions()}
    check_claim(out, settings)
    out.mkdir(parents=True, exist_ok=True)
    with folder_lock(out):
        check_claim(out, settings)  # once more: another build may have been faster
        write_folder(out, tasks, settings)


def published_names() -> list[str]:
    return [name for name in TASKS if name not in UNPUBLISHED]


def write_folder(out: Path, tasks: dict[str, Task], settings: dict) -> None:
    splits = {name: {"train": settings["train_size"]} | task.splits for name, task in tasks.items()}
    plans = {name: plan(name, task, splits[name]) for name, task in tasks.items()}
    pictures = drawn_tasks(tasks)
    files = CertifiedFiles(out, [SETTINGS, *pictures, *(str(path) for one in plans.values() for path, *_ in one)])
    claim(out, settings, files)
    for name in tasks:
        (out / name).mkdir(exist_ok=True)
    rows = sum(stop - start for one in plans.values() for *_, start, stop in one)
    with tqdm(total=rows, unit=" rows", unit_scale=True) as bar:
        for path, task, split, start, stop in itertools.chain(*plans.values()):
            bar.set_description(path.parent.name)
            files.keep_or_write(str(path), lambda rows=(task, split, start, stop): parquet(*rows))
            bar.update(stop - start)
    for name, task in pictures.items():
        files.keep_or_write(name, lambda task=task: picture(task))
    infos = {name: describe(out, plans[name], task, splits[name]) for name, task in tasks.items()}
    card = dataset_card(tasks, infos, settings["train_size"], versions(), list(pictures))
    write_atomically(out / CARD, lambda path: path.write_text(card, encoding="utf-8"))


class CertifiedFiles:
    """
    The files of a build with their checksums, each taken from what was to be written and recorded before the file is
    there. None is ever taken from a file that was found: it would certify whatever has happened to it.
    """

    def __init__(self, out: Path, names: list[str]):
        self.out = out
        self.recorded = {name: x for name, x in read_checksums(out).items() if name in names}

    def keep_or_write(self, name: str, make: Callable[[], bytes]) -> None:
        """Leaves a file that is as it was written; makes any other, and says so if one is there."""
        path = self.out / name
        if path.exists():
            if self.recorded.get(name) == checksum(path):
                return
            reason = "has been changed" if name in self.recorded else "has no checksum from when it was written"
            tqdm.write(f"{path} {reason}: it is built again.")
        content = make()
        self.record(name, content)
        write_atomically(path, lambda part: part.write_bytes(content))

    def record(self, name: str, content: bytes) -> None:
        # The card says that all is there; where a checksum was lost, not all of them are again.
        (self.out / CARD).unlink(missing_ok=True)
        self.recorded[name] = hashlib.sha256(content).hexdigest()
        text = json.dumps(self.recorded, indent=2, sort_keys=True)
        write_atomically(self.out / CHECKSUMS, lambda part: part.write_text(text, encoding="utf-8"))


def read_checksums(out: Path) -> dict[str, str]:
    path = out / CHECKSUMS
    if not path.exists():
        return {}
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        recorded = None
    if not isinstance(recorded, dict):
        tqdm.write(f"{path} cannot be read: all files are built again.")
        return {}
    return recorded


def versions() -> str:
    names = ["mamba3_nplr", "numpy", "pyarrow", "datasets"] + ["matplotlib"] * can_draw()
    return ", ".join(f"{name} {version(name)}" for name in names)


def check_claim(out: Path, settings: dict) -> None:
    """Makes sure that a folder is new, or that what it holds is an earlier part of this very build."""
    path = out / SETTINGS
    if path.exists():
        found = read_settings(path)
        if found != settings:
            different = [name for name in settings if found.get(name) != settings[name]]
            details = "; ".join(f"{name} there: {found.get(name)}, now: {settings[name]}" for name in different)
            raise ValueError(f"{out} holds a build with other settings ({details}). Give another folder.")
        return
    if out.exists() and (not out.is_dir() or any(x.name != LOCK and not is_part(x) for x in out.iterdir())):
        raise ValueError(f"{out} is not empty and holds no build. Give another folder, so that nothing gets mixed up.")


def claim(out: Path, settings: dict, files: CertifiedFiles) -> None:
    """Writes the settings, before all else: they make the folder one of this build."""
    content = json.dumps(settings, indent=2).encode()
    if not (out / SETTINGS).exists():
        write_atomically(out / SETTINGS, lambda part: part.write_bytes(content))
        files.record(SETTINGS, content)
    files.keep_or_write(SETTINGS, lambda: content)


def read_settings(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}). Give another folder.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read (it holds no settings). Give another folder.")
    return found


def plan(name: str, task: Task, splits: dict[str, int]) -> list[tuple[Path, Task, str, int, int]]:
    """The files of a task: path, task, split, first row and the row after the last."""
    files = []
    size = task.rows_in_file
    for split, rows in splits.items():
        count = -(-rows // size)
        for number in range(count):
            path = Path(name) / f"{split}-{number:05d}-of-{count:05d}.parquet"
            files.append((path, task, split, number * size, min(rows, (number + 1) * size)))
    return files


def describe(out: Path, files: list[tuple], task: Task, splits: dict[str, int]) -> DatasetInfo:
    """Columns, splits and sizes of a task whose files have been written."""
    parts = SplitDict()
    for split, rows in splits.items():
        groups = [pq.read_metadata(out / path) for path, _, found, *_ in files if found == split]
        size = sum(file.row_group(i).total_byte_size for file in groups for i in range(file.num_row_groups))
        parts.add(SplitInfo(split, num_bytes=size, num_examples=rows))
    return DatasetInfo(
        features=task.features(),
        splits=parts,
        config_name=files[0][0].parent.name,
        download_size=sum((out / path).stat().st_size for path, *_ in files),
        dataset_size=sum(part.num_bytes for part in parts.values()),
    )


def parquet(task: Task, split: str, start: int, stop: int) -> bytes:
    table = to_table(task, task.rows(split, start, stop))
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", row_group_size=1024)
    return content.getvalue().to_pybytes()


def drawn_tasks(tasks: dict[str, Task]) -> dict[str, Task]:
    """The pictures of the card by the names of their files, each with the first task that it can show."""
    drawn = {}
    for task in tasks.values() if can_draw() else ():
        if task.texts.picture:
            drawn.setdefault(task.texts.picture.name, task)
    return drawn


def picture(task: Task) -> bytes:
    content = io.BytesIO()
    draw(task, task.texts.picture.split, task.texts.picture.index, content)
    return content.getvalue()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.datasets_scripts.build",
        description="Writes the tasks as a folder that is a dataset repository for load_dataset and the Hub.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, new or from the same build")
    parser.add_argument(
        "--train_size", type=int, default=100_000, help="rows of each train split (default: %(default)s)"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"some of {', '.join(TASKS)} (default: all)")
    given = parser.parse_args(arguments)
    try:
        build(given.out, given.train_size, given.tasks)
    except ValueError as error:
        parser.error(str(error))
    except FolderInUseError as error:
        parser.exit(1, f"{error}\n")
    except OSError as error:
        reason = "The disk is full. Make room" if error.errno == errno.ENOSPC else f"{error}. Fix that"
        parser.exit(1, f"{reason} and give the same command again: the build in {given.out} resumes from here.\n")
    names = given.tasks or published_names()
    if not can_draw() and any(TASKS[name].texts.picture for name in names):
        print(f"The card has no picture. {NO_MATPLOTLIB}")
    print(f"Wrote {given.out}: load_dataset({str(given.out)!r}, {names[0]!r})")


if __name__ == "__main__":
    main()
