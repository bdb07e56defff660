"""Several models trained side by side: as one after another, whatever happens to one of them or to all."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helpers import training_program
from helpers.training_program import WORDS, call_at_step, log_of
from mamba3_nplr.training import comparison, threads
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.compare import models_at_once
from mamba3_nplr.training.finite import NotFiniteError
from mamba3_nplr.training.trainer import ResumableTrainer

program = training_program.load_program()
MODELS = ["mamba3", "nplr"]


def compare(out, *options):
    return ["compare", "--models", *MODELS, *WORDS, f"--out={out}", *options]


def exit_code(arguments):
    """Of the program where it ends with one."""
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    return stop.value.code


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """The folder of a comparison of one model after another, which nothing has disturbed."""
    folder = tmp_path_factory.mktemp("in_turn") / "out"
    program.main(compare(folder, "--jobs=1"))
    return folder


def same_results(out, expected):
    for model in MODELS:
        weights = [(folder / model / "model.safetensors").read_bytes() for folder in (out, expected)]
        assert weights[0] == weights[1]
        assert log_of(out / model) == log_of(expected / model)
    results = [json.loads((folder / "comparison.json").read_text()) for folder in (out, expected)]
    for model in MODELS:
        ours, theirs = (found[model] | {"seconds": None} for found in results)
        assert ours == theirs
    for name in ("comparison.md", "comparison.png"):
        assert (out / name).read_bytes() == (expected / name).read_bytes()


def only_for(rank, action):
    """An action for `call_at_step` in the process of one of the models."""
    return lambda trainer: action() if trainer.model.config.reflection_rank == rank else None


def test_side_by_side_gives_what_one_after_another_gives(in_turn, tmp_path, capsys):
    program.main(compare(tmp_path / "out", "--jobs=2"))
    same_results(tmp_path / "out", in_turn)
    said = capsys.readouterr().out
    assert "2 models side by side" in said and "nplr: done in " in said
    assert "\x1b" not in said and "\r" not in said
    for model in MODELS:
        assert f"{model} on s5_generators (quick, seed 0)" in (tmp_path / "out" / f"{model}.log").read_text()


def test_compare_trains_each_and_reports(tmp_path, capsys):
    arguments = ["compare", "--models", "mamba3", "nplr", *WORDS, f"--out={tmp_path / 'out'}"]
    program.main(arguments)
    text = capsys.readouterr().out
    assert "| model | parameters | length 8 | length 20 |" in text and "| chance |" in text and "evaluate" in text
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    comparison.main([str(tmp_path / "out" / "comparison.json"), str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "out" / "comparison.png").read_bytes()
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(written) == ["mamba3", "nplr"]
    for name in written:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / name)
        assert model.config.reflection_rank == (name == "nplr")
    weights = (tmp_path / "out" / "nplr" / "model.safetensors").stat().st_mtime_ns
    before = log_of(tmp_path / "out" / "nplr")
    program.main(arguments)  # finds both finished
    assert log_of(tmp_path / "out" / "nplr") == before
    assert (tmp_path / "out" / "nplr" / "model.safetensors").stat().st_mtime_ns >= weights


def test_compare_names_its_own_folders(capsys):
    assert exit_code(["compare", "--models", "nplr", "--output_dir=x"]) == 2
    assert "--output_dir cannot be given to compare" in capsys.readouterr().err


FAILURES = {
    "not finite": NotFiniteError("Step 2: the loss is nan"),
    "out of memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "KeyError: 'wrong'": KeyError("wrong"),
}


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(("reason", "error"), FAILURES.items(), ids=["finite", "memory", "mistake"])
def test_a_model_that_fails_leaves_the_others_alone(reason, error, jobs, in_turn, tmp_path, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(ResumableTrainer, "training_step", call_at_step(2, only_for(0, fail)))
    out = tmp_path / "out"
    assert exit_code(compare(out, f"--jobs={jobs}")) == 1
    said = capsys.readouterr()
    assert f"| mamba3 | {reason} |" in said.out and f"1 of 2 models failed: mamba3 ({reason})" in said.err
    assert (out / "nplr" / "model.safetensors").read_bytes() == (in_turn / "nplr" / "model.safetensors").read_bytes()
    assert json.loads((out / "comparison.json").read_text())["mamba3"] == {"failed": reason}
    if jobs == 2:
        assert f"mamba3: {reason}; see {out / 'mamba3.log'}" in said.err
        log = (out / "mamba3.log").read_text()
        assert str(error) in log and ("Traceback" in log) == (not isinstance(error, NotFiniteError))


def test_if_all_models_fail_the_table_says_so(tmp_path, monkeypatch, capsys):
    def fail(trainer):
        raise ValueError("a | b " + "c " * 100)

    monkeypatch.setattr(ResumableTrainer, "training_step", call_at_step(2, fail))
    assert exit_code(compare(tmp_path / "out", "--jobs=2")) == 1
    said = capsys.readouterr()
    row = next(line for line in said.out.splitlines() if line.startswith("| nplr |"))
    assert row.startswith("| nplr | ValueError: a \\| b c c") and row.endswith("... | | |") and len(row) < 120
    assert "2 of 2 models failed" in said.err and not (tmp_path / "out" / "comparison.png").exists()


def test_a_model_that_is_killed_resumes_to_the_same_bits(in_turn, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill = only_for(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        patch.setattr(ResumableTrainer, "training_step", call_at_step(5, kill))
        assert exit_code(compare(out, "--jobs=2")) == 1
    assert "nplr: killed by SIGKILL" in capsys.readouterr().err
    assert (out / "nplr" / "checkpoint-3").exists() and not (out / "nplr" / "results.json").exists()
    program.main(compare(out, "--jobs=2"))
    same_results(out, in_turn)
    assert "Resumes from" in (out / "nplr.log").read_text()


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.02)


def is_running(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_program_is_that_of_its_models(number, in_turn, tmp_path, monkeypatch):
    """By Ctrl-C, by another signal or without a word: each saves a checkpoint and ends, and the next call resumes."""
    out, begun = tmp_path / "out", tmp_path / "begun"
    begun.mkdir()

    def wait_for_the_end(trainer):
        (begun / str(os.getpid())).touch()
        wait_until((tmp_path / "sent").exists)
        time.sleep(1)  # the signal comes meanwhile, and the step ends

    with monkeypatch.context() as patch:
        patch.setattr(ResumableTrainer, "training_step", call_at_step(4, wait_for_the_end))
        process = multiprocessing.get_context("fork").Process(target=program.main, args=(compare(out, "--jobs=2"),))
        process.start()
    wait_until(lambda: len(list(begun.iterdir())) == 2)
    os.kill(process.pid, number)
    (tmp_path / "sent").touch()
    process.join()
    assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(is_running(path.name) for path in begun.iterdir()), seconds=20)
    for model in MODELS:
        assert (out / model / "checkpoint-5").exists() and not (out / model / "model.safetensors").exists()
    program.main(compare(out, "--jobs=2"))
    same_results(out, in_turn)


def test_how_many_models_are_trained_at_a_time(tmp_path, monkeypatch):
    runs = [parse_run([*WORDS, f"--output_dir={tmp_path / str(number)}"]) for number in range(3)]
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr("mamba3_nplr.training.compare.cores", lambda: 2)
    for asked, jobs, expected in ((None, None, 2), (None, 3, 3), (None, 9, 3), ("2", None, 1), ("1", None, 2)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert models_at_once(runs, jobs) == expected
        assert models_at_once(runs[:1], jobs) == 1
    runs[0].args.report_to = ["wandb"]
    assert models_at_once(runs, None) == 1


def test_compare_refuses_a_wrong_number_of_jobs(capsys):
    assert exit_code(["compare", "--models", "nplr", "--jobs=0"]) == 2
    assert "jobs=0 is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "work", "share", "expected"),
    [(None, 0, 8, 1), (None, 1e12, 8, 8), (None, 1e12, 1, 1), ("3", 0, 1, 3), ("2,1", 1e12, 8, 2), ("", 0, 8, 1)],
)
def test_threads_follow_from_the_work_unless_someone_has_set_them(asked, work, share, expected, tmp_path, monkeypatch):
    run = parse_run([*WORDS, f"--output_dir={tmp_path}"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    threads.set_threads(run.args, int(work), share)
    assert found == [expected]
