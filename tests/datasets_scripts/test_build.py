"""The published form: folders that load_dataset reads, rebuilt bit for bit, never half written or mixed."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_dataset
from huggingface_hub import DatasetCard
from matplotlib.figure import Figure
from transformers import Trainer, TrainingArguments

from helpers.training_program import TINY_MODEL
from mamba3_nplr import Mamba3NPLRConfig, pad_sequences
from mamba3_nplr.configuration.citations import CITATIONS
from mamba3_nplr.datasets_scripts import build, show
from mamba3_nplr.datasets_scripts.columns import from_arrow, read_columns, to_arrow
from mamba3_nplr.datasets_scripts.shell_game_episodes import ball_path
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.hub.checksums import changed_files
from mamba3_nplr.training import publish
from mamba3_nplr.training.models import new_model

pytestmark = pytest.mark.usefixtures("small_test_sets")

TASKS = ["s5_generators", "shell", "shell_jitter"]


@pytest.fixture
def built(tmp_path):
    build.build(tmp_path / "out", train_size=20, names=TASKS)
    return tmp_path / "out"


def load(folder, name, split, cache, **kwargs):
    return load_dataset(str(folder), name, split=split, cache_dir=str(cache), **kwargs)


def test_load_dataset_reads_every_split(built, tmp_path):
    for name in TASKS:
        task = make_task(name, test_size=6)
        for split, rows in ({"train": 20} | task.splits).items():
            dataset = load(built, name, split, tmp_path / "cache")
            assert len(dataset) == rows
            made = task.rows(split, 0, rows)
            for i in (0, rows - 1):
                row = dataset[i]
                if name == "s5_generators":
                    assert row["input_ids"] == made["input_ids"][i].tolist()
                    assert row["labels"] == made["labels"][i].tolist()
                    continue
                frames = made["num_frames"][i]
                assert np.array_equal(np.float32(row["observations"]), made["observations"][i, :frames])
                assert np.array_equal(np.float32(row["labels"]), made["labels"][i, :frames])
                assert row["swaps"] == made["swaps"][i].tolist()
                assert (row["num_swaps"], row["ball_slot"]) == (made["num_swaps"][i], made["ball_slot"][i])


def test_columns_and_names(built, tmp_path):
    words = load(built, "s5_generators", "test_512", tmp_path / "cache")
    assert words.column_names == ["input_ids", "labels"]
    names = words.features["labels"].feature
    assert names.num_classes == 120 and names.int2str(24) == "1 0 2 3 4"
    episodes = load(built, "shell", "test_standard", tmp_path / "cache")
    assert episodes.column_names == ["observations", "labels", "num_swaps", "swaps", "ball_slot"]


def test_streaming(built):
    stream = load_dataset(str(built), "shell", split="test_extended", streaming=True)
    assert sum(1 for _ in stream) == 6
    assert len(next(iter(stream))["observations"]) == 405


def test_the_reader_makes_tensors(built, tmp_path):
    task = make_task("shell", test_size=6)
    columns = read_columns(load(built, "shell", "train", tmp_path / "cache"))
    made = task.rows("train", 0, 20)
    for name in ("observations", "labels", "swaps", "num_swaps", "ball_slot"):
        assert torch.equal(columns[name], torch.from_numpy(made[name]).to(columns[name].dtype))
    part = load(built, "shell", "train", tmp_path / "cache").select(range(5, 9))
    assert torch.equal(read_columns(part)["observations"], columns["observations"][5:9])


def test_the_reader_packs_what_differs_in_length(built, tmp_path):
    task = make_task("shell_jitter", test_size=6, packed=True)
    columns = read_columns(load(built, "shell_jitter", "test_32", tmp_path / "cache"))
    expected = task.model_inputs(task.rows("test_32", 0, 6))
    assert torch.equal(columns["observations"], expected["observations"])
    assert torch.equal(columns["cu_seqlens"], expected["cu_seqlens"])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("remove_unused_columns", [True, False])
def test_trainer_trains_on_what_was_built(name, remove_unused_columns, built, tmp_path):
    task = make_task(name)
    model = new_model(task, Mamba3NPLRConfig(**TINY_MODEL, **task.model_fields))
    by_hand = task.model_inputs(task.rows("train", 0, 20))
    rows = load(built, name, "train", tmp_path / "cache")
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=20,  # every update sees all rows, in whatever order
        per_device_eval_batch_size=20,
        logging_steps=1,
        remove_unused_columns=remove_unused_columns,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=pad_sequences)
    before = model(**by_hand).loss.item()
    trainer.train()
    after = model(**by_hand).loss.item()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[0] == pytest.approx(before, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(after, rel=1e-5) and after < before


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [3, 1, 2, 3]])
def test_the_reader_takes_parts_of_arrow_arrays(lengths):
    lengths = np.array(lengths)
    array = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2)
    values, _ = from_arrow(to_arrow(array, lengths).slice(1, 2))
    assert values.flatten().tolist() == [x for row in (1, 2) for x in array[row, : lengths[row]].flatten()]


def test_a_build_is_the_same_bit_for_bit(built, tmp_path):
    build.build(tmp_path / "again", train_size=20, names=TASKS)
    files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    assert sum(path.suffix == ".parquet" for path in files) == 8 + 6 + 10
    for path in files:
        assert (built / path).read_bytes() == (tmp_path / "again" / path).read_bytes(), path


def test_the_card_is_valid(built):
    card = DatasetCard.load(built / "README.md")
    assert CITATIONS["nplr"] in card.text
    card_configs = {config["config_name"]: config["data_files"] for config in card.data.configs}
    assert list(card_configs) == TASKS and card.data.license == "apache-2.0"
    assert "episode.png" in card.text and (built / "episode.png").stat().st_size > 10_000
    assert "--train_size 20 --tasks s5_generators shell shell_jitter" in card.text
    for column in ("input_ids", "labels", "observations", "num_swaps", "swaps", "ball_slot"):
        assert f"| `{column}` |" in card.text
    assert "| `labels` | frames x 2 float32 |" in card.text


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from mamba3_nplr.datasets_scripts import build
from mamba3_nplr.datasets_scripts.tasks import make_task

build.make_task = lambda name: make_task(name, test_size=6)
build.main()
"""


