"""A program may keep the memory that it frees."""

import subprocess
import sys

import pytest

COUNT = """
import resource
import torch
from mamba3_nplr.modeling.host_memory import keep_memory

if {keep}:
    assert keep_memory()

def faults_of_a_pass():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 24)  # 64 MB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_pass()
print(faults_of_a_pass())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can")
def test_memory_that_is_kept_is_not_fetched_again():
    command = [sys.executable, "-c"]
    fetched, kept = (
        int(subprocess.run([*command, COUNT.format(keep=keep)], capture_output=True, text=True, check=True).stdout)
        for keep in (False, True)
    )
    assert kept < 100 < fetched
