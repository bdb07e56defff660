"""A program may keep the memory that it frees."""

import subprocess
import sys

import pytest

COUNT = """
import resource
import torch
from mamba3_nplr.training.host_memory import keep_memory

if {keep}:
    assert keep_memory()

torch.zeros(1 << 24)  # 64 MB, 16,384 pages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(15 << 20)  # a little less, since small things may have taken some of it
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can")
def test_memory_that_is_kept_is_not_fetched_again():
    command = [sys.executable, "-c"]
    fetched, kept = (
        int(subprocess.run([*command, COUNT.format(keep=keep)], capture_output=True, text=True, check=True).stdout)
        for keep in (False, True)
    )
    assert kept < 100 < fetched
