"""Several models trained alike and put side by side: `train_hf.py compare`."""

import argparse
import sys
from pathlib import Path

from .arguments import TrainingRun, parse_run
from .comparison import comparison_table, draw_comparison
from .finite import NotFiniteError
from .record import write_json
from .run import prepare, train
from .usage import UsageError, make_folder


def compare_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="train_hf.py compare",
        allow_abbrev=False,
        description="Trains several models alike and puts them side by side; finished ones are not trained again. All "
        "fields of train_hf.py but model and output_dir can be given too.",
    )
    parser.add_argument("--models", nargs="+", required=True, metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: %(default)s)")
    given, rest = parser.parse_known_args(arguments)
    taken = {"--model", "--output_dir", "--resume_from_checkpoint"} & {word.partition("=")[0] for word in rest}
    if taken:
        raise UsageError(f"{taken.pop()} cannot be given to compare: --models and --out stand for it.")
    if len(set(given.models)) < len(given.models):
        raise UsageError(f"models={' '.join(given.models)} is not allowed: each can be given once.")
    runs, summaries = {}, {}
    # All of them before the first is trained: the last may be the one with a mistake.
    for model in given.models:
        named = ["--model", model, "--output_dir", str(given.out / model), "--resume_from_checkpoint"]
        runs[model] = parse_run([*rest, *named])
    make_folder("out", given.out)
    prepare(*runs.values())
    for model, run in runs.items():
        try:
            summaries[model] = train(run)
        except NotFiniteError as error:
            print(error, file=sys.stderr)
            summaries[model] = {"failed": "not finite"}
    if run.args.process_index == 0:
        report(run, summaries, given.out)


def report(run: TrainingRun, summaries: dict[str, dict], out: Path) -> None:
    table = comparison_table(run.task, summaries)
    write_json(out / "comparison.json", summaries)
    (out / "comparison.md").write_text(table + "\n", encoding="utf-8")
    measured = run.task.main_metric.replace("_", " ")
    print(f"\n{run.task_name}, {measured} in per cent\n\n{table}\n")
    written = ["comparison.json", "comparison.md"]
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
