"""The card of the published datasets."""

from datasets import DatasetInfo
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData

from ..configuration.citations import bibtex
from .task import Task
from .task_texts import TaskTexts

TEXT = """
# {title}

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

{sections}

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
    tasks: dict[str, Task], infos: dict[str, DatasetInfo], train_size: int, versions: str, pictures: list[str]
) -> str:
    """
    Args:
        tasks: The configurations.
        infos: Columns, splits and sizes of each configuration.
        pictures: Files of the pictures that there are.
    """
    splits = {name: {split: part.num_examples for split, part in info.splits.items()} for name, info in infos.items()}
    first = next(iter(tasks))
    kinds = list({type(task): task for task in tasks.values()}.values())  # a task of each class
    title = f"State tracking: {in_words([task.texts.subject for task in kinds])}"
    text = TEXT.format(
        title=title,
        rows=sum(sum(rows.values()) for rows in splits.values()),
        count=len(tasks),
        first=first,
        split=list(splits[first])[-1],
        table="\n".join(table_row(name, task, splits[name]) for name, task in tasks.items()),
        sections="\n\n".join(section(task.texts, pictures) for task in kinds),
        train_size=train_size,
        tasks=" ".join(tasks),
        versions=versions,
        citation=bibtex(),
    )
    return f"---\n{metadata(title, kinds, splits, infos)}---\n{text}"


def in_words(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def section(texts: TaskTexts, pictures: list[str]) -> str:
    parts = [f"## {texts.heading}", texts.section]
    if texts.picture and texts.picture.name in pictures:
        parts.insert(1, f"![{texts.picture.caption}]({texts.picture.name})")
    return "\n\n".join(parts)


def metadata(title: str, kinds: list[Task], splits: dict[str, dict[str, int]], infos: dict[str, DatasetInfo]) -> str:
    configs = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": f"{name}/{split}-*.parquet"} for split in rows],
        }
        for name, rows in splits.items()
    ]
    data = DatasetCardData(
        license="apache-2.0",
        pretty_name=title,
        task_categories=list(dict.fromkeys(task.hub.category for task in kinds)),
        tags=["state-tracking", *dict.fromkeys(tag for task in kinds for tag in task.texts.tags), "synthetic"],
        configs=configs,
    )
    # With it the Hub shows columns and sizes, and a split pushed later does not hide the others.
    DatasetInfosDict(infos).to_dataset_card_data(data)
    return data.to_yaml() + "\n"


def table_row(name: str, task: Task, splits: dict[str, int]) -> str:
    listed = ", ".join(f"{split} ({rows:,})" for split, rows in splits.items())
    return f"| `{name}` | {listed} | {task.short_description} |"
