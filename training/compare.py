"""Several models trained alike and put side by side: `train_hf.py compare`."""

import argparse
import json
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch

from ..datasets_scripts.show import can_draw, figure_class
from .arguments import TrainingRun, parse_run
from .comparison import comparison_table, draw_comparison
from .endings import FailedRunsError, StoppedError, exit_with_sentence, in_few_words
from .finite import NotFiniteError
from .live_display import LiveDisplay
from .models import new_model
from .record import RESULTS, write_json
from .run import compile_ahead, prepare, train
from .side_by_side import Job, SideBySide
from .threads import cores, threads_asked_for
from .usage import UsageError, make_folder

# Reports that are whole after every entry. Others are finished when the program ends, which a process that is forked
# off does without a word to them.
REPORTS_OF_FORKS = {"none", "tensorboard"}


def compare_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="train_hf.py compare",
        allow_abbrev=False,
        description="Trains several models alike and puts them side by side; finished ones are not trained again. All "
        "fields of train_hf.py but model and output_dir can be given too.",
    )
    parser.add_argument("--models", nargs="+", required=True, metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="models trained at a time, on a processor (default: one for each core)"
    )
    given, rest = parser.parse_known_args(arguments)
    taken = {"--model", "--output_dir", "--resume_from_checkpoint"} & {word.partition("=")[0] for word in rest}
    if taken:
        raise UsageError(f"{taken.pop()} cannot be given to compare: --models and --out stand for it.")
    if len(set(given.models)) < len(given.models):
        raise UsageError(f"models={' '.join(given.models)} is not allowed: each can be given once.")
    if given.jobs is not None and given.jobs < 1:
        raise UsageError(f"jobs={given.jobs} is not allowed: it must be a whole number of at least 1.")
    runs = {}
    # All of them before the first is trained: the last may be the one with a mistake.
    for model in given.models:
        named = ["--model", model, "--output_dir", str(given.out / model), "--resume_from_checkpoint"]
        runs[model] = parse_run([*rest, *named])
    make_folder("out", given.out)
    prepare(*runs.values())
    at_once = models_at_once(list(runs.values()), given.jobs)
    if at_once > 1:
        summaries = train_side_by_side(runs, given.out, at_once, share_last=given.jobs is None)
    else:
        summaries = train_in_turn(runs)
    run = runs[given.models[-1]]
    if run.args.process_index == 0:
        report(run, summaries, given.out)
    failed = [f"{model} ({summary['failed']})" for model, summary in summaries.items() if "failed" in summary]
    if failed:
        raise FailedRunsError(f"{len(failed)} of {len(runs)} models failed: {', '.join(failed)}.")


def models_at_once(runs: list[TrainingRun], jobs: int | None) -> int:
    """How many to train at a time. Several processes of one training, or a GPU, are left to one model after another."""
    args = runs[0].args
    # Elsewhere than on Linux there is no fork, or libraries that do not survive it.
    if args.world_size > 1 or args.device.type != "cpu" or sys.platform != "linux":
        return 1
    if not set(args.report_to) <= REPORTS_OF_FORKS:
        return 1
    return min(len(runs), jobs or max(1, cores() // (threads_asked_for() or 1)))


def train_in_turn(runs: dict[str, TrainingRun]) -> dict[str, dict]:
    """What each model has found, or why it has failed; one after another in this process."""
    summaries = {}
    for model, run in runs.items():
        try:
            summaries[model] = train(run)
        except StoppedError:
            raise
        except Exception as error:
            # Of several processes that share a training, another may not have come as far: it would wait for ever.
            if run.args.world_size > 1 and not isinstance(error, NotFiniteError):
                raise
            print(error, file=sys.stderr) if isinstance(error, NotFiniteError) else traceback.print_exc()
            summaries[model] = {"failed": in_few_words(error)}
    return summaries


def train_side_by_side(runs: dict[str, TrainingRun], out: Path, at_once: int, share_last: bool) -> dict[str, dict]:
    """The same with a process for each model, several at a time."""
    share = max(1, cores() // at_once)
    threads = torch.get_num_threads()
    print(f"{len(runs)} models side by side on {cores()} cores; what each of them says: {out}/MODEL.log", flush=True)
    torch.set_num_threads(1)  # threads that are there before a fork would be waited for after it, in vain
    try:
        load_once(runs)
        jobs = [Job(model, partial(train_in_child, run, share), out / f"{model}.log") for model, run in runs.items()]
        stopped = SideBySide(jobs, at_once, LiveDisplay(), share_last).run()
    finally:
        torch.set_num_threads(threads)
    if stopped:
        raise StoppedError(stopped, "Stopped. To resume, give the same command.")
    return {job.name: summary_of(job, runs[job.name]) for job in jobs}


def load_once(runs: dict[str, TrainingRun]) -> None:
    """What all models need and each would load or make by itself, if it were not there before the processes fork."""
    if can_draw():
        figure_class()
    for run in runs.values():
        compile_ahead(run)
        with tempfile.TemporaryDirectory() as folder:
            new_model(run.task, run.config).write_code(folder)


def train_in_child(run: TrainingRun, share: int, place: int) -> None:
    with exit_with_sentence():
        train(run, share)


def summary_of(job: Job, run: TrainingRun) -> dict:
    if job.failure is None:
        return json.loads(Path(run.args.output_dir, RESULTS).read_text(encoding="utf-8"))
    print(f"{job.name}: {job.failure}; see {job.log}", file=sys.stderr)
    return {"failed": job.failure}


def report(run: TrainingRun, summaries: dict[str, dict], out: Path) -> None:
    table = comparison_table(run.task, summaries)
    write_json(out / "comparison.json", summaries)
    (out / "comparison.md").write_text(table + "\n", encoding="utf-8")
    measured = run.task.main_metric.replace("_", " ")
    print(f"\n{run.task_name}, {measured} in per cent\n\n{table}\n")
    written = ["comparison.json", "comparison.md"]
    if not any("results" in summary for summary in summaries.values()):
        return  # there is nothing to draw, and nothing to do next
    try:
        draw_comparison(run.task, summaries, out / "comparison.png")
        written.insert(0, "comparison.png")
    except ImportError as error:
        print(error)
    last = next(reversed(summaries))
    print(
        f"Wrote {out}: {', '.join(written)}, and each model in a folder of its own.\n\n"
        "Next\n"
        f"  any checkpoint on its test sets:  python train_hf.py evaluate {out / last}\n"
        "  the shell game:                   python train_hf.py --task shell --model nplr\n"
        f"  the paper's training:             python train_hf.py --task {run.task_name} --model nplr --preset paper\n"
        "  all else:                         python train_hf.py --help"
    )
