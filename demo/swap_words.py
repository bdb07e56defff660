"""Words of swaps: read as text or drawn at random, and followed by each model, letter by letter."""

import re
import secrets

import numpy as np
import torch

from browser import as_bytes, one_of, whole_number
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.datasets_scripts.words import GroupWords
from trained_models import MODELS, TrainedModels

MOST_LETTERS = 100_000
# Letters that a model reads at a time, going on from its state: the memory of a whole word would be far more.
PIECE = 4096
# Name of the task -> on the page.
TASKS = {"s5_generators": "Swaps (S5)", "z5": "Turns (Z5)"}


def read_letters(task: GroupWords, text) -> np.ndarray:
    """The numbers of the letters in a text: by name (s0) or number, with spaces, commas or nothing between them."""
    if not isinstance(text, str):
        raise ValueError(f"The word is {text!r}; it must be text.")
    names = task.token_names
    numbers = {name: number for number, name in enumerate(names)} | {str(x): x for x in range(len(names))}
    letters = re.findall(r"[a-z]?\d|[^\s,;]", text.lower())
    for position, letter in enumerate(letters, 1):
        if letter not in numbers:
            known = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ValueError(f"Letter {position} of the word, {letter!r}, is unknown. The letters are {known}.")
    whole_number("The number of letters", len(letters), 1, MOST_LETTERS)
    return np.array([numbers[letter] for letter in letters], dtype=np.int64)


def random_letters(task: GroupWords, length) -> np.ndarray:
    length = whole_number("The number of letters", length, 1, MOST_LETTERS)
    return task.draw("page", secrets.randbelow(2**31), 0, 0, 1, length)["input_ids"][0]


def arrangements(task: GroupWords, letters: np.ndarray) -> np.ndarray:
    """The number of the true arrangement after each letter."""
    return task.algebra.prefix_products(task.letters[letters][None])[0]


@torch.no_grad()
def predictions(model: torch.nn.Module, letters: np.ndarray) -> np.ndarray:
    """The number of the arrangement that a model believes in after each letter."""
    pieces, cache = [], None
    for piece in torch.from_numpy(letters)[None].split(PIECE, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True, output_prefix_logits=True)
        cache = output.past_key_values
        pieces.append(output.prefix_logits[0].argmax(-1).numpy())
    return np.concatenate(pieces)


class SwapWords:
    """Answers to requests for words; nothing is kept of them."""

    def __init__(self, models: TrainedModels):
        self.models = models

    def describe(self) -> dict:
        """The tasks with their letters, and which point stands at each place in each arrangement."""
        described = {}
        for name, label in TASKS.items():
            task = make_task(name)
            described[name] = {
                "label": label,
                "letters": task.token_names,
                "moves": np.argsort(task.algebra.elements[task.letters], axis=1).tolist(),
                "arrangements": np.argsort(task.algebra.elements, axis=1).tolist(),
                "trained": task.trained_size,
                "models": {model: MODELS[model] for model in self.models.folders(name)},
            }
        return described

    def follow(self, task, text=None, length=None) -> dict:
        """
        A word, the arrangement after each of its letters, and what each model makes of it.

        Args:
            task: Name of the task that the letters belong to.
            text: The word.
            length: In place of it, the number of letters of a random one.
        """
        one_of("task", task, TASKS)
        words = make_task(task)
        letters = read_letters(words, text) if length is None else random_letters(words, length)
        truth = arrangements(words, letters)
        followed = {name: predictions(model, letters) for name, model in self.models.of_task(task).items()}
        return {
            "task": task,
            "length": len(letters),
            "letters": as_bytes(letters),
            "truth": as_bytes(truth),
            "models": [summary(name, predicted, truth) for name, predicted in followed.items()],
        }


def summary(name: str, predicted: np.ndarray, truth: np.ndarray) -> dict:
    wrong = np.flatnonzero(predicted != truth)
    return {
        "name": name,
        "label": MODELS[name],
        "predicted": as_bytes(predicted),
        "right": int(len(truth) - len(wrong)),
        "first_wrong": int(wrong[0]) if len(wrong) else None,
    }
