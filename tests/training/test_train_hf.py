"""The training program: ended at any moment it resumes to the same bits, and it says why it stops."""

import errno
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForSequenceClassification

from helpers import training_program
from helpers.hub_client import TOKENS, run_client
from helpers.hub_server import HubServer
from helpers.model_cases import small_config
from helpers.places import PROGRAMS, TESTS
from helpers.training_program import EPISODES, TINY, WORDS, call_at_step, log_of
from mamba3_nplr.configuration.citations import CITATIONS
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.hub.contents import write_contents
from mamba3_nplr.modeling.hub.folder_lock import FolderInUseError, folder_lock
from mamba3_nplr.training import record
from mamba3_nplr.training import run as running
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.batches import FreshBatches
from mamba3_nplr.training.checkpoints import is_whole, last_whole_checkpoint
from mamba3_nplr.training.finite import first_not_finite
from mamba3_nplr.training.resume import find_checkpoint, find_last
from mamba3_nplr.training.trainer import ResumableTrainer

program = training_program.load_program()


@pytest.fixture(scope="module", params=[WORDS, EPISODES], ids=["words", "episodes"])
def whole(request, tmp_path_factory):
    """A run that nothing has disturbed: its arguments and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    program.main([*request.param, f"--output_dir={folder}"])
    return request.param, folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The folder of such a run."""
    folder = tmp_path_factory.mktemp("words") / "run"
    program.main([*WORDS, f"--output_dir={folder}"])
    return folder


def stopped(arguments):
    """The exit code of the program where it ends with one."""
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    return stop.value.code


def resume_and_compare(arguments, folder, whole_folder):
    """Equal to the last bit, as promised: the same calls on the same numbers, with the same number of threads."""
    program.main([*arguments, f"--output_dir={folder}", "--resume_from_checkpoint"])
    for name in ("model.safetensors", "checkpoint-8/model.safetensors"):
        assert (folder / name).read_bytes() == (whole_folder / name).read_bytes(), name
    assert log_of(folder) == log_of(whole_folder)
    ours, theirs = (torch.load(x / "checkpoint-8" / "optimizer.pt", weights_only=True) for x in (folder, whole_folder))
    for parameter, state in theirs["state"].items():
        assert all(torch.equal(x, ours["state"][parameter][name]) for name, x in state.items())


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    program.main([*WORDS, f"--output_dir={tmp_path / 'whole'}"])
    killed = tmp_path / "killed"
    command = [sys.executable, training_program.__file__, "6", *WORDS, f"--output_dir={killed}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoints(killed) == ["checkpoint-3"]
    assert (killed / ".unfinished" / "checkpoint-6" / "model.safetensors").exists()
    resume_and_compare(WORDS, killed, tmp_path / "whole")
    assert not (killed / ".unfinished").exists()


def test_sigterm_saves_a_checkpoint_and_the_run_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch, capsys):
    arguments, folder = whole
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        action = call_at_step(4, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr(ResumableTrainer, "training_step", action)
        assert stopped([*arguments, f"--output_dir={tmp_path / 'run'}"]) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "Stopped at step 5" in capsys.readouterr().err
    assert checkpoints(tmp_path / "run") == ["checkpoint-3", "checkpoint-5"]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resume_and_compare(arguments, tmp_path / "run", folder)


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path, monkeypatch):
    arguments = [*WORDS, f"--output_dir={tmp_path / 'run'}"]

    def wait_and_stop(trainer):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableTrainer, "training_step", call_at_step(4, wait_and_stop))
        assert stopped(arguments) == 128 + signal.SIGTERM
    before = json.loads((tmp_path / "run" / "checkpoint-5" / "loss_0.json").read_text())["seconds"]
    program.main([*arguments, "--resume_from_checkpoint"])
    assert json.loads((tmp_path / "run" / "results.json").read_text())["seconds"] > before > 1


