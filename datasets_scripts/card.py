"""The card of the published datasets."""

from datasets import DatasetInfo
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData

from ..configuration.citations import bibtex
from .task import Task
from .words import GroupWords

TEXT = """
# State tracking: group words and the shell game

Tasks in which the order of operations matters: {rows:,} rows in {count} configurations.

```python
from datasets import load_dataset

{first} = load_dataset("PATH_OR_REPOSITORY", "{first}", split="{split}")
first_row = next(iter(load_dataset("PATH_OR_REPOSITORY", "{first}", split="{split}", streaming=True)))
```

| Configuration | Splits (rows) | What it is |
| --- | --- | --- |
{table}

Training on fresh data needs no download: `mamba3_nplr.datasets_scripts.tasks.make_task(NAME).batch(seed, step)` makes
batches from the same code. The test sets share no random numbers with training, whatever its seed.

Columns have the names of the models' arguments, so that `Trainer` trains on them as they are, with
`data_collator=mamba3_nplr.pad_sequences`.

## Words

A word is a sequence of letters g_1 ... g_L of a finite group, drawn independently and uniformly; the label at position
t is the product s_t = g_t o s_(t-1), with s_0 the identity. The product applies s_(t-1) first.

| Column | Type | Meaning |
| --- | --- | --- |
| `input_ids` | list of int32 | number of each letter among the allowed letters |
| `labels` | list of ClassLabel | number of the product of each prefix; its name is the permutation, in one line |

Elements are numbered from 0, the identity: in cyclic groups by the shift, in symmetric and alternating groups in
lexicographic order of their one-line notation. `s5_generators` draws the four adjacent transpositions of five points;
letter j swaps places j and j + 1. The other configurations draw from all elements.

## The shell game
{picture}
Five identical cups stand in five slots. The ball's slot is revealed in the first 5 frames; then windows follow, some
with a swap of two neighbours along a smooth path, one of the two cups lifted; after a last wait the cue is on for 12
frames, in which the policy reaches for the ball. `shell` has windows of 4 quiet and 8 motion frames; in `shell_jitter`
motions last round(U(4, 16)) frames and waits round(U(0, 8)) or, one time in five, round(U(16, 64)).

| Column | Type | Meaning |
| --- | --- | --- |
| `observations` | frames x 16 float32 | x of the cups, sorted; their y; the revealed slot (one-hot); the cue |
| `labels` | frames x 2 float32 | the demonstrator's actions: at the centre until the cue, then at the ball's slot |
| `num_swaps` | int32 | number of swaps K |
| `swaps` | list of int32 | for each window the left slot of the swapped pair, or -1 |
| `ball_slot` | ClassLabel | the ball's slot at the end |

## Making it

```bash
python -m mamba3_nplr.datasets_scripts.build OUT --train_size {train_size} --tasks {tasks}
```

writes this folder again, bit for bit with the same versions of its libraries ({versions}). `checksums.json` has the
sha256 of every file.

## Citation

The tasks are those of

```bibtex
{citation}
```
"""


def dataset_card(
    tasks: dict[str, Task], infos: dict[str, DatasetInfo], train_size: int, versions: str, picture: str | None
) -> str:
    """
    Args:
        tasks: The configurations.
        infos: Columns, splits and sizes of each configuration.
        picture: File with a picture of an episode, if there is one.
    """
    splits = {name: {split: part.num_examples for split, part in info.splits.items()} for name, info in infos.items()}
    first = next(iter(tasks))
    text = TEXT.format(
        rows=sum(sum(rows.values()) for rows in splits.values()),
        count=len(tasks),
        first=first,
        split=list(splits[first])[-1],
        table="\n".join(table_row(name, task, splits[name]) for name, task in tasks.items()),
        train_size=train_size,
        tasks=" ".join(tasks),
        versions=versions,
        citation=bibtex(),
        picture=f"\n![An episode: cup paths, the lifted cup, the slot of the ball]({picture})\n" if picture else "",
    )
    return f"---\n{metadata(splits, infos)}---\n{text}"


def metadata(splits: dict[str, dict[str, int]], infos: dict[str, DatasetInfo]) -> str:
    configs = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": f"{name}/{split}-*.parquet"} for split in rows],
        }
        for name, rows in splits.items()
    ]
    data = DatasetCardData(
        license="apache-2.0",
        pretty_name="State tracking: group words and the shell game",
        task_categories=["token-classification", "robotics"],
        tags=["state-tracking", "group-word-problem", "imitation-learning", "synthetic"],
        configs=configs,
    )
    # With it the Hub shows columns and sizes, and a split pushed later does not hide the others.
    DatasetInfosDict(infos).to_dataset_card_data(data)
    return data.to_yaml() + "\n"


def table_row(name: str, task: Task, splits: dict[str, int]) -> str:
    if isinstance(task, GroupWords):
        what = f"words over {task.group}, {len(task.letters)} letters, {task.algebra.order} classes"
    else:
        what = f"shell game, {'random' if task.jitter else 'fixed'} timing"
    return f"| `{name}` | {', '.join(f'{split} ({rows:,})' for split, rows in splits.items())} | {what} |"
