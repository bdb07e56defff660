"""
How a trained model drifts in words far longer than those of its training: how often it is right, what its heads read
after words with the same label, and how large their states are.

    python results/drift.py runs/exact/s4-nplr_exact-seed12 --out results/drift/s4-nplr_exact-seed12.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification

from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training import record
from mamba3_nplr.training.command_line import part
from mamba3_nplr.training.consistency import by_head, unexplained_parts

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
def measure_drift(model, tokens: torch.Tensor, labels: torch.Tensor, lengths=LENGTHS) -> dict:
    """
    Args:
        tokens, labels (words, length): Words at least as long as the longest length.

    Returns:
        By length how often the model is right; by length and head what is unexplained of what it reads, and how large
        its state is, that at the first length being 1.
    """
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
        h = state.get_recurrent_state(len(model.base_model.layers) - 1)
        found["growth"].append([h[:, head].norm(dim=(1, 2)).mean().item() for head in reads.kept])
    smallest = found["growth"][0]
    found["growth"] = [[x / y for x, y in zip(sizes, smallest, strict=True)] for sizes in found["growth"]]
    return found | gates_of(model, reads.kept)


def pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + PIECE, end)) for begin in range(start, end, PIECE)]


@torch.no_grad()
def gates_of(model, heads: list[int]) -> dict[str, float]:
    """How far the gates of a letter are, at the most, from a whole mirror or none, and from a state that stays."""
    layer = model.base_model.layers[-1]
    mixer, letters = layer.mixer, layer.mixer_norm(model.base_model.embed_tokens.weight)
    _, _, _, _, dt, A, _, _ = mixer.in_proj(letters).split(mixer.split_sizes, dim=-1)
    log_decay = -mixer.decay_rate(A) * F.softplus(dt + mixer.dt_bias)
    _, beta, _ = mixer.reflection(mixer.k_proj(letters), mixer.beta_proj(letters), log_decay, None)
    mirrors = torch.minimum(beta.abs(), (2 - beta).abs())[:, heads].max()
    return {"mirrors": mirrors.item(), "decay": (1 - log_decay.exp())[:, heads].max().item()}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description="Measures how a trained model of words drifts.")
    parser.add_argument("folder", type=Path, help="of a training, with its run.json")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args(arguments)
    settings = json.loads((given.folder / record.RUN).read_text(encoding="utf-8"))["arguments"]
    task = make_task(settings["task"], **part(settings, "task") | {"test_lengths": (LENGTHS[-1],)})
    rows = task.rows(f"test_{LENGTHS[-1]}", 0, WORDS)
    model = AutoModelForSequenceClassification.from_pretrained(given.folder).eval()
    found = measure_drift(model, *(torch.as_tensor(rows[name]).long() for name in ("input_ids", "labels")))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "results/drift.py", *arguments])
    record.write_json(given.out, {"command": command, "environment": record.environment(), **found})


if __name__ == "__main__":
    main()