def test_a_record_names_the_revision_that_the_run_began_with(tmp_path, monkeypatch):
    revisions = iter(["first"])
    monkeypatch.setattr(record, "git_revision", lambda: next(revisions, "later"))
    program.main([*WORDS, f"--output_dir={tmp_path}"])
    assert json.loads((tmp_path / "results.json").read_text())["environment"]["git"] == "first"


def test_a_full_disk_leaves_the_last_whole_checkpoint(whole, tmp_path, monkeypatch, capsys):
    arguments, folder = whole
    save = torch.save

    def full_disk(content, path, *rest, **keywords):
        if "checkpoint-6" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path, *rest, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        assert stopped([*arguments, "--save_total_limit=1", f"--output_dir={tmp_path / 'run'}"]) == 1
    message = capsys.readouterr().err
    assert "checkpoint-6 could not be saved" in message and "No space left" in message and "checkpoint-3" in message
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"] and not (tmp_path / "run" / ".unfinished").exists()
    resume_and_compare(arguments, tmp_path / "run", folder)


def test_a_checkpoint_that_was_cut_short_is_not_taken_for_whole(whole, tmp_path, capsys):
    arguments, folder = whole
    run = tmp_path / "run"
    shutil.copytree(
        folder,
        run,
        ignore=lambda path, names: [x for x in names if x in ("model.safetensors",) and path == str(folder)],
    )
    last = run / "checkpoint-8"
    weights = (last / "optimizer.pt").read_bytes()
    (last / "optimizer.pt").write_bytes(weights[: len(weights) // 2])
    assert not is_whole(last) and last_whole_checkpoint(run) == run / "checkpoint-6"
    assert stopped([*arguments, f"--output_dir={run}", f"--resume_from_checkpoint={last}"]) == 2
    assert "is not a whole checkpoint" in capsys.readouterr().err
    (run / "checkpoint-9").mkdir()
    (run / "checkpoint-10").mkdir()
    (run / "checkpoint-10" / "model.safetensors").write_bytes(weights)
    resume_and_compare(arguments, run, folder)


def test_the_number_of_checkpoints_is_bounded(whole):
    _, folder = whole
    assert checkpoints(folder) == ["checkpoint-6", "checkpoint-8"]


def test_a_run_is_not_mixed_with_another(whole, capsys):
    arguments, folder = whole
    assert stopped([*arguments, f"--output_dir={folder}"]) == 2
    assert "holds a run. Give --resume_from_checkpoint" in capsys.readouterr().err
    assert stopped([*arguments, f"--output_dir={folder}", "--resume_from_checkpoint", "--learning_rate=1"]) == 2
    assert "learning_rate there: 0.003, now: 1.0" in capsys.readouterr().err


def test_nothing_that_is_published_is_a_pickle(whole):
    _, folder = whole
    assert (
        not list(folder.glob("*.bin")) and not list(folder.glob("*.pt*")) and not list(folder.rglob("training_args*"))
    )
    assert (folder / "model.safetensors").exists()


def test_a_finished_run_loads_and_describes_itself(whole):
    arguments, folder = whole
    task = "s5_generators" if arguments is WORDS else "shell_jitter"
    results = json.loads((folder / "results.json").read_text())
    record = json.loads((folder / "run.json").read_text())
    assert record == json.loads((folder / "checkpoint-8" / "run.json").read_text())
    assert record["environment"]["torch"] == torch.__version__ and record["arguments"]["task"] == task
    card = ModelCard.load(folder / "README.md")
    found = {x.dataset_split: x.metric_value for x in card.data.eval_results}
    assert found == {split: figures[results["metric"]] for split, figures in results["results"].items()}
    assert list(found) == (["test_8", "test_20"] if arguments is WORDS else ["test_1", "test_3"])
    assert results["command"] in card.text and str(folder) in card.text
    assert CITATIONS["nplr"] in card.text and CITATIONS["mamba3"] in card.text
    logged = log_of(folder)
    assert any("eval_success" in entry or "eval_final_accuracy" in entry for entry in logged)
    assert f"{next(iter(found))}_{results['metric']}" in logged[-1]


def test_the_recorded_command_and_configuration_give_the_same_run(whole, tmp_path):
    _, folder = whole
    record = json.loads((folder / "run.json").read_text())
    again = parse_run(shlex.split(record["command"])[2:])
    assert again.differences(record["arguments"]) == []
    program.main([f"--config={folder / 'run.json'}", f"--output_dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_evaluate_finds_what_the_run_found(whole, tmp_path, capsys):
    _, folder = whole
    program.main(["evaluate", str(folder), "--batch_size=5", "--piece_length=7", f"--out={tmp_path / 'found.json'}"])
    found, results = (json.loads(x.read_text()) for x in (tmp_path / "found.json", folder / "results.json"))
    assert found["results"] == results["results"]
    assert f"| {next(iter(found['results']))} |" in capsys.readouterr().out


def test_evaluate_takes_a_model_to_a_task_of_the_same_kind(whole, capsys):
    arguments, folder = whole
    other = ["s5_generators", "--task.test_lengths=[3]"] if arguments is WORDS else ["shell", "--task.test_windows=[3]"]
    program.main(["evaluate", str(folder), "--task.test_size=2", "--task", *other])
    assert f"{folder} on {other[0]}, in per cent" in (text := capsys.readouterr().out) and "| test_3 |" in text


def test_evaluate_refuses_another_task(whole, capsys):
    arguments, folder = whole
    task, others = ("s5_generators", ["z5", "shell"]) if arguments is WORDS else ("shell_jitter", ["s5_generators"])
    for other in others:
        assert stopped(["evaluate", str(folder), f"--task={other}"]) == 2
        message = capsys.readouterr().err
        assert f"was trained on {task} and cannot do {other}: it " in message
        has, needs = message.rpartition(": it ")[2].split(", the task ")
        assert has.split()[2:] != needs.split()[2:] and "LOAD REPORT" not in message
    assert stopped(["evaluate", str(folder), "--splits=test_7"]) == 2
    assert "split='test_7' is unknown" in capsys.readouterr().err


def test_evaluate_refuses_a_group_of_the_same_order(tmp_path, capsys):
    task = ["--task=s3", "--task.length=4", "--task.test_lengths=[4]", "--task.test_size=2"]
    program.main([*TINY, *task, f"--output_dir={tmp_path / 'run'}"])
    assert stopped(["evaluate", str(tmp_path / "run"), "--task.group=z6"]) == 2
    assert "was trained on s3 and cannot do s3, group=z6: its letters and elements" in capsys.readouterr().err


def test_evaluate_refuses_at_once_what_is_nowhere(capsys, monkeypatch):
    for name in ("nosuch", "/nosuch", "a/b/c"):
        with monkeypatch.context() as patch:
            patch.setattr(HfApi, "model_info", lambda *arguments, **keywords: pytest.fail("the Hub was asked"))
            assert stopped(["evaluate", name]) == 2
        assert f"CHECKPOINT={name!r} is not allowed: it must be a folder" in capsys.readouterr().err
    assert stopped(["evaluate", "user/nosuch"]) == 2  # the tests are offline
    assert "neither a folder here nor in the cache" in capsys.readouterr().err


def test_accumulated_batches_are_the_same_batches(whole, tmp_path):
    arguments, folder = whole
    program.main([*arguments, "--gradient_accumulation_steps=2", f"--output_dir={tmp_path / 'run'}"])
    for ours, theirs in zip(log_of(tmp_path / "run"), log_of(folder), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_two_processes_give_the_losses_of_one_and_push_whole_checkpoints(tmp_path):
    program.main([*WORDS, f"--output_dir={tmp_path / 'one'}"])
    push = ["--push_to_hub", "--hub_model_id=user/two", "--hub_revision=side"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *torchrun, str(training_program.PROGRAM), *WORDS, "--num_processes=2"]
    command += [f"--output_dir={tmp_path / 'two'}", *push]
    with HubServer(tmp_path / "hub", TOKENS) as hub:
        done = run_client(hub, tmp_path, command)
    pushed = hub.repository("user/two")
    # Others load main: a run with a branch leaves it alone, with its checkpoints too.
    assert [commit["title"] for commit in pushed.history()] == ["initial commit"]
    by_title = {commit["title"]: commit for commit in pushed.history("side")}
    assert list(by_title) == ["nplr on s5_generators", "Step 8", "Step 6", "Step 3", "initial commit"]
    for step in (6, 8):  # older ones are deleted
        for file in (tmp_path / "two" / f"checkpoint-{step}").iterdir():
            if file.suffix in (".py", ".safetensors") or file.name in ("config.json", "run.json"):
                assert pushed.read(file.name, by_title[f"Step {step}"]["id"]) == file.read_bytes(), file
    safetensors.torch.load(pushed.read("model.safetensors", by_title["Step 3"]["id"]))
    assert not any(name.startswith(("optimizer", "rng", "training_args")) for name in pushed.files("side"))
    assert "processes: 2 on cpu, threads of each: 1" in done.stdout
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert sum("loss" in entry for entry in one) == 4
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert {"rng_state_1.pth", "loss_1.json"} <= {path.name for path in (tmp_path / "two" / "checkpoint-8").iterdir()}


def launch(config, program, arguments):
    """Runs a program by accelerate with one of the configurations that come with this project."""
    config = training_program.PROGRAM.parent / "configuration" / "accelerate" / config
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), str(program)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_configuration_for_ddp_gives_the_losses_of_one_process(tmp_path):
    program.main([*WORDS, f"--output_dir={tmp_path / 'one'}"])
    printed = launch("ddp.yaml", training_program.PROGRAM, [*WORDS, f"--output_dir={tmp_path / 'two'}"])
    assert "processes: 2" in printed
    for ours, theirs in zip(log_of(tmp_path / "two"), log_of(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_fsdp_gives_the_losses_of_one_process_and_resumes_to_the_same_bits(tmp_path):
    program.main([*WORDS, f"--output_dir={tmp_path / 'one'}"])
    worker = PROGRAMS / "fsdp_on_cpu.py"
    for resume in ([], ["--resume_from_checkpoint"]):
        launch("fsdp.yaml", worker, [*WORDS, f"--output_dir={tmp_path / 'fsdp'}", *resume])
        weights = (tmp_path / "fsdp" / "model.safetensors").read_bytes()
        if not resume:
            whole, first_log = weights, log_of(tmp_path / "fsdp")
            shutil.rmtree(tmp_path / "fsdp" / "checkpoint-8")
    assert weights == whole and log_of(tmp_path / "fsdp") == first_log
    for ours, theirs in zip(first_log, log_of(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "fsdp").num_labels == 120
    assert (tmp_path / "fsdp" / "modeling_mamba3_nplr.py").exists()


def test_a_number_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys):
    def spoil(trainer):
        layer = trainer.model.model.layers[0]
        layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))

    monkeypatch.setattr(ResumableTrainer, "training_step", call_at_step(4, spoil))
    assert stopped([*WORDS, f"--output_dir={tmp_path / 'run'}"]) == 1
    message = capsys.readouterr().err
    assert "Step 4: the loss is nan" in message and "the output of model.layers.0." in message
    assert "seed=0, step=4, rank=0, world_size=1" in message and "checkpoint-3" in message
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, capsys):
    # As by an update that overflows: gradients were finite, and no later step has seen the weight.
    step = torch.optim.AdamW.step
    calls = []

    def overflow(self, *arguments, **keywords):
        step(self, *arguments, **keywords)
        calls.append(None)
        if len(calls) == 6:
            self.param_groups[0]["params"][0].data.fill_(float("inf"))

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    assert stopped([*WORDS, f"--output_dir={tmp_path / 'run'}"]) == 1
    assert "is not finite; it is not saved" in capsys.readouterr().err
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]


def test_the_first_place_that_is_not_finite():
    model = AutoModelForSequenceClassification.from_config(small_config())
    batch = {"input_ids": torch.randint(0, 11, (2, 5)), "labels": torch.randint(0, 5, (2, 5))}
    model(**batch).loss.backward()
    assert first_not_finite(model, batch) == "the loss"
    model.score.weight.grad[0, 0] = float("inf")
    assert first_not_finite(model, batch) == "the gradient of score.weight"
    hook = model.model.layers[1].mixer.register_forward_hook(lambda module, inputs, output: (output[0] / 0, output[1]))
    assert first_not_finite(model, batch) == "the output of model.layers.1.mixer"
    model.model.layers[0].mixer.D.data[0] = float("nan")
    assert first_not_finite(model, batch) == "the weight model.layers.0.mixer.D"
    hook.remove()


@pytest.mark.parametrize("settings", [{"length": 9, "start_length": 2}, {"length": 5, "start_length": None}])
def test_shares_and_parts_of_a_step_are_its_batch(settings):
    task = make_task("s5_generators", batch_size=12, total_steps=10, **settings)
    for step in (0, 4, 9):
        batch = task.batch(3, step)
        parts = []
        for rank in range(2):
            shares = FreshBatches(task, 3, steps=10, accumulation=3, rank=rank, world_size=2)
            assert len(shares) == 30 and len(shares.loader()) == 30
            parts += [shares[3 * step + part] for part in range(3)]
        for name, x in batch.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), x)


