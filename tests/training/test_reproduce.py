"""The list of the paper's runs, and the program that works through it."""

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

from helpers.places import ROOT
from helpers.training_program import WORDS, load_program, log_of
from mamba3_nplr.training import record, resume
from mamba3_nplr.training.arguments import parse_run

UPDATES = 30
LIST = f"""
# a comment
s5_generators-nplr-seed3  {" ".join(WORDS)} --max_steps {UPDATES}  # and another

s5_generators-mamba3-seed0-other {" ".join(WORDS)} --model.expand 2
"""
NAMES = ["s5_generators-nplr-seed3", "s5_generators-mamba3-seed0-other"]


def load(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


program = load("reproduce")


@pytest.fixture
def options(tmp_path):
    """Of the program: a list of two tiny runs, and folders for them."""
    (tmp_path / "list.txt").write_text(LIST)
    places = {"list": "list.txt", "folder": "runs", "results": "results"}
    return [f"--{name}={tmp_path / value}" for name, value in places.items()]


def listed(folder):
    """Those runs."""
    return program.read_list(folder / "list.txt", folder / "runs", folder / "results")


def exit_code(arguments):
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    return stop.value.code


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)


def start(arguments):
    process = multiprocessing.get_context("fork").Process(target=program.main, args=(arguments,))
    process.start()
    return process


def test_two_runs_of_which_one_is_killed_on_the_way(options, tmp_path, capfd):
    killed, other = (tmp_path / "runs" / name for name in NAMES)
    process = start([*options, "--jobs=2"])
    wait_until((killed / "checkpoint-3").exists)
    owner = int(re.search(r"process (\d+)", (killed / ".mamba3_nplr.lock").read_text())[1])
    os.kill(owner, signal.SIGKILL)
    process.join()
    said = capfd.readouterr()
    assert process.exitcode == 1 and f"1 of 2 runs failed: {NAMES[0]}." in said.err
    assert f"{NAMES[0]}: failed: killed by SIGKILL" in said.out and f"{NAMES[1]}: done in" in said.out
    assert [path.stem for path in (tmp_path / "results").iterdir()] == NAMES[1:]
    done = (other / "results.json").read_bytes()
    assert (tmp_path / "results" / f"{NAMES[1]}.json").read_bytes() == done

    process = start(options)  # resumes the one and leaves the other alone
    process.join()
    assert process.exitcode == 0 and "1 of 2 runs are done; 1 at a time." in capfd.readouterr().out
    assert "Resumes from" in Path(f"{killed}.log").read_text() and (other / "results.json").read_bytes() == done
    found = json.loads((tmp_path / "results" / f"{NAMES[0]}.json").read_text())
    assert found["seed"] == 3 and found["updates"] == UPDATES and found["mathematics"] == record.MATHEMATICS
    assert found["preset"] == "paper" and found["environment"]["threads"] == 1 and found["seconds"] > 0
    assert f"--max_steps {UPDATES}" in found["command"]

    whole = tmp_path / "whole"  # as one that nothing has disturbed
    arguments = [x for x in listed(tmp_path)[NAMES[0]].arguments if not x.startswith("--output_dir")]
    load_program().main([*arguments, f"--output_dir={whole}"])
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert log_of(whole) == log_of(killed)


def finished_run(folder):
    """One that is trained, but whose results were not yet copied."""
    run = listed(folder)[NAMES[1]]
    load_program().main(run.arguments)
    return run


def test_a_run_that_was_finished_is_not_trained_again(options, tmp_path, monkeypatch, capsys):
    run = finished_run(tmp_path)
    monkeypatch.setattr(program, "train", lambda *arguments: os._exit(9))
    program.main([*options, "--runs", NAMES[1]])
    assert run.results.read_bytes() == (run.folder / "results.json").read_bytes()
    assert "1 of 1 runs are done" in capsys.readouterr().out
    run.results.unlink()
    (run.folder / "model.safetensors").write_bytes(b"cut")  # not whole: it is no finished run
    assert exit_code([*options, "--runs", NAMES[1]]) == 1
    assert not run.results.exists()


def test_runs_of_other_mathematics_are_neither_taken_nor_resumed(options, tmp_path, monkeypatch, capsys):
    run = finished_run(tmp_path)
    run.collect()
    assert run.is_done
    monkeypatch.setattr(record, "MATHEMATICS", record.MATHEMATICS + 1)
    monkeypatch.setattr(resume, "MATHEMATICS", record.MATHEMATICS)
    assert not run.is_done
    run.results.unlink()
    run.collect()
    assert not run.results.exists()
    with pytest.raises(resume.UsageError, match="was made by other mathematics"):
        resume.find_checkpoint(parse_run(run.arguments))