def test_a_build_without_matplotlib_goes_without_a_picture(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, str(out), "--train_size", "5", "--tasks", "z5", "shell"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if "picture" in line]
    assert "pip install 'mamba3_nplr[plot]'" in line
    assert not (out / "episode.png").exists() and "episode.png" not in (out / "README.md").read_text()
    assert "matplotlib" not in json.loads((out / "build.json").read_text())["versions"]
    assert not changed_files(out, json.loads((out / "checksums.json").read_text()))
    assert len(load(out, "z5", "train", tmp_path / "cache")) == 5


def test_the_card_tells_of_the_tasks_that_are_there(tmp_path):
    build.build(tmp_path / "out", train_size=5, names=["z5"])
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.pretty_name == "State tracking: group words"
    assert card.data.task_categories == ["token-classification"] and "imitation-learning" not in card.data.tags
    assert "## Words" in card.text and "observations" not in card.text and "shell" not in card.text.lower()
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_stopped_build_goes_on(tmp_path, monkeypatch, capsys):
    write, calls = build.write_atomically, []

    def full_disk(path, write_part):
        if path.suffix == ".parquet":
            calls.append(path)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, write_part)

    arguments = [str(tmp_path / "out"), "--train_size", "20", "--tasks", *TASKS]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(build, "write_atomically", full_disk)
        build.main(arguments)
    assert stopped.value.code == 1 and "The disk is full" in capsys.readouterr().err
    assert not (tmp_path / "out" / "README.md").exists()
    assert not list((tmp_path / "out").rglob(".*"))
    whole = list((tmp_path / "out").rglob("*.parquet"))
    assert len(whole) == 4
    before = {path: path.stat().st_mtime_ns for path in whole}
    build.main(arguments)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    build.build(tmp_path / "fresh", train_size=20, names=TASKS)
    for path in (tmp_path / "fresh").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "fresh")).read_bytes()


