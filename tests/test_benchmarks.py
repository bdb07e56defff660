"""What benchmarks need to measure two revisions against each other."""

import importlib
import os
import subprocess
import sys

import pytest

from helpers.places import ROOT


@pytest.fixture
def against(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("against")
    for name in ("against", "record"):
        sys.modules.pop(name, None)


def test_a_worker_has_the_package_of_its_folder(against, tmp_path):
    """And not the one that is installed."""
    folder = tmp_path / "revision"
    folder.mkdir()
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in ("mamba3_nplr", "configuration", "modeling", "datasets_scripts", "training"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "packages").mkdir()
    against.link_package(folder, tmp_path / "packages")
    code = "import mamba3_nplr.training, mamba3_nplr.modeling as m; print(mamba3_nplr.training.NAME, m.NAME)"
    (tmp_path / "program.py").write_text(code)
    command, environment = [sys.executable, "program.py"], os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["training", "modeling"], done.stderr


def test_cases_take_turns_and_ratios_are_those_of_turns(against, monkeypatch):
    asked, seconds = [], {"tree": [1.0, 4.0, 9.0], "revision": [2.0, 2.0, 3.0]}

    def ask(process, case):
        asked.append(process)
        return seconds[process].pop(0)

    monkeypatch.setattr(against, "ask", ask)
    found = against.measure_case({"tree": "tree", "revision": "revision"}, ("S5",), 3)
    assert asked == ["revision", "tree", "tree", "revision", "revision", "tree"]
    assert found == {"tree_ms": 4000.0, "revision_ms": 2000.0, "ratio": 2.0}


def test_a_revision_that_is_none_is_named(against):
    with pytest.raises(SystemExit, match="against='nosuch' is not a revision"):
        against.revision_of("nosuch")
