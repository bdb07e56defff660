"""What cards and pictures say of a task, as data."""

from dataclasses import dataclass
from typing import NamedTuple


class CardPicture(NamedTuple):
    """
    A drawn row in the card of a dataset.

    Args:
        name: Of the file.
        caption: What is to be seen, for those who do not see it.
        split, index: Which row.
    """

    name: str
    caption: str
    split: str
    index: int


class HubNames(NamedTuple):
    """
    What the Hub calls a task, by its lists of such names.

    Args:
        task: In the results of a model.
        category: Of a dataset.
        metric: The main metric.
    """

    task: str
    category: str
    metric: str


@dataclass(frozen=True)
class TaskTexts:
    """
    What is said alike of all tasks of a class, whatever their settings.

    Args:
        problem: Its name, such as "shell game".
        subject: What a dataset of it is about, such as "the shell game", for the title of its card.
        sequences: What its sequences are called, such as "episodes".
        answer: What is right or wrong in a sequence by the main metric, such as "reach".
        details: What the metrics tell beside the main one.
        heading, section: Its section of a dataset's card, in Markdown: what it is, and its columns.
        tags: Of a dataset of it on the Hub.
        picture: In that section, if there is one.
        vocabulary: What `model_names` of the task gives names to.
    """

    problem: str
    subject: str
    sequences: str
    answer: str
    details: str
    heading: str
    section: str
    tags: tuple[str, ...] = ()
    picture: CardPicture | None = None
    vocabulary: str = "tokens and labels"