def flip(path):
    content = path.read_bytes()
    middle = len(content) // 4  # in the rows: that these are others shows in nothing else
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A small build, without the picture, which takes longer than all else."""
    monkeypatch.setattr(build, "can_draw", lambda: False)
    build.build(tmp_path / "out", train_size=5, names=["z5"])
    return tmp_path / "out"


DAMAGE = {
    "a byte": flip,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_was_damaged_is_built_again_and_never_certified(damage, words, capsys):
    name = "z5/test_128-00000-of-00001.parquet"
    before = {path: path.read_bytes() for path in words.rglob("*.*")}
    times = {path: path.stat().st_mtime_ns for path in words.rglob("*.parquet")}
    damage(words / name)
    capsys.readouterr()
    build.build(words, train_size=5, names=["z5"])
    assert {path: path.read_bytes() for path in words.rglob("*.*")} == before
    assert [path for path, time in times.items() if path.stat().st_mtime_ns != time] == [words / name]
    said = capsys.readouterr().out
    assert said.count("built again") == (damage is not Path.unlink) and (name in said) == (damage is not Path.unlink)


RECORDS = {
    "no longer JSON": b"{",
    "a list": b"[]",
    "not a text": b"\xff\xfe",
    "of numbers": b'{"z5/test_128-00000-of-00001.parquet": 1}',
}


@pytest.mark.parametrize("record", [None, *RECORDS.values()], ids=["gone", *RECORDS])
def test_files_without_a_record_are_not_trusted(record, words):
    before = {path: path.read_bytes() for path in words.rglob("*.*")}
    (words / "checksums.json").unlink() if record is None else (words / "checksums.json").write_bytes(record)
    flip(words / "z5" / "test_128-00000-of-00001.parquet")
    build.build(words, train_size=5, names=["z5"])
    assert {path: path.read_bytes() for path in words.rglob("*.*")} == before


def test_settings_that_were_changed_are_written_again_or_refused(words):
    before = (words / "build.json").read_bytes()
    (words / "build.json").write_bytes(before.replace(b"\n", b" \n"))
    build.build(words, train_size=5, names=["z5"])
    assert (words / "build.json").read_bytes() == before
    for content in (b"{", b"3", b"\xff"):
        (words / "build.json").write_bytes(content)
        with pytest.raises(ValueError, match="build.json cannot be read.*Give another folder"):
            build.build(words, train_size=5, names=["z5"])


HANGING_BUILD = """
import sys, time
from pathlib import Path
from mamba3_nplr.modeling.hub import atomic_files
from mamba3_nplr.datasets_scripts import build
from mamba3_nplr.datasets_scripts.tasks import make_task

build.make_task = lambda name: make_task(name, test_size=6)
build.can_draw = lambda: False
sync, synced = atomic_files.sync, []

def hang(path):
    synced.append(path)
    if len([path for path in synced if Path(path).suffix == ".parquet"]) == 4:
        with open(path, "r+b") as file:
            file.truncate(1000)
        print("half", flush=True)
        time.sleep(600)
    sync(path)

