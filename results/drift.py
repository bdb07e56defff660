"""
How a trained model drifts in words far longer than those of its training: how often it is right, what its heads read
after words with the same label, how large their states are, and what its letters have wrong: gates, phases, mirrors.

    python results/drift.py runs/exact/s4-nplr_exact-seed18 --out results/drift/s4-nplr_exact-seed18.json
"""

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification

from mamba3_nplr.datasets_scripts.groups import Group
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3State, rotate
from mamba3_nplr.modeling.recurrent_cache import read_state
from mamba3_nplr.training import record
from mamba3_nplr.training.command_line import part
from mamba3_nplr.training.consistency import by_head, unexplained_parts
from mamba3_nplr.training.host_memory import keep_memory

LENGTHS = (*(2**n for n in range(6, 14)), 100_000)
WORDS, WINDOW, PIECE = 128, 64, 512  # words, and positions of them before each length, and in a pass


class Reads:
    """What the heads of the last block read in the last pass, and which of them are read at all."""

    def __init__(self, model):
        self.mixer = model.base_model.layers[-1].mixer
        self.heads = model.config.num_heads
        self.kept = by_head(self.mixer.out_proj.weight, self.heads).ne(0).any(-1).any(0).nonzero().flatten().tolist()
        self.last = None
        self.mixer.out_proj.register_forward_pre_hook(self.note)

    def note(self, module, inputs):
        self.last = inputs[0]


@torch.no_grad()
def measure_drift(model, tokens: torch.Tensor, labels: torch.Tensor, task, lengths=LENGTHS) -> dict:
    """
    Args:
        tokens, labels (words, length): Words of the task at least as long as the longest length.

    Returns:
        By length how often the model is right; by length and head what is unexplained of what it reads, and how large
        its state is, that at the first length being 1; what `gates_of` and `loops_of` say of its letters.
    """
    layer = len(model.base_model.layers) - 1
    shapes = partial(model.base_model.layers[layer].mixer.state_shapes, len(tokens))
    reads, state, start = Reads(model), None, 0
    found = {"lengths": list(lengths), "heads": reads.kept, "right": [], "unexplained": [], "growth": []}
    for length in tqdm(lengths, unit="length", disable=None):
        first = length - WINDOW
        for begin, end in [*pieces(start, first), (first, length)]:
            output = model(tokens[:, begin:end], past_key_values=state, use_cache=True)
            state = output.past_key_values
        start, window = length, slice(first, length)
        found["right"].append((output.logits.argmax(-1) == labels[:, length - 1]).float().mean().item())
        parts = unexplained_parts(reads.last, tokens[:, window], labels[:, window], reads.heads)
        found["unexplained"].append([parts[head].item() for head in reads.kept])
        kept = read_state(state, layer, shapes)
        if length == lengths[0]:
            first_state = Mamba3State(*(x.clone() for x in kept))  # the cache is overwritten in place
        found["growth"].append([kept.h[:, head].norm(dim=(1, 2)).mean().item() for head in reads.kept])
    first = [size or 1.0 for size in found["growth"][0]]  # a head may have a state of 0, which stays
    found["growth"] = [[x / y for x, y in zip(sizes, first, strict=True)] for sizes in found["growth"]]
    letters = read_letters(model, reads.kept)
    return found | gates_of(letters) | loops_of(letters, first_state, reads.kept, task)


def pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + PIECE, end)) for begin in range(start, end, PIECE)]


class Letters(NamedTuple):
    """What the last block makes of each letter, for the heads that are read."""

    decay: torch.Tensor  # (letters, heads)
    beta: torch.Tensor  # (letters, heads)
    strength: torch.Tensor  # (letters, heads) of the reflection
    k: torch.Tensor  # (letters, heads, state)
    angle: torch.Tensor  # (letters, heads, pairs) by which it turns


@torch.no_grad()
def read_letters(model, heads: list[int]) -> Letters:
    layer = copy.deepcopy(model.base_model.layers[-1]).double()
    mixer, letters = layer.mixer, layer.mixer_norm(model.base_model.embed_tokens.weight.double())
    _, _, _, _, dt, A, _, angle = mixer.in_proj(letters).split(mixer.split_sizes, dim=-1)
    dt = F.softplus(dt + mixer.dt_bias)
    log_decay = -mixer.decay_rate(A) * dt
    k, beta, strength = mixer.reflection(mixer.k_proj(letters), mixer.beta_proj(letters), log_decay, None)
    speed = mixer.angular_speed(angle).unflatten(-1, (-1, mixer.config.num_rope_pairs))[..., : mixer.pairs]
    found = Letters(log_decay.exp(), beta, strength, k, dt[..., None] * speed)
    return Letters(*(x[:, heads] for x in found))


