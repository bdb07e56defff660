"""
Writes the tasks as a folder that is a dataset repository: Parquet files, a card and, with matplotlib, a picture.

    python -m mamba3_nplr.datasets_scripts.build OUT [--train_size N] [--tasks TASK ...]

A build that was stopped goes on where it was when the same command is given again.
"""

import argparse
import errno
import importlib.util
import json
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
from datasets import DatasetInfo, SplitDict, SplitInfo
from tqdm.auto import tqdm

from ..configuration.atomic_files import write_atomically
from ..configuration.checksums import checksums
from .card import dataset_card
from .columns import task_features, to_table
from .show import NO_MATPLOTLIB, draw
from .task import Task, check_at_least
from .tasks import TASKS, make_task

# shell_curriculum differs from shell only in how training draws its batches.
PUBLISHED = [name for name in TASKS if name != "shell_curriculum"]
SETTINGS = "build.json"
PICTURE = "episode.png"
CHECKSUMS = "checksums.json"  # of all files but the card, to know later that a folder is still what was built
# Episodes are a thousand times larger than words; a file of either is made in memory.
ROWS_IN_FILE = {"words": 100_000, "episodes": 4_096}


def build(out: Path, train_size: int = 100_000, names: list[str] | None = None) -> None:
    """Writes the tasks called `names`, all by default, into the folder `out`."""
    check_at_least("train_size", train_size, 1)
    tasks = {name: make_task(name) for name in names or PUBLISHED}
    splits = {name: {"train": train_size} | task.splits for name, task in tasks.items()}
    claim(out, {"train_size": train_size, "tasks": list(tasks), "versions": versions()})
    files = [file for name, task in tasks.items() for file in plan(name, task, splits[name])]
    with tqdm(total=sum(stop - start for *_, start, stop in files), unit=" rows", unit_scale=True) as bar:
        for path, task, split, start, stop in files:
            bar.set_description(path.parent.name)
            if not (out / path).exists():
                write_rows(out / path, task, split, start, stop)
            bar.update(stop - start)
    if can_draw():
        write_atomically(out / PICTURE, lambda path: draw(TASKS["shell"], "validation", 5, path))
    infos = {name: describe(out / name, task, splits[name]) for name, task in tasks.items()}
    built = checksums(out, [SETTINGS, PICTURE, *(str(path) for path, *_ in files)])
    write_atomically(out / CHECKSUMS, lambda path: path.write_text(json.dumps(built, indent=2), encoding="utf-8"))
    card = dataset_card(tasks, infos, train_size, versions(), PICTURE if can_draw() else None)
    write_atomically(out / "README.md", lambda path: path.write_text(card, encoding="utf-8"))


def can_draw() -> bool:
    """Whether there is matplotlib, an extra: without it the card has no picture."""
    return importlib.util.find_spec("matplotlib") is not None


def versions() -> str:
    names = ["mamba3_nplr", "numpy", "pyarrow", "datasets"] + ["matplotlib"] * can_draw()
    return ", ".join(f"{name} {version(name)}" for name in names)


def claim(out: Path, settings: dict) -> None:
    """Makes the folder, or makes sure that what it holds is an earlier part of this very build."""
    path = out / SETTINGS
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found != settings:
            different = [name for name in settings if found.get(name) != settings[name]]
            details = "; ".join(f"{name} there: {found.get(name)}, now: {settings[name]}" for name in different)
            raise ValueError(f"{out} holds a build with other settings ({details}). Give another folder.")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty and holds no build. Give another folder, so that nothing gets mixed up.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(settings, indent=2), encoding="utf-8"))


def plan(name: str, task: Task, splits: dict[str, int]) -> list[tuple[Path, Task, str, int, int]]:
    """The files of a task: path, task, split, first row and the row after the last."""
    files = []
    size = ROWS_IN_FILE["words" if "input_ids" in task_features(task) else "episodes"]
    for split, rows in splits.items():
        count = -(-rows // size)
        for number in range(count):
            path = Path(name) / f"{split}-{number:05d}-of-{count:05d}.parquet"
            files.append((path, task, split, number * size, min(rows, (number + 1) * size)))
    return files


def describe(folder: Path, task: Task, splits: dict[str, int]) -> DatasetInfo:
    """Columns, splits and sizes of a task whose files have been written."""
    parts = SplitDict()
    for split, rows in splits.items():
        groups = [pq.read_metadata(path) for path in sorted(folder.glob(f"{split}-*.parquet"))]
        size = sum(file.row_group(i).total_byte_size for file in groups for i in range(file.num_row_groups))
        parts.add(SplitInfo(split, num_bytes=size, num_examples=rows))
    return DatasetInfo(
        features=task_features(task),
        splits=parts,
        config_name=folder.name,
        download_size=sum(path.stat().st_size for path in folder.glob("*.parquet")),
        dataset_size=sum(part.num_bytes for part in parts.values()),
    )


def write_rows(path: Path, task: Task, split: str, start: int, stop: int) -> None:
    path.parent.mkdir(exist_ok=True)
    table = to_table(task.rows(split, start, stop), task_features(task))
    write_atomically(path, lambda part: pq.write_table(table, part, compression="zstd", row_group_size=1024))


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
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        parser.exit(1, f"The disk is full. Make room and give the same command again: {given.out} goes on from here.\n")
    if not can_draw():
        print(f"The card has no picture. {NO_MATPLOTLIB}")
    print(f"Wrote {given.out}: load_dataset({str(given.out)!r}, {(given.tasks or PUBLISHED)[0]!r})")


if __name__ == "__main__":
    main()