def test_a_dry_run_says_how_long_each_would_take(options, tmp_path, capsys):
    run = listed(tmp_path)[NAMES[1]]
    run.results.parent.mkdir()
    run.results.write_text("{}")
    program.main([*options, "--dry_run", "--jobs=2"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"\| {NAMES[0]} \| {UPDATES} \| {UPDATES} \| [\d.]+ \| 0:\d\d \|", lines[2])
    assert lines[3] == f"| {NAMES[1]} | 8 | 0 | - | done |"
    assert re.fullmatch(r"0:\d\d of one process, 0:\d\d of 2, without the tests at the end.", lines[-1])
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_writes_the_times_of_updates(options, tmp_path, capsys):
    run = listed(tmp_path)[NAMES[1]]
    run.results.parent.mkdir()
    run.results.write_text("{}")  # it is done, and measured all the same
    program.main([*options, "--dry_run", f"--out={tmp_path / 'costs.json'}"])
    found = json.loads((tmp_path / "costs.json").read_text())
    assert list(found["runs"]) == ["s5_generators-nplr", "s5_generators-mamba3-other"]
    assert found["runs"]["s5_generators-nplr"]["updates"] == UPDATES
    assert all(cost["milliseconds_an_update"] > 0 for cost in found["runs"].values())
    assert "--dry_run" in found["command"] and found["environment"]["threads"] == 1
    assert exit_code([*options, f"--out={tmp_path / 'costs.json'}"]) == 2
    assert "only --dry_run writes such a file" in capsys.readouterr().err


def test_which_runs_are_chosen(options, tmp_path, monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(program, "carry_out", lambda runs, jobs: taken.append([run.name for run in runs]))
    for more, expected in (
        ([], NAMES),
        (["--runs", ""], NAMES),  # as make has it where no RUNS are given
        (["--runs", "*-other *-seed3"], NAMES),
        (["--runs", "*mamba3*"], NAMES[1:]),
        (["--one=2"], NAMES[1:]),
        (["--runs", "z5-nplr-seed5-mine", "--", "--model.expand", "2"], ["z5-nplr-seed5-mine"]),
        (["--runs", "z5-nplr-seed5", "--"], ["z5-nplr-seed5"]),
    ):
        program.main([*options, *more])
        assert taken.pop() == expected
    for more, message in (
        (["--runs", "z6-*"], "runs='z6-*' is not allowed: no run of"),
        (["--one=3"], "one=3 is not allowed: it must be from 1 to 2"),
        (["--jobs=0"], "jobs=0 is not allowed"),
        (["--runs", NAMES[0], "--", "--model.expand=3"], "one run that is not in the list"),
    ):
        assert exit_code([*options, *more]) == 2
        assert message in capsys.readouterr().err
    for wrong in ("z5-nplr", f"{NAMES[0]}\n{NAMES[0]}"):
        (tmp_path / "list.txt").write_text(wrong)
        assert exit_code(options) == 2
        assert "must be TASK-MODEL-seedSEED, and not be there twice" in capsys.readouterr().err


def test_a_mistake_in_the_list_shows_before_anything_starts(options, tmp_path, monkeypatch, capsys):
    (tmp_path / "list.txt").write_text("z5-nplr-seed0\nz5-nprl-seed0\n")
    monkeypatch.setattr(program, "SideBySide", pytest.fail)
    assert exit_code(options) == 2
    assert "model='nprl' is unknown" in capsys.readouterr().err


def test_every_gpu_has_a_run_of_its_own(options, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, words, environment: started.append(environment))
    monkeypatch.setattr(program.torch.cuda, "device_count", lambda: 2)
    run = listed(tmp_path)[NAMES[0]]
    for visible, expected in ((None, ["0", "1"]), ("5,7", ["5", "7"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices = program.visible_gpus()
        for place in range(2):
            program.train(run, 2, devices, place)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in started] == expected
        started.clear()


def test_the_list_has_the_runs_that_are_there_with_their_settings():
    runs = program.read_list(ROOT / "results" / "runs.txt", Path("runs"), ROOT / "results" / "runs")
    found = {path.stem: json.loads(path.read_text()) for path in (ROOT / "results" / "runs").glob("*.json")}
    assert set(found) <= set(runs)
    lines = (ROOT / "results" / "runs.txt").read_text().splitlines()
    assert sum(re.match("[a-z]", line) is not None for line in lines) == len(runs)  # so docs/training.md counts them
    for name, summary in found.items():
        assert record.command(parse_run(runs[name].arguments)) == summary["command"], name
