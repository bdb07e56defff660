"""
Trains, compares and evaluates the models on the tasks, with transformers.Trainer and Accelerate.

    python train_hf.py --task s5_generators --model nplr --preset paper --seed 0
    python train_hf.py compare --models mamba3 nplr nplr_exact --task s5_generators
    python train_hf.py evaluate runs/s5_generators-nplr-paper-seed0
    torchrun --nproc_per_node 2 train_hf.py --task shell

`python train_hf.py --help` lists the fields.
"""

import os
import sys

# Before torch is imported: its threads spin while they wait for each other, and beside other work one that waits for a
# thread without a core spins on and on. So they sleep after some microseconds (benchmarks/busy.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import transformers

from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.compare import compare_command
from mamba3_nplr.training.comparison import comparison_table
from mamba3_nplr.training.endings import exit_with_sentence
from mamba3_nplr.training.evaluate_checkpoint import evaluate_command
from mamba3_nplr.training.help import help_text
from mamba3_nplr.training.run import prepare, train


def train_command(arguments: list[str]) -> None:
    run = parse_run(arguments)
    prepare(run)
    summary = train(run)
    if run.args.process_index == 0:
        print(f"\n{comparison_table(run.task, {run.model_name: summary})}\n\nWrote {run.args.output_dir}")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()  # of every file it writes or reads
    commands = {"compare": compare_command, "evaluate": evaluate_command}
    try:
        with exit_with_sentence():
            if arguments and arguments[0] in commands:
                commands[arguments[0]](arguments[1:])
            elif {"-h", "--help", "--help_all"} & set(arguments):
                print(help_text(arguments, everything="--help_all" in arguments))
            else:
                train_command(arguments)
    finally:
        if torch.distributed.is_initialized():
            # Its threads may else outlive what they use, and abort the process.
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
