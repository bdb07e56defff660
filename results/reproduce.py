"""
Works through the runs of the paper, one process a core or GPU: skips what is done, resumes what was stopped, and can be
stopped and started at any moment.

    python results/reproduce.py [--runs 'z5-*-seed0 shell-*'] [--dry_run [--out results/costs.json]]

`results/runs.txt` lists the runs. Each is trained in `runs/paper/NAME`, and its results are copied to
`results/runs/NAME.json`, by which it counts as done.
"""

import argparse
import fnmatch
import json
import os
import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mamba3_nplr.modeling.hub.atomic_files import write_atomically
from mamba3_nplr.training import record
from mamba3_nplr.training.arguments import TrainingRun, parse_run
from mamba3_nplr.training.checkpoints import is_whole, last_whole_checkpoint
from mamba3_nplr.training.endings import FailedRunsError, StoppedError, exit_with_sentence
from mamba3_nplr.training.host_memory import keep_memory
from mamba3_nplr.training.live_display import LiveDisplay, clock
from mamba3_nplr.training.models import new_model
from mamba3_nplr.training.side_by_side import Job, SideBySide
from mamba3_nplr.training.threads import cores
from mamba3_nplr.training.usage import UsageError

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "train_hf.py"
NAME = re.compile(r"(?P<task>\w+)-(?P<model>\w+)-seed(?P<seed>\d+)(-[\w.-]+)?")
SAMPLES = 5  # updates of a run that --dry_run measures


@dataclass(frozen=True)
class Run:
    """
    One run of the list.

    Args:
        name: Task, model and seed, and what is special, as in the list.
        options: Of train_hf.py, beside those that follow from the name.
        trainings, found: The folders where runs are trained, and where they leave files for the tables.
    """

    name: str
    options: tuple[str, ...]
    trainings: Path
    found: Path

    @property
    def folder(self) -> Path:
        return self.trainings / self.name

    @property
    def results(self) -> Path:
        return self.found / f"{self.name}.json"

    @property
    def arguments(self) -> list[str]:
        """Of train_hf.py."""
        parts = NAME.fullmatch(self.name)
        named = [f"--{field}={parts[field]}" for field in ("task", "model", "seed")]
        return [*named, "--preset=paper", f"--output_dir={self.folder}", "--resume_from_checkpoint", *self.options]

    @property
    def is_done(self) -> bool:
        return made_by_these_mathematics(self.results)

    def collect(self) -> None:
        """Copies its results to where the tables find them, once it is finished and whole."""
        trained = self.folder / record.RESULTS
        if made_by_these_mathematics(trained) and is_whole(self.folder):
            self.found.mkdir(parents=True, exist_ok=True)
            write_atomically(self.results, lambda part: part.write_bytes(trained.read_bytes()))