atomic_files.sync = hang
build.main(sys.argv[1:])
"""


def test_two_builds_at_once_one_killed_and_the_folder_ends_whole(words, tmp_path, capsys):
    out = tmp_path / "both"
    arguments = [str(out), "--train_size", "5", "--tasks", "z5"]
    command = [sys.executable, "-c", HANGING_BUILD, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        try:
            assert first.stdout.readline() == "half\n"
            with pytest.raises(SystemExit) as refused:
                build.main(arguments)
            assert refused.value.code == 1 and f"is in use: process {first.pid} on" in capsys.readouterr().err
        finally:
            first.kill()
    assert not (out / "README.md").exists() and len(list(out.rglob("[!.]*.parquet"))) == 3
    [part] = [path for path in out.rglob(".*") if path.suffix == ".parquet"]
    assert part.stat().st_size == 1000
    build.main(arguments)
    files = sorted(path.relative_to(out) for path in out.rglob("*.*"))
    assert files == sorted(path.relative_to(words) for path in words.rglob("*.*"))
    assert all((out / path).read_bytes() == (words / path).read_bytes() for path in files)
    assert not changed_files(out, json.loads((out / "checksums.json").read_text()))


def test_a_build_stopped_before_any_of_its_files_ends_the_same(words, tmp_path, monkeypatch, capsys):
    write = build.write_atomically
    # Settings, their checksum, that of the first file, the file itself; the last file and the card.
    for stop_at in (1, 2, 3, 4, 18, 19):
        out, calls = tmp_path / str(stop_at), []

        def stop(path, write_part, calls=calls, stop_at=stop_at):
            calls.append(path)
            if len(calls) == stop_at:
                raise InterruptedError
            write(path, write_part)

        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(build, "write_atomically", stop)
            build.build(out, train_size=5, names=["z5"])
        build.build(out, train_size=5, names=["z5"])
        for path in words.rglob("*.*"):
            assert (out / path.relative_to(words)).read_bytes() == path.read_bytes()
    assert capsys.readouterr().out.count("built again") == 1  # the settings, without their checksum


def test_a_folder_that_is_built_again_is_not_finished_before_it_is_whole(words, monkeypatch):
    publish.plan(words, "user")
    (words / "checksums.json").write_text("{")
    write, calls = build.write_atomically, []

    def stop(path, write_part):
        calls.append(path)
        if len(calls) == 4:
            raise InterruptedError
        write(path, write_part)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(build, "write_atomically", stop)
        build.build(words, train_size=5, names=["z5"])
    with pytest.raises(publish.RefusedError, match="a build that was stopped"):
        publish.plan(words, "user")
    build.build(words, train_size=5, names=["z5"])
    assert len(publish.plan(words, "user").files) == 8 + 4


def test_a_build_killed_in_its_first_moment_goes_on(words):
    for path in words.rglob("*.*"):
        path.unlink()
    (words / "z5").rmdir()
    (words / ".mamba3_nplr.lock").write_text("process 1 on nowhere\n")
    (words / ".build.json.0123abcd.part.json").write_text("{")
    build.build(words, train_size=5, names=["z5"])
    assert not list(words.glob(".*"))


def test_folders_are_never_mixed(built, tmp_path):
    with pytest.raises(ValueError, match="other settings .train_size there: 20, now: 30"):
        build.build(built, train_size=30, names=TASKS)
    with pytest.raises(ValueError, match="other settings .tasks there"):
        build.build(built, train_size=20, names=["z5"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no build"):
        build.build(tmp_path / "mine", train_size=20, names=TASKS)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    settings = json.loads((built / "build.json").read_text())
    assert settings["train_size"] == 20 and settings["tasks"] == TASKS


def test_a_folder_that_cannot_be_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/nowhere")):
        with pytest.raises(SystemExit) as stop:
            build.main([str(out), "--train_size", "5", "--tasks", "z5"])
        assert stop.value.code in (1, 2) and str(out) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


BAD = {"task='s6' is unknown": ["--tasks", "s6"], "train_size=-5": ["--train_size", "-5"]}


@pytest.mark.parametrize(("message", "arguments"), BAD.items())
def test_bad_arguments_of_the_command(message, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        build.main([str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["s5_generators", "shell", "shell_jitter"])
def test_show_draws_and_prints(name, tmp_path, capsys):
    show.main([name, "--index", "3", "--out", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    show.main([name, "--index", "3", "--split", "train"])
    text = capsys.readouterr().out
    row = make_task(name).rows("train", 3, 4)
    if name == "s5_generators":
        assert text.splitlines()[-1].endswith(f"({row['labels'][0, -1]})")
    else:
        assert text.splitlines()[-1].endswith(f"reach for slot {row['ball_slot'][0]}")


@pytest.mark.parametrize("name", ["shell", "shell_jitter"])
def test_the_drawn_path_is_that_of_the_tracking_demonstrator(name):
    for index in range(30):
        row = show.one_row(make_task(name, demonstrator="track"), "validation", index)
        assert np.array_equal(ball_path(row), row["labels"][:, 0])


@pytest.mark.parametrize(("name", "length"), [("z5", 64), ("s5_generators", 512)])
def test_the_picture_of_a_word_shows_every_point_at_its_place(name, length):
    task = make_task(name)
    row = show.one_row(task, f"test_{length}", 0)
    axes = Figure().add_subplot()
    task.draw_row(axes, row)
    [image] = axes.images
    for step, label in enumerate([0, *row["labels"]]):
        for point, place in enumerate(task.algebra.elements[label]):
            assert image.get_array()[place, step] == point
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"point {i}" for i in range(5)]
    assert len(axes.texts) == (5 * 65 if length == 64 else 0)
    colors = {tuple(image.cmap(point)) for point in range(5)}
    assert len(colors) == 5 and {tuple(line.get_color()) for line in axes.lines} == colors


def test_a_reader_that_has_seen_enough_is_no_mistake():
    command = [sys.executable, "-m", "mamba3_nplr.datasets_scripts.show", "z5", "--split", "test_2048"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith(" step")
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 128 + signal.SIGPIPE


def test_show_refuses_what_is_not_there(capsys):
    for arguments, message in [
        (["shel"], "task='shel' is unknown"),
        (["z5", "--index", "-1"], "index=-1"),
        (["z5", "--split", "test_7"], "split='test_7' is unknown"),
        (["z5", "--index", "512"], "are not in validation, which has 512"),
    ]:
        with pytest.raises(SystemExit):
            show.main(arguments)
        assert message in capsys.readouterr().err
