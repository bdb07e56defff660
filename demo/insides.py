"""
What a model computes while it reads an episode or a word: gate and direction of the reflection, decay and phase.

Nothing is computed here a second time. The model reads as ever, by its modules and not by compiled code, and a mixer's
own `reflection` is listened to: its arguments and results are all that the pictures show.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from browser import as_bytes, one_of, whole_number
from mamba3_nplr.datasets_scripts.shell_game_episodes import REVEAL_FRAMES
from mamba3_nplr.datasets_scripts.tasks import make_task
from shell_games import check_episode, draw_episode, policies_of_timing
from swap_words import TASKS, read_letters
from trained_models import TrainedModels

LONGEST_PICTURE = 512  # positions; the cosines are a picture of as many by as many


@dataclass(frozen=True)
class Inside:
    """Numbers of one model at each position it has read; those of the reflection are None for one that has none."""

    beta: np.ndarray | None  # (length, heads), from 0 to 2
    decay: np.ndarray  # (length, heads), from 0 to 1
    phase: np.ndarray  # (length, heads, pairs), from -pi to pi; without rotation there are no pairs
    k: np.ndarray | None  # (length, heads, state) of length 1: where the reflection looks

    @property
    def heads(self) -> int:
        return self.decay.shape[1]

    def cosines(self, head: int) -> np.ndarray:
        """Between the reflections of a head at any two positions, (length, length)."""
        return self.k[:, head] @ self.k[:, head].T

    def liveliest_head(self) -> int:
        """
        The one whose direction answers most to what is read: it stays at some positions and changes at others. One that
        turns evenly, however fast, has less to show. Without directions, the one whose decay varies most.
        """
        if self.k is None or len(self.k) < 3:
            return int(self.decay.var(0).argmax())
        alike = (self.k[1:] * self.k[:-1]).sum(-1)  # (length - 1, heads), cosines of neighbours
        return int((alike.std(0) * (1 + alike.mean(0))).argmax())

    def part(self, start: int, stop: int) -> "Inside":
        return Inside(*(None if x is None else x[start:stop] for x in (self.beta, self.decay, self.phase, self.k)))


@torch.no_grad()
def listen(model: torch.nn.Module, **inputs: torch.Tensor) -> Inside:
    """Lets a model read one sequence, and returns what its mixers have computed; heads of all layers side by side."""
    model = copy.deepcopy(model)
    model.config.scan_backend = "chunkwise"
    heard: list[Inside] = []
    for layer in model.model.layers:
        layer.mixer.reflection = overheard(layer.mixer.reflection, heard)
    model(**inputs)
    parts = [[getattr(one, name) for one in heard] for name in ("beta", "decay", "phase", "k")]
    return Inside(*(None if part[0] is None else np.concatenate(part, axis=1) for part in parts))


def overheard(reflection: Callable, heard: list[Inside]) -> Callable:
    """The same function, which adds to `heard` what it was called with and what it has returned."""

    def listened_to(k, beta, log_decay, cosine_sine):
        k, beta, strength = reflection(k, beta, log_decay, cosine_sine)
        empty = log_decay.new_zeros(*log_decay.shape, 0)
        phase = empty if cosine_sine is None else torch.atan2(cosine_sine[1], cosine_sine[0])
        found = (beta, log_decay.exp(), phase, k)
        heard.append(Inside(*(None if x is None else x[0].double().numpy() for x in found)))
        return k, beta, strength

    return listened_to


class Insides:
    """Answers to requests for pictures; nothing is kept of them."""

    def __init__(self, models: TrainedModels):
        self.models = models

    def of_episode(self, model, timing, swaps, seed, head=None, start=0) -> dict:
        timing, swaps, seed = check_episode(timing, swaps, seed)
        policy = chosen_model(policies_of_timing(self.models, timing), model)
        episode = draw_episode(timing, swaps, seed)
        inside = listen(policy, observations=torch.from_numpy(episode.observations)[None])
        marks = [{"start": 0, "frames": REVEAL_FRAMES, "kind": "reveal"}]
        marks += [{"start": x.start, "frames": x.frames, "kind": "swap", "label": x.left} for x in episode.moves()]
        marks += [{"start": episode.cue, "frames": len(episode.observations) - episode.cue, "kind": "cue"}]
        return pictures(inside, head, start) | {"marks": marks}

    def of_word(self, model, task, text, head=None, start=0) -> dict:
        one_of("task", task, TASKS)
        letters = read_letters(make_task(task), text)
        word_model = chosen_model(self.models.of_task(task), model)
        inside = listen(word_model, input_ids=torch.from_numpy(letters)[None])
        marks = [{"start": t, "frames": 1, "kind": "letter", "label": int(x)} for t, x in enumerate(letters)]
        return pictures(inside, head, start) | {"marks": marks}


def chosen_model(models: dict[str, torch.nn.Module], name) -> torch.nn.Module:
    if not models:
        raise ValueError("There is no trained model for this; checkpoints/ holds what there is.")
    return models[one_of("model", name, models)]


def pictures(inside: Inside, head, start) -> dict:
    """
    Some positions as pictures, of all heads and, where it takes the whole room, of one, counted from 1: if none is
    named, the one with the most to see.
    """
    length = len(inside.decay)
    head = inside.liveliest_head() + 1 if head is None else whole_number("head", head, 1, inside.heads)
    start = whole_number("start", start, 0, length - 1)
    stop = min(start + LONGEST_PICTURE, length)
    part = inside.part(start, stop)
    answer = {"length": length, "start": start, "stop": stop, "heads": inside.heads, "head": head}
    answer |= {"pairs": part.phase.shape[2], "decay": as_bytes(part.decay, 0, 1)}
    answer["phase"] = as_bytes(part.phase[:, head - 1], -np.pi, np.pi)
    if part.k is not None:
        answer |= {"beta": as_bytes(part.beta, 0, 2), "cosines": as_bytes(part.cosines(head - 1), -1, 1)}
    return answer
