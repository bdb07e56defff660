"""
Instructions of the compiled mixer a token and head, forward and backward, beside those that its recurrence needs.

    python benchmarks/instructions.py [--out results/instructions.json]

Callgrind counts them (see callgrind.py), so that they are the same on a busy machine; it needs valgrind, and some
minutes. The recurrence alone, at state n and P channels, multiplies and adds 5 n P times forward (decay, write,
reflection, its reading by C and by the next k) and 14 n P times backward (the same again from a kept state, one for the
gradient of C, and eight for those of the state, B, k and u), divided by the lanes of a vector. What is counted
beyond them are loads and stores that no operation takes along, addresses, and what a token is before it enters the
recurrence: norms, gates, the rotation, and the transposition that brings heads into lanes.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import torch

import callgrind
from mamba3_nplr import Mamba3NPLRConfig
from mamba3_nplr.modeling.mixers.mamba3 import Mamba3Mixer
from mamba3_nplr.modeling.mixers.mamba3_cpu import mixer_cpu
from mamba3_nplr.modeling.scan.sequences import token_order
from record import add_out, heading, write_results

BATCH, LENGTH, LETTERS = 8, 64, 4
KINDS = ("tokens", "letters")
DIRECTIONS = {"forward": 5, "backward": 14}  # multiplications with an addition for each element of a state


def run_mixer(kind: str, direction: str) -> None:
    """What runs under callgrind: the second call counts, since the first one loads the library."""
    config = Mamba3NPLRConfig()
    mixer = Mamba3Mixer(config).requires_grad_(False)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(*((LETTERS,) if kind == "letters" else (BATCH, LENGTH)), config.hidden_size)
    index = (torch.randint(LETTERS, (BATCH, LENGTH)),) if kind == "letters" else ()
    projections = [layer(x).requires_grad_() for layer in (mixer.in_proj, mixer.k_proj, mixer.beta_proj)]
    weights, order = mixer.weights(), token_order(None, None, BATCH, LENGTH)
    state = mixer.initial_state(torch.empty(BATCH, LENGTH, config.hidden_size))
    for counted in (None, direction):
        if counted == "forward":
            callgrind.start_counting()
        y, _ = mixer_cpu(*projections, weights, state, order, *index, **mixer.options)
        if counted == "backward":
            callgrind.start_counting()
        if counted != "forward":
            y.backward(torch.randn_like(y))
    callgrind.stop_counting()


def measure() -> list[dict]:
    config, rows = Mamba3NPLRConfig(), []
    elements = config.state_size * config.head_dim
    with tempfile.TemporaryDirectory() as folder:
        for kind, (direction, operations) in itertools.product(KINDS, DIRECTIONS.items()):
            counted = callgrind.count([__file__, "--counted", kind, direction], Path(folder))
            instructions = callgrind.instructions_in("scan_float", counted)
            rows.append(
                {
                    "inputs": kind,
                    "direction": direction,
                    "instructions": instructions / (BATCH * LENGTH * config.num_heads),
                    "recurrence": operations * elements / (callgrind.VECTOR_BYTES // 4),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts instructions of the compiled mixer a token and head.")
    parser.add_argument("--counted", nargs=2, metavar=("KIND", "DIRECTION"), help=argparse.SUPPRESS)
    add_out(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.counted:
        run_mixer(*given.counted)
        return
    reason = callgrind.why_no_count()
    if reason:
        sys.exit(f"Nothing can be counted: {reason}.")
    print(heading(batch=BATCH, length=LENGTH, vector_bytes=callgrind.VECTOR_BYTES))
    results = measure()
    print("| inputs | direction | instructions a token and head | vector operations of the recurrence |")
    print("| --- | --- | --- | --- |")
    for row in results:
        print(f"| {row['inputs']} | {row['direction']} | {row['instructions']:,.0f} | {row['recurrence']:,.0f} |")
    settings = {"batch": BATCH, "length": LENGTH, "letters": LETTERS, "vector_bytes": callgrind.VECTOR_BYTES}
    write_results(given.out, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
