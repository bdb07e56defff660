"""
The block on a processor with each backend of the scan, as a ratio to the floor: the same block with the scan left out.

    python benchmarks/cpu.py [--repeats N] [--out results/cpu.json]

All variants take turns in one run, so that a noisy machine slows them alike; ratios are medians over the turns.
"""

import argparse
import json
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
from mamba3_nplr.modeling import mixer_mamba3

SHAPES = {
    "S5": (64, 64, {}),
    "shell": (32, 213, {}),
    "long": (8, 2048, {}),
    "LM": (1, 2048, {"hidden_size": 1024, "expand": 2, "head_dim": 64, "state_size": 64, "num_rope_pairs": 16}),
}
VARIANTS = ("floor", "chunkwise", "cpu")


@contextmanager
def without_scan():
    """The scan gives back its input, so that only what stands around it is left."""
    scan = mixer_mamba3.scan
    mixer_mamba3.scan = lambda u, *rest, initial_state, **named: (u, initial_state)
    yield
    mixer_mamba3.scan = scan


def measure(block, x, variant: str) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass."""
    block.config.scan_backend = "auto" if variant == "floor" else variant
    start = time.perf_counter()
    output, _ = block(x)
    middle = time.perf_counter()
    output.sum().backward()
    return middle - start, time.perf_counter() - middle


def measure_in_turns(batch: int, length: int, fields: dict, repeats: int) -> dict[str, list[tuple[float, float]]]:
    block = Mamba3NPLRModel(Mamba3NPLRConfig(**fields)).layers[0].mixer
    x = torch.randn(batch, length, block.config.hidden_size, requires_grad=True)
    times = {variant: [] for variant in VARIANTS}
    for turn in range(repeats + 1):
        for variant in VARIANTS:
            if variant == "floor":
                with without_scan():
                    measured = measure(block, x, variant)
            else:
                measured = measure(block, x, variant)
            if turn:  # the first turn warms up
                times[variant].append(measured)
    return times


def summarise(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    floor = [sum(pair) for pair in times["floor"]]
    return {
        variant: {
            "forward_ms": 1000 * statistics.median(forward for forward, _ in pairs),
            "backward_ms": 1000 * statistics.median(backward for _, backward in pairs),
            "ratio_to_floor": statistics.median(sum(pair) / base for pair, base in zip(pairs, floor, strict=True)),
        }
        for variant, pairs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the block with each backend of the scan on a processor.")
    parser.add_argument("--repeats", type=int, default=9, help="turns that count (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write, such as results/cpu.json")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {given.repeats}\n")
    print("| shape | variant | forward (ms) | backward (ms) | ratio to floor |\n| --- | --- | --- | --- | --- |")
    results = {}
    for shape, (batch, length, fields) in SHAPES.items():
        results[shape] = summarise(measure_in_turns(batch, length, fields, given.repeats))
        for variant, row in results[shape].items():
            numbers = f"{row['forward_ms']:.1f} | {row['backward_ms']:.1f} | {row['ratio_to_floor']:.2f}"
            print(f"| {shape} | {variant} | {numbers} |", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "repeats": given.repeats}
        given.out.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
