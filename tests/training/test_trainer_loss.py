"""Training does not depend on how a batch is divided over processes and accumulation steps."""

import json
import os
import subprocess
import sys

import pytest

from helpers.places import PROGRAMS, TESTS

WORKER = PROGRAMS / "train_worker.py"


def run(kind, out, processes, per_device_batch, accumulation):
    """Losses and gradient norms of four updates on a global batch of processes x per_device_batch x accumulation."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(WORKER), kind, str(out)]
    command += [str(per_device_batch), str(accumulation)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((out / "result.json").read_text())
    assert result["processes"] == processes
    return result


@pytest.mark.parametrize("kind", ["words", "frames", "episodes"])
def test_losses_do_not_depend_on_the_division_of_a_batch(kind, tmp_path):
    """`words` and `frames` count unequal numbers of items in each part; `episodes` has equal numbers of episodes."""
    whole = run(kind, tmp_path / "whole", processes=1, per_device_batch=4, accumulation=1)
    accumulated = run(kind, tmp_path / "accumulated", processes=1, per_device_batch=2, accumulation=2)
    divided = run(kind, tmp_path / "divided", processes=2, per_device_batch=2, accumulation=1)
    assert len(whole["losses"]) == 4
    for other in (accumulated, divided):
        assert other["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert other["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-4)