def made_by_these_mathematics(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("mathematics", 1) == record.MATHEMATICS
    except FileNotFoundError:
        return False


def read_list(path: Path, trainings: Path, found: Path) -> dict[str, Run]:
    """The runs of a list by their names, in its order."""
    runs = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        name, *options = words
        if not NAME.fullmatch(name) or name in runs:
            raise UsageError(f"{path}, line {number}: {name!r} must be TASK-MODEL-seedSEED, and not be there twice.")
        runs[name] = Run(name, tuple(options), trainings, found)
    return runs


def chosen_runs(given: argparse.Namespace) -> list[Run]:
    """Those of the list whose names match, or one that is not in it."""
    listed = read_list(given.list, given.folder, given.results)
    if given.options and (len(given.runs) != 1 or given.runs[0] in listed):
        raise UsageError("Options of train_hf.py can be given for one run that is not in the list, named by --runs.")
    chosen = {}
    for pattern in given.runs or ["*"]:
        found = {name: listed[name] for name in fnmatch.filter(listed, pattern)}
        if not found and NAME.fullmatch(pattern):
            found = {pattern: Run(pattern, tuple(given.options), given.folder, given.results)}
        if not found:
            raise UsageError(f"runs={pattern!r} is not allowed: no run of {given.list} has such a name.")
        chosen |= found
    # In the order of the list, whatever that of the patterns.
    order = {name: place for place, name in enumerate(listed)}
    runs = sorted(chosen.values(), key=lambda run: order.get(run.name, len(order)))
    if given.one is None:
        return runs
    if not 1 <= given.one <= len(runs):
        raise UsageError(f"one={given.one} is not allowed: it must be from 1 to {len(runs)}, the number of runs.")
    return [runs[given.one - 1]]


def carry_out(runs: list[Run], jobs: int | None) -> None:
    """Trains those that are not done, several at a time."""
    for run in runs:
        run.collect()  # what a process has finished that was killed before it could do so itself
    open_runs = {run.name: run for run in runs if not run.is_done}
    devices = visible_gpus()
    at_once = min(jobs or len(devices) or cores(), max(1, len(open_runs)))
    print(f"{len(runs) - len(open_runs)} of {len(runs)} runs are done; {at_once} at a time.", flush=True)
    for run in open_runs.values():
        parse_run(run.arguments)  # a mistake in the list shows now
    work = [
        Job(name, partial(train, run, at_once, devices), Path(f"{run.folder}.log")) for name, run in open_runs.items()
    ]
    stopped = SideBySide(work, at_once, LiveDisplay(), when_done=lambda job: open_runs[job.name].collect()).run()
    if stopped:
        raise StoppedError(stopped, "Stopped. To resume, give the same command.")
    failed = [job.name for job in work if not open_runs[job.name].is_done]
    if failed:
        raise FailedRunsError(f"{len(failed)} of {len(work)} runs failed: {', '.join(failed)}.")


def train(run: Run, at_once: int, devices: list[str], place: int) -> None:
    """Becomes the training program, on a GPU or with a share of the cores of its own."""
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // at_once)))
    os.execve(sys.executable, [sys.executable, str(PROGRAM), *run.arguments], environment)


def visible_gpus() -> list[str]:
    """By the names that CUDA_VISIBLE_DEVICES has for them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def say_what_it_would_take(runs: list[Run], jobs: int | None, out: Path | None, command: str) -> None:
    """
    How long each run would take from where it is, by updates that are measured now, on one free core or a GPU.

    Args:
        out: A file for the times of updates by task and model, of those that are done as well.
        command: What to say there of how it was made.
    """
    torch.set_num_threads(1)
    keep_memory()
    total, known, costs = 0.0, {}, {}
    print("| run | updates | left | ms an update | time |\n| --- | --- | --- | --- | --- |")
    for run in runs:
        settings = parse_run(run.arguments)
        updates, left = settings.args.max_steps, 0 if run.is_done else updates_left(run, settings)
        kind = tuple(word for word in run.arguments if not word.startswith(("--seed", "--output_dir")))
        if (left or out) and kind not in known:
            known[kind] = seconds_of_an_update(settings)
            name = re.sub(r"-seed\d+", "", run.name)
            costs[name] = {"updates": updates, "milliseconds_an_update": round(1000 * known[kind], 2)}
        seconds = left * known[kind] if left else 0.0
        total += seconds
        cells = f"{1000 * known[kind]:.1f} | {clock(seconds)}" if left else "- | done"
        print(f"| {run.name} | {updates:,} | {left:,} | {cells} |", flush=True)
    at_once = jobs or torch.cuda.device_count() or cores()
    print(f"\n{clock(total)} of one process, {clock(total / at_once)} of {at_once}, without the tests at the end.")
    if out:
        record.write_json(out, {"command": command, "environment": record.environment(), "runs": costs})


def updates_left(run: Run, settings: TrainingRun) -> int:
    checkpoint = last_whole_checkpoint(run.folder)
    return settings.args.max_steps - (int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0)


def seconds_of_an_update(run: TrainingRun) -> float:
    """The mean over a run, of which some updates are measured: a curriculum makes the later ones longer."""
    device, steps = run.args.device, run.args.max_steps
    now = time.process_time if device.type == "cpu" else time.perf_counter  # other work here does not count
    model = new_model(run.task, run.config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.args.learning_rate)

    def update(step: int) -> float:
        batch = {name: x.to(device) for name, x in run.task.batch(run.args.seed, step).items()}
        start = now()
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        float(norm)  # waits for the device
        return now() - start

    middles = [int((part + 0.5) * steps / SAMPLES) for part in range(SAMPLES)]
    for step in (middles[0], middles[-1]):
        update(step)
    return statistics.mean(min(update(step) for _ in range(2)) for step in middles)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python results/reproduce.py",
        description="Works through the runs of the paper: skips what is done and resumes what was stopped.",
        epilog="After -- options of train_hf.py may follow, for a run that is not in the list.",
    )
    parser.add_argument(
        "--runs", type=str.split, default=[], metavar="PATTERNS", help="some only, such as 'z5-*-seed0 shell-*'"
    )
    parser.add_argument("--dry_run", action="store_true", help="only say how long it would take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --dry_run writes the times of updates as JSON")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one for each GPU, or core)")
    parser.add_argument("--one", type=int, metavar="N", help="only the run of this number among them, from 1")
    parser.add_argument("--list", type=Path, default=HERE / "runs.txt", help="(default: results/runs.txt)")
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="of trainings (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=HERE / "runs", help="of what they find (default: results/runs)")
    arguments = sys.argv[1:] if arguments is None else arguments
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    given = parser.parse_args(own)
    given.options = arguments[len(own) + 1 :]
    with exit_with_sentence("reproduce.py"):
        if given.jobs is not None and given.jobs < 1:
            raise UsageError(f"jobs={given.jobs} is not allowed: it must be a whole number of at least 1.")
        if given.out and not given.dry_run:
            raise UsageError(f"out={given.out} is not allowed: only --dry_run writes such a file.")
        runs = chosen_runs(given)
        if given.dry_run:
            command = shlex.join(["python", "results/reproduce.py", *arguments])
            say_what_it_would_take(runs, given.jobs, given.out, command)
        else:
            carry_out(runs, given.jobs)


if __name__ == "__main__":
    main()
