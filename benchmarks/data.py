"""
What fresh training batches cost beside a training step of the model, and how fast columns become tensors.

    python benchmarks/data.py [--repeats N] [--out results/data.json]

Batches and steps are timed in turns, so that a noisy machine slows both.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import load_dataset

from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification
from mamba3_nplr.datasets_scripts.build import build
from mamba3_nplr.datasets_scripts.columns import read_columns
from mamba3_nplr.datasets_scripts.tasks import make_task
from record import add_out, heading, write_results

TASKS = {
    "z5": {},
    "s5_generators": {"start_length": None},
    "shell": {},
    "shell_jitter": {},
    "shell_jitter (padded)": {"packed": False},
}


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def training_step(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


def measure_batches(name: str, settings: dict, repeats: int) -> dict[str, float]:
    task = make_task(name.partition(" ")[0], **settings)
    model_class = Mamba3NPLRForBehaviorCloning if "shell" in name else Mamba3NPLRForSequenceClassification
    model = model_class(Mamba3NPLRConfig(**task.model_fields))
    optimizer = torch.optim.Adam(model.parameters())
    training_step(model, optimizer, task.batch(0, 0))
    batches, steps = [], []
    for number in range(repeats):
        batches.append(seconds(lambda: task.batch(0, number)))  # noqa: B023
        batch = task.batch(0, number)
        steps.append(seconds(lambda: training_step(model, optimizer, batch)))  # noqa: B023
    return {
        "batch_ms": 1000 * statistics.median(batches),
        "step_ms": 1000 * statistics.median(steps),
        "ratio": statistics.median(b / s for b, s in zip(batches, steps, strict=True)),
    }


def measure_reader(rows: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "out", train_size=rows, names=["shell"])
        dataset = load_dataset(f"{folder}/out", "shell", split="train", cache_dir=f"{folder}/cache")
        columns = read_columns(dataset)
        size = sum(x.numel() * x.element_size() for x in columns.values())
        reads, copies, formats = [], [], []
        for _ in range(repeats):
            reads.append(seconds(lambda: read_columns(dataset)))
            copies.append(seconds(lambda: [x.clone() for x in columns.values()]))
            formats.append(seconds(lambda: dataset.with_format("torch")[: rows // 20]) * 20)
        read, copy, torch_format = map(statistics.median, (reads, copies, formats))
    rates = {"read_gb_per_s": size / read / 1e9, "copy_gb_per_s": size / copy / 1e9}
    return {"episodes": rows, "megabytes": size / 1e6, **rates, "torch_format_ratio": torch_format / read}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times batches against training steps, and the reader of columns.")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each kind (default: %(default)s)")
    add_out(parser)
    given = parser.parse_args()
    print(heading(repeats=given.repeats))
    print("| task | batch (ms) | training step (ms) | batch / step |\n| --- | --- | --- | --- |")
    batches = {}
    for name, settings in TASKS.items():
        row = batches[name] = measure_batches(name, settings, given.repeats)
        print(f"| {name} | {row['batch_ms']:.2f} | {row['step_ms']:.1f} | {100 * row['ratio']:.2f} % |", flush=True)
    reader = measure_reader(rows=2000, repeats=given.repeats)
    print(f"\n{reader['episodes']} episodes, {reader['megabytes']:.0f} MB")
    print(f"read_columns: {reader['read_gb_per_s']:.2f} GB/s; copying the tensors: {reader['copy_gb_per_s']:.2f} GB/s")
    print(f"with_format('torch'): {reader['torch_format_ratio']:.0f} times slower than read_columns")
    write_results(given.out, {"settings": {"repeats": given.repeats}, "batches": batches, "reader": reader})


if __name__ == "__main__":
    main()
