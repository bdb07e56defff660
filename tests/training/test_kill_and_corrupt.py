"""A short form of the campaign of kills and damages; `make campaign` is the long one."""

import os
import subprocess
import sys

import pytest

from helpers.places import PROGRAMS


@pytest.mark.slow
def test_killed_and_damaged_runs_end_with_the_same_bits_or_are_refused():
    command = [sys.executable, str(PROGRAMS / "kill_and_corrupt.py"), "--kills=6", "--damages=8"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = {name: int(count) for count, name in (line.split(maxsplit=1) for line in done.stdout.splitlines())}
    assert counts["kills"] == 6 and counts["damages"] == 8
