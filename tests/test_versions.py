"""What `make test-versions` tries: every dependency at its lower bound, under interpreters that are there."""

import os
import subprocess
import sys

from packaging.requirements import Requirement

from helpers.places import PROGRAMS
from programs.versions import PROJECT, REQUIREMENTS, lower_bounds


def test_every_dependency_is_tried_at_its_lower_bound():
    # The package with its own extras has no bound, and what is pinned needs none.
    bounded = [one for one in REQUIREMENTS if one.name != PROJECT["name"] and "==" not in str(one.specifier)]
    oldest = {one.name: one for one in map(Requirement, lower_bounds())}
    assert oldest.keys() == {one.name for one in bounded}
    for one in bounded:
        (version,) = oldest[one.name].specifier
        assert version.operator == "==" and version.version in one.specifier and oldest[one.name].marker == one.marker


def test_it_is_an_error_if_no_interpreter_is_there(tmp_path):
    options = ["--pythons", "python0.1", "--environments", str(tmp_path / "none")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAMS / "versions.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "every interpreter was skipped" in done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| python0.1")]
    assert [row[1] for row in rows] == ["oldest", "newest"]
    assert all("skipped: python0.1 does not run" in row[-1] for row in rows)
    assert not (tmp_path / "none").exists()