def gates_of(letters: Letters) -> dict[str, float]:
    """How far the gates of a letter are, at the most, from a whole mirror or none, and from a state that stays."""
    mirrors = torch.minimum(letters.beta.abs(), (2 - letters.beta).abs())
    return {"mirrors": mirrors.max().item(), "decay": (1 - letters.decay).max().item()}


def loops_of(letters: Letters, state: Mamba3State, heads: list[int], task) -> dict[str, list[float]]:
    """
    What the angles of letters have wrong: a letter, or two in turn, repeated as often as the order of what they make
    of the group, should leave a state where it was. How far it is then, in radians a letter, of the worst letter and
    the worst two, for each head: the one is of phases and mirrors by themselves, the other of the angles between them.
    It counts all that a state holds: a part that nothing reads may move though the head is exact.

    Args:
        state: After words of the task, for what of a head's space is in use.
    """
    maps, content = letter_maps(letters), content_of(state, heads)
    algebra, elements = task.algebra, task.letters
    twos = torch.einsum("ahij,bhjk->abhik", maps, maps).flatten(0, 1)
    return {
        "letters": loop_errors(maps, elements, algebra, content).tolist(),
        "pairs": (loop_errors(twos, algebra.table[np.ix_(elements, elements)].ravel(), algebra, content) / 2).tolist(),
    }


def letter_maps(letters: Letters) -> torch.Tensor:
    """
    What a letter does to a state, (letters, heads, state, state), as seen by one who turns with the phases: the turn of
    the letter backwards, then its mirror.
    """
    k, size = letters.k, letters.k.shape[-1]
    still = torch.eye(size, dtype=k.dtype).expand(*k.shape, size)
    mirror = letters.decay[..., None, None] * still - letters.strength[..., None, None] * k[..., None] * k[..., None, :]
    return mirror @ rotate(still, turn(letters.angle))  # the rows of the latter are the turned axes, so it turns back


def content_of(state: Mamba3State, heads: list[int]) -> torch.Tensor:
    """Mean products of the coordinates of states, (heads, state, state), seen as above; of trace 1, or 0."""
    h = rotate(state.h[:, heads].transpose(-1, -2), turn(-state.phase[:, heads])).double()
    products = torch.einsum("whpi,whpj->hij", h, h)
    traces = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    return products / torch.where(traces == 0, 1, traces)[:, None, None]


def turn(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For `rotate`, of something (..., anything, state), by angles (..., pairs)."""
    angle = angle[..., None, :]
    return (angle.cos(), angle.sin()) if angle.shape[-1] else None


def loop_errors(maps: torch.Tensor, elements: np.ndarray, algebra: Group, content: torch.Tensor) -> torch.Tensor:
    """How far states are after as many times a map as its element's order, over that number, the worst: (heads,)."""
    orders = torch.tensor([order_of(algebra, int(element)) for element in elements])
    errors = maps.new_zeros(maps.shape[:2])
    for order in orders.unique().tolist():
        moved = torch.linalg.matrix_power(maps[orders == order], order) - torch.eye(maps.shape[-1], dtype=maps.dtype)
        squares = torch.einsum("ahij,hjk,ahik->ah", moved, content, moved)
        errors[orders == order] = squares.clamp(min=0).sqrt() / order
    return errors.max(0).values


def order_of(algebra: Group, element: int) -> int:
    """How often an element makes the identity, which is number 0."""
    power, order = element, 1
    while power:
        power, order = int(algebra.table[element, power]), order + 1
    return order


def measure(program: str, description: str, measured: Callable[[Path], dict], arguments: list[str] | None) -> None:
    """The command line of a program that writes what it has measured of a trained model."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="of the trained model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args(arguments)
    keep_memory()
    found = measured(given.folder)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", f"results/{program}", *arguments])
    record.write_json(given.out, {"command": command, "environment": record.environment(), **found})


def drift_of(folder: Path) -> dict:
    settings = json.loads((folder / record.RUN).read_text(encoding="utf-8"))["arguments"]
    task = make_task(settings["task"], **part(settings, "task") | {"test_lengths": (LENGTHS[-1],)})
    rows = task.rows(f"test_{LENGTHS[-1]}", 0, WORDS)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return measure_drift(model, *(torch.as_tensor(rows[name]).long() for name in ("input_ids", "labels")), task)


def main(arguments: list[str] | None = None) -> None:
    measure("drift.py", "Measures how a trained model of words drifts.", drift_of, arguments)


if __name__ == "__main__":
    main()