def test_batches_come_in_order_and_only_when_needed(monkeypatch):
    from accelerate import skip_first_batches

    made = []
    batch = make_task("z5").batch
    monkeypatch.setattr(FreshBatches, "__getitem__", lambda self, index: made.append(index) or batch(0, index))
    loader = skip_first_batches(FreshBatches(make_task("z5"), 0, steps=60).loader(), 55)
    assert torch.equal(next(iter(loader))["input_ids"], batch(0, 55)["input_ids"])
    assert made == [55]


def test_the_log_goes_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program.main([*WORDS, "--report_to=tensorboard", f"--output_dir={tmp_path / 'run'}"])
    tags = set()
    for path in (tmp_path / "run").rglob("events.out.*"):
        tags |= set(EventAccumulator(str(path)).Reload().Tags()["scalars"])
    assert {"train/loss", "train/grad_norm", "eval/final_accuracy", "test/20_final_accuracy"} <= tags


def flip(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "model.safetensors has been changed": lambda x: flip(x / "model.safetensors", -7),
    "optimizer.pt has been changed": lambda x: flip(x / "optimizer.pt", 1000),
    "scheduler.pt has been changed": lambda x: (x / "scheduler.pt").write_bytes(
        bytes((x / "scheduler.pt").stat().st_size)
    ),
    "rng_state.pth has 5 bytes instead of": lambda x: (x / "rng_state.pth").write_bytes(b"short"),
    "trainer_state.json is not there": lambda x: (x / "trainer_state.json").unlink(),
    "config.json is not there": lambda x: (x / "config.json").unlink() or (x / "config.json").mkdir(),
    "run.json is a symbolic link": lambda x: (
        (x / "run.json").unlink() or (x / "run.json").symlink_to(x.parent / "run.json")
    ),
    "contents.json is not there": lambda x: (x / "contents.json").unlink(),
    "Expecting value": lambda x: (x / "contents.json").write_bytes(bytes(40)),
    "can't decode": lambda x: (x / "contents.json").write_bytes(b"\xff\xfe"),
    "nested too deeply": lambda x: (x / "contents.json").write_text("[" * 100_000),
    "cannot be read (it lists no files": lambda x: (x / "contents.json").write_text("[]"),
    "contents.json cannot be read (it lists no files": lambda x: (x / "contents.json").write_text("null"),
    "it lists no files": lambda x: (x / "contents.json").write_text("{}"),
    "'run.json' has no size and checksum": lambda x: (x / "contents.json").write_text('{"run.json": null}'),
    "../run.json is a symbolic link": lambda x: (x / "contents.json").write_text('{"../run.json": 3}'),
    "embedded null": lambda x: (x / "contents.json").write_text('{"\\u0000": 3}'),
}


