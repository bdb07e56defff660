"""
What the training program costs over a bare loop on the same model and data, at the paper's shapes.

    python benchmarks/trainer.py [--updates N] [--repeats N] [--out results/trainer.json]

A bare loop is: make the batch, forward, backward, clip, optimizer, schedule. Both run the same number of updates from
the same weights and take turns, so that a noisy machine slows them alike; ratios are medians over the turns. The
program runs as it does in training, with its checks and a log entry every ten updates, more often than in the presets;
both keep the memory they free. Checkpoints and evaluations, whose cost depends on how often they are made, are skipped
on both sides.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers
from transformers import TrainerCallback

from mamba3_nplr.training.arguments import TrainingRun, parse_run
from mamba3_nplr.training.batches import FreshBatches
from mamba3_nplr.training.host_memory import keep_memory
from mamba3_nplr.training.models import new_model
from mamba3_nplr.training.trainer import ResumableTrainer
from record import add_out, heading, write_results

# No curriculum: every update has the paper's full shape.
SHAPES = {
    "S5 (64 x 64)": ["--task=s5_generators", "--task.start_length=null"],
    "shell game (32 x 213)": ["--task=shell"],
}
WARM_UP = 3


class Clock(TrainerCallback):
    """Notes the time at the end of each update, as Trainer itself sees it."""

    def __init__(self):
        self.times = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())


def make_model(run: TrainingRun):
    transformers.set_seed(run.args.seed)
    return new_model(run.task, run.config)


def seconds_of_updates(times: list[float]) -> float:
    return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP)


def with_trainer(run: TrainingRun) -> float:
    """Seconds of an update in the training program."""
    clock = Clock()
    batches = FreshBatches(run.task, run.args.seed, run.args.max_steps)
    trainer = ResumableTrainer(make_model(run), run.args, batches, evaluator=dict, record={})
    trainer.add_callback(clock)
    trainer.train()
    return seconds_of_updates(clock.times)


def bare(run: TrainingRun) -> float:
    """Seconds of an update in a bare loop."""
    args, model, times = run.args, make_model(run).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, args.max_steps)
    for step in range(args.max_steps):
        model(**run.task.batch(args.seed, step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return seconds_of_updates(times)


def measure(arguments: list[str], updates: int, repeats: int, folder: str) -> dict[str, float]:
    options = ["--save_strategy=no", "--eval_strategy=no", "--logging_steps=10", "--disable_tqdm=true", "--use_cpu"]
    pairs = []
    for turn in range(repeats):
        run = parse_run(
            [*arguments, *options, "--report_to=none", f"--max_steps={updates}", f"--output_dir={folder}/{turn}"]
        )
        order = (bare, with_trainer) if turn % 2 else (with_trainer, bare)
        found = {function: function(run) for function in order}
        pairs.append((found[bare], found[with_trainer]))
    return {
        "bare_ms": 1000 * statistics.median(pair[0] for pair in pairs),
        "trainer_ms": 1000 * statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(trainer / loop for loop, trainer in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the training program against a bare loop.")
    parser.add_argument("--updates", type=int, default=40, help="updates of a run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="turns (default: %(default)s)")
    add_out(parser)
    given = parser.parse_args()
    keep_memory()
    settings = {"updates": given.updates, "repeats": given.repeats}
    print(heading(**settings), flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape, arguments in SHAPES.items():
            results[shape] = measure(arguments, given.updates, given.repeats, folder)
    print("| shape | bare loop (ms) | train_hf.py (ms) | ratio |\n| --- | --- | --- | --- |")
    for shape, row in results.items():
        print(f"| {shape} | {row['bare_ms']:.1f} | {row['trainer_ms']:.1f} | {row['ratio']:.3f} |")
    write_results(given.out, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
