"""What train_hf.py refuses before it begins to work, and how it says what ends it later."""

import errno
import json
import sys

import pytest

from helpers import training_program
from helpers.training_program import TINY, WORDS
from mamba3_nplr.training import record, run
from mamba3_nplr.training.trainer import ResumableTrainer

program = training_program.load_program()


def stopped(arguments):
    """The exit code of the program where it ends with one."""
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    return stop.value.code


def no_training(monkeypatch):
    monkeypatch.setattr(ResumableTrainer, "train", lambda *arguments, **keywords: pytest.fail("a model is trained"))


@pytest.mark.parametrize("folder", ["file", "file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(folder, tmp_path, monkeypatch, capsys):
    no_training(monkeypatch)
    (tmp_path / "file").write_text("mine")
    for arguments in (
        [f"--output_dir={tmp_path / folder}"],
        ["compare", "--models=nplr", f"--out={tmp_path / folder}"],
    ):
        assert stopped([*arguments, *WORDS]) == 2
        message = capsys.readouterr().err
        assert f"{tmp_path / folder}' cannot be written: " in message and message.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_compare_checks_all_models_before_it_trains_one(tmp_path, monkeypatch, capsys):
    no_training(monkeypatch)
    out = tmp_path / "out"
    for models, message in (
        (["nplr", "nprl"], "model='nprl' is unknown"),
        (["nplr", "nplr"], "each can be given once"),
    ):
        assert stopped(["compare", *WORDS, f"--out={out}", "--models", *models]) == 2
        assert message in capsys.readouterr().err and not out.exists()
    out.mkdir()
    (out / "mamba3").write_text("a file")
    assert stopped(["compare", *TINY[4:], f"--out={out}", "--models", "gdn", "mamba3"]) == 2
    assert "mamba3' cannot be written" in capsys.readouterr().err


def test_compare_finds_a_run_with_other_settings_before_it_trains_one(tmp_path, monkeypatch, capsys):
    program.main([*WORDS, f"--output_dir={tmp_path / 'nplr'}"])
    no_training(monkeypatch)
    other = ["--learning_rate=1", f"--out={tmp_path}", "--models", "mamba3", "nplr"]
    assert stopped(["compare", *WORDS, *other]) == 2
    assert "learning_rate there: 0.003, now: 1.0" in capsys.readouterr().err


def test_a_run_without_matplotlib_says_so_at_its_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    program.main([*WORDS, f"--output_dir={tmp_path / 'run'}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No picture will be drawn. Pictures need matplotlib: pip install 'mamba3_nplr[plot]'."
    assert not (tmp_path / "run" / "results.png").exists() and (tmp_path / "run" / "results.json").exists()


def test_a_picture_that_fails_costs_no_results(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(run, "draw_comparison", fail)
    program.main([*WORDS, f"--output_dir={tmp_path}"])
    assert "No picture of the results could be drawn: no fonts" in capsys.readouterr().err
    assert (tmp_path / "results.json").exists() and not (tmp_path / "results.png").exists()


def test_an_error_of_the_disk_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(record, "write_json", full)
    assert stopped([*WORDS, f"--output_dir={tmp_path / 'run'}"]) == 1
    message = capsys.readouterr().err
    assert "No space left on device" in message and "--resume_from_checkpoint" in message and "Traceback" not in message


WRONG_EVALUATIONS = {
    "--batch_size=0": "batch_size=0 is not allowed: it must be a whole number of at least 1",
    "--batch_size=-2": "batch_size=-2 is not allowed",
    "--piece_length=0": "piece_length=0 is not allowed",
    "--piece_length=-3": "piece_length=-3 is not allowed",
    "--device=nowhere": "device='nowhere' cannot be used here: ",
    "--device=cpu:x": "device='cpu:x' cannot be used here: ",
    "--device=meta": "device='meta' cannot be used here: ",
    "--device=cuda:99": "device='cuda:99' cannot be used here: ",
    "--out=/proc/found.json": "out='/proc' cannot be written: ",
    "--out=/": "out='/' is not allowed: it is a folder",
    "--task.test_lengths=[]": "test_lengths=() is not allowed",
}


@pytest.mark.parametrize(("argument", "message"), WRONG_EVALUATIONS.items())
def test_evaluate_refuses_wrong_options_at_once(argument, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mamba3_nplr.training.evaluate_checkpoint.load_model", pytest.fail)
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {"task": "s5_generators"}}))
    assert stopped(["evaluate", str(tmp_path), argument]) == 2
    found = capsys.readouterr().err
    assert message in found and found.count("\n") == 1


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"arguments": 3}', '{"arguments": {}}', "\udcff"])
def test_evaluate_names_a_damaged_record(record, tmp_path, capsys):
    (tmp_path / "run.json").write_bytes(record.encode(errors="surrogateescape"))
    assert stopped(["evaluate", str(tmp_path)]) == 2
    assert "run.json holds no record of a run" in capsys.readouterr().err
    assert stopped(["evaluate", str(tmp_path), "--task=s3"]) == 2
    assert "run.json" not in capsys.readouterr().err