@pytest.mark.parametrize(("reason", "spoil"), DAMAGE.items())
def test_a_damaged_checkpoint_is_not_taken_for_whole(reason, spoil, words, tmp_path, capsys):
    shutil.copytree(words, tmp_path / "run")
    last = tmp_path / "run" / "checkpoint-8"
    assert is_whole(last)
    spoil(last)
    assert find_last(tmp_path / "run") == tmp_path / "run" / "checkpoint-6"
    said = capsys.readouterr().err
    assert said.startswith(f"{last} is not whole and not used: ") and reason in said and "\n" not in said[:-1]


def test_a_run_goes_on_from_the_last_checkpoint_that_is_whole(words, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(words, run)
    flip(run / "checkpoint-8" / "model.safetensors", -7)
    flip(run / "model.safetensors", -7)
    assert stopped([*WORDS, f"--output_dir={run}", f"--resume_from_checkpoint={run / 'checkpoint-8'}"]) == 2
    said = capsys.readouterr().err
    assert "is not a whole checkpoint: model.safetensors has been changed. The last one" in said
    assert "checkpoint-6" in said
    resume_and_compare(WORDS, run, words)
    said = capsys.readouterr()
    assert f"{run / 'checkpoint-8'} is not whole and not used" in said.err
    assert f"Resumes from {run / 'checkpoint-6'}" in said.out
    assert is_whole(run / "checkpoint-8") and files_of(run) == files_of(words)


def test_a_run_without_a_whole_checkpoint_starts_anew_if_asked_to_go_on(words, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(words, run)
    for name in checkpoints(run):
        flip(run / name / "optimizer.pt", 1000)
    (run / "results.json").unlink()
    assert stopped([*WORDS, f"--output_dir={run}"]) == 2
    assert "holds a run. Give --resume_from_checkpoint" in capsys.readouterr().err
    resume_and_compare(WORDS, run, words)
    assert f"{run} has no whole checkpoint: the run starts over." in capsys.readouterr().err


def test_checkpoints_of_earlier_versions_are_taken_and_that_is_said(words, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(words, run)
    contents = run / "checkpoint-8" / "contents.json"
    sizes = {name: entry["size"] for name, entry in json.loads(contents.read_text()).items()}
    contents.write_text(json.dumps(sizes))
    asked = parse_run([*WORDS, f"--output_dir={run}", "--resume_from_checkpoint"])
    assert find_checkpoint(asked) == str(run / "checkpoint-8")
    assert "checkpoint-8 is of an earlier version: only the sizes" in capsys.readouterr().err
    contents.write_text(json.dumps(sizes | {"model.safetensors": 3}))
    assert find_checkpoint(asked) == str(run / "checkpoint-6")


class KilledError(BaseException):
    """In place of SIGKILL: nothing in the program catches it."""


@pytest.mark.parametrize("half", [True, False])
def test_a_kill_while_old_checkpoints_are_deleted_leaves_nothing_behind(half, words, tmp_path, monkeypatch):
    """The first deletion is that of checkpoint-3, once checkpoint-8 is there: a kill in its middle, or before it."""
    run, rmtree, delete_older = tmp_path / "run", shutil.rmtree, ResumableTrainer.delete_older

    def delete_half(path, *rest, **keywords):
        found = [x for x in (Path(path), *Path(path).glob("*")) if x.name.endswith("checkpoint-3")]
        if found and (run / "checkpoint-8").exists():
            (found[0] / "config.json").unlink()
            raise KilledError
        rmtree(path, *rest, **keywords)

    def delete_nothing(trainer, keep):
        if keep.name == "checkpoint-8":
            raise KilledError
        delete_older(trainer, keep)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_half if half else rmtree)
        patch.setattr(ResumableTrainer, "delete_older", delete_older if half else delete_nothing)
        with pytest.raises(KilledError):
            program.main([*WORDS, f"--output_dir={run}"])
    assert checkpoints(run) == [*["checkpoint-3"][half:], "checkpoint-6", "checkpoint-8"]
    assert all(is_whole(run / name) for name in checkpoints(run))
    (run / ".results.json.0123abcd.part.json").write_text("{")
    resume_and_compare(WORDS, run, words)
    assert files_of(run) == files_of(words)


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_run_is_alone_in_its_folder(words, tmp_path, monkeypatch, capsys):
    run, tried = tmp_path / "run", []
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTrainer, "training_step", call_at_step(4, lambda trainer: tried.append(in_use(run))))
        program.main([*WORDS, f"--output_dir={run}"])
    assert tried == [True] and files_of(run) == files_of(words)
    before = {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}
    with folder_lock(run):
        for more in (["--resume_from_checkpoint"], ["--seed=1"]):
            assert stopped([*WORDS, f"--output_dir={run}", *more]) == 2
            owner = f"{run} is in use: process {os.getpid()} on {socket.gethostname()}, since "
            assert owner in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()} == before


def in_use(folder):
    try:
        with folder_lock(folder):
            return False
    except FolderInUseError:
        return True


class FakeHub:
    """Keeps what would be uploaded: commits, each as path -> content."""

    def __init__(self):
        self.commits = {}

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def create_commit(self, repo_id, operations, commit_message, **_):
        files = {x.path_in_repo: x.path_or_fileobj for x in operations}
        contents = {name: x if isinstance(x, bytes) else Path(x).read_bytes() for name, x in files.items()}
        self.commits[commit_message] = contents
        return SimpleNamespace(commit_url="")


def test_only_files_that_the_run_wrote_are_uploaded(tmp_path, monkeypatch):
    run, hub = tmp_path / "run", FakeHub()
    run.mkdir()
    mine = {"my_secrets.py": b"mine", "private.safetensors": b"mine", "old.safetensors.index.json": b"mine"}
    for name, content in mine.items():
        (run / name).write_bytes(content)
    (run / "linked.py").symlink_to(__file__)
    monkeypatch.setattr(running, "HfApi", lambda **_: hub)
    program.main([*WORDS, f"--output_dir={run}", "--push_to_hub", "--hub_model_id=user/name"])
    assert list(hub.commits) == ["Step 3", "Step 6", "Step 8", "nplr on s5_generators"]
    for title, files in hub.commits.items():
        assert {"model.safetensors", "config.json", "modeling_mamba3_nplr.py", "run.json"} <= set(files), title
        assert not {*mine, "linked.py"} & set(files), title
    assert hub.commits["nplr on s5_generators"]["results.json"] == (run / "results.json").read_bytes()
    assert {name: (run / name).read_bytes() for name in mine} == mine


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_a_file_of_the_user_is_not_overwritten(name, tmp_path, capsys):
    (tmp_path / name).write_text("mine")
    assert stopped([*WORDS, f"--output_dir={tmp_path}"]) == 2
    assert f"holds {name}, which the run would overwrite" in capsys.readouterr().err
    assert files_of(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


def test_contents_are_checked_file_by_file(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    assert not is_whole(tmp_path)
    write_contents(tmp_path, ["a"])
    (tmp_path / "b").write_bytes(b"none of its files")
    assert is_whole(tmp_path)
    for content in (b"1", b"13"):
        (tmp_path / "a").write_bytes(content)
        assert not is_whole(tmp_path)
    (tmp_path / "a").unlink()
    assert not is_whole(tmp_path)
    os.mkfifo(tmp_path / "a")  # reading would wait for ever
    assert not is_whole(tmp_path)
