"""A task is one class and one entry in `TASKS`: toy ones go all the way, and no other code knows any by type."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from datasets import load_dataset
from huggingface_hub import DatasetCard, ModelCard
from matplotlib.figure import Figure
from transformers import AutoConfig

from helpers import training_program
from helpers.hub_server import card_problems
from helpers.places import ROOT
from helpers.training_program import TINY, TINY_MODEL
from mamba3_nplr.datasets_scripts import build, show
from mamba3_nplr.datasets_scripts.columns import read_columns
from mamba3_nplr.datasets_scripts.counter_random import CounterRandom, split_rows
from mamba3_nplr.datasets_scripts.task import Task
from mamba3_nplr.datasets_scripts.task_kinds import BehaviorCloning, PrefixClassification
from mamba3_nplr.datasets_scripts.task_texts import CardPicture, TaskTexts
from mamba3_nplr.datasets_scripts.tasks import TASKS, make_task
from mamba3_nplr.training import comparison
from mamba3_nplr.training.batches import FreshBatches
from mamba3_nplr.training.evaluation import evaluate
from mamba3_nplr.training.models import new_model


def texts_of(problem: str, **more) -> TaskTexts:
    """Texts of which each says what it is, so that none is taken for another."""
    names = ("subject", "sequences", "answer", "details", "heading", "section")
    return TaskTexts(problem, **{name: f"{name} of {problem}" for name in names}, **more)


@dataclass(frozen=True)
class Toy(Task):
    """Rows that `draw` makes, for training of one length and for tests of two."""

    length: int = 6
    test_size: int = 5

    @property
    def trained_size(self):
        return self.length

    @property
    def splits(self):
        return dict.fromkeys(["validation", *self.test_sizes], self.test_size)

    def arrays(self, seed, step, rank=0, world_size=1):
        return self.draw("train", seed, step, *split_rows(self.batch_size, rank, world_size), self.length)

    def rows(self, split, start, stop):
        if split != "train":
            self.check_split(split, start, stop)
        return self.draw(f"set/{split}", 0, 0, start, stop - start, self.test_sizes.get(split, self.length))


@dataclass(frozen=True)
class Parity(Toy, PrefixClassification):
    """Whether the ones so far are odd in number."""

    texts = texts_of("parity", tags=("parity",))
    token_names = ["zero", "one"]
    label_names = ["even", "odd"]
    question = "Bits: is the last parity right?"
    description = "Reads bits and says whether the ones so far are odd in number."
    short_description = "bits and parities"

    @property
    def test_sizes(self):
        return {"test_short": self.length, "test_long": 3 * self.length}

    def draw(self, purpose, seed, step, first, rows, length):
        bits = CounterRandom(f"parity/{purpose}", seed, step, first, rows, length).integers(2, length)
        return {"input_ids": bits, "labels": bits.cumsum(1) % 2}

    def chance(self, rows):
        return 0.5

    def describe_row(self, row):
        return " ".join(f"{self.token_names[x]}:{self.label_names[y]}" for x, y in zip(*row.values(), strict=True))

    def draw_row(self, axes, row):
        axes.step(range(len(row["labels"])), row["labels"])
        axes.set_title("Parity")


@dataclass(frozen=True)
class RunningMaximum(Toy, BehaviorCloning):
    """The largest number so far, in episodes of different lengths."""

    texts = texts_of("maximum", picture=CardPicture("maxima.png", "Numbers and their maximum", "validation", 2))
    main_metric = "near"
    size_name = "steps"
    observation_size = 1
    action_size = 1
    question = "Maxima: is the last one near?"
    description = "Follows the largest number."
    short_description = "numbers and maxima"

    packed: bool = False
    length: int = 7  # of the longest

    @property
    def test_sizes(self):
        return {f"test_{size}": size for size in (self.length, 2 * self.length)}

    def draw(self, purpose, seed, step, first, rows, longest):
        random = CounterRandom(f"maximum/{purpose}", seed, step, first, rows, longest + 1)
        steps = 2 + random.integers(longest - 1)
        inside = np.arange(longest) < steps[:, None]
        numbers = (random.uniform(longest) * inside).astype(np.float32)[..., None]
        maxima = np.maximum.accumulate(numbers, axis=1) * inside[..., None]
        return {"observations": numbers, "labels": maxima, "steps": steps}

    def lengths(self, rows):
        return {"observations": rows["steps"], "labels": rows["steps"]}

    def features(self):
        from datasets import Features, Value

        return Features(super().features() | {"steps": Value("int32")})

    def metrics(self, predictions, rows):
        last = rows["steps"][:, None] - 1
        error = np.take_along_axis(np.abs(predictions - rows["labels"])[..., 0], last, axis=1)
        return {"near": float((error < 0.05).mean()), "error": float(error.mean())}

    def chance(self, rows):
        return 0.1

    def describe_row(self, row):
        return f"{row['steps']} numbers, the largest {row['labels'][-1, 0]:.3f}"

    def draw_row(self, axes, row):
        axes.plot(row["observations"][:, 0], "o")
        axes.plot(row["labels"][:, 0])
        axes.set_title("Maxima")


TOYS = {"parity": Parity(batch_size=4), "running_maximum": RunningMaximum(batch_size=4, packed=True)}
program = training_program.load_program()


@pytest.fixture(params=TOYS)
def toy(request, monkeypatch):
    """The name of a task that is entered among the others."""
    monkeypatch.setitem(TASKS, request.param, TOYS[request.param])
    return request.param


def test_a_new_task_makes_batches(toy):
    task = make_task(toy, batch_size=6)
    whole = task.arrays(3, 2)
    parts = [task.arrays(3, 2, rank, 2) for rank in range(2)]
    assert all(np.array_equal(x, np.concatenate([part[name] for part in parts])) for name, x in whole.items())
    config = AutoConfig.for_model("mamba3_nplr", **TINY_MODEL, **task.model_fields | task.model_names)
    model = new_model(task, config)
    packed, padded = (model(**FreshBatches(x, 3, 5)[2]).loss for x in (task, task.for_evaluation))
    assert packed.isfinite() and torch.allclose(packed, padded)


def test_a_new_task_is_built_and_loaded(toy, tmp_path):
    build.main([str(tmp_path / "out"), "--train_size", "9", "--tasks", toy, "z5"])
    task = make_task(toy)
    for split, size in ({"train": 9} | task.splits).items():
        dataset = load_dataset(str(tmp_path / "out"), toy, split=split, cache_dir=str(tmp_path / "cache"))
        rows = task.rows(split, 0, size)
        assert dataset.features == task.features() and len(dataset) == size
        for i, row in enumerate(dataset):
            length = task.lengths(rows)["labels"][i] if task.lengths(rows) else rows["labels"].shape[1]
            assert len(row["labels"]) == length
            assert np.array_equal(np.float32(row["labels"]), rows["labels"][i, :length])
    packed = read_columns(dataset)
    expected = replace(task, packed=True).model_inputs(rows) if "steps" in rows else task.model_inputs(rows)
    assert all(torch.equal(packed[name], x.to(packed[name].dtype)) for name, x in expected.items())
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card_problems(card.data.to_dict()) == []
    texts = task.texts
    assert card.data.pretty_name == f"State tracking: {texts.subject} and group words"
    assert task.hub.category in card.data.task_categories and {*texts.tags} <= {*card.data.tags}
    assert f"## {texts.heading}\n" in card.text and texts.section in card.text and task.short_description in card.text
    pictures = list((tmp_path / "out").glob("*.png"))
    assert [path.name for path in pictures] == ([texts.picture.name] if texts.picture else [])
    for path in pictures:
        show.draw(task, texts.picture.split, texts.picture.index, tmp_path / "again.png")
        assert path.name in card.text and path.read_bytes() == (tmp_path / "again.png").read_bytes()


def test_a_new_task_is_shown(toy, tmp_path, capsys):
    show.main([toy, "--split", "test_14" if toy == "running_maximum" else "test_long", "--index", "1"])
    task, text = make_task(toy), capsys.readouterr().out
    if toy == "parity":
        bits = task.rows("test_long", 1, 2)["input_ids"][0]
        assert text.count("one:") == bits.sum() and len(text.split()) == 18
    else:
        [steps], [numbers] = (task.rows("test_14", 1, 2)[name] for name in ("steps", "observations"))
        assert steps < len(numbers) and text == f"{steps} numbers, the largest {numbers.max():.3f}\n"
    show.main([toy, "--out", str(tmp_path / "row.png")])
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")
    axes = Figure().add_subplot()
    task.draw_row(axes, show.one_row(task, "train", 4))
    assert len(axes.lines[0].get_xdata()) == len(show.one_row(task, "train", 4)["labels"])


def test_a_new_task_is_trained_compared_and_evaluated(toy, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    program.main(["compare", "--models", "mamba3", "nplr", *TINY, f"--task={toy}", f"--out={out}"])
    task, printed = make_task(toy), capsys.readouterr().out
    table = (out / "comparison.md").read_text()
    sizes = " | ".join(f"{task.size_name} {size}" for size in task.test_sizes.values())
    assert table in printed and table.startswith(f"| model | parameters | {sizes} |\n")
    assert f"| chance | | {' | '.join([f'{100 * task.chance({}):.1f}'] * 2)} |" in table
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    summaries = json.loads((out / "comparison.json").read_text())
    figure = Figure()
    monkeypatch.setattr(comparison, "figure_class", lambda: lambda **options: figure)
    comparison.draw_comparison(task, summaries, tmp_path / "again.png")
    [axes] = figure.axes
    assert axes.get_title() == task.question and axes.get_ylabel() == f"{task.main_metric.replace('_', ' ')} (%)"
    assert axes.get_xlabel().startswith(
        f"{task.size_name} of the test {task.texts.sequences} (grey: {task.trained_size}"
    )
    found = summaries["nplr"]
    assert found["metric"] == task.main_metric and [*found["results"]] == [*task.test_sizes]
    card = ModelCard.load(out / "nplr" / "README.md")
    assert card_problems(card.data.to_dict()) == []
    for result in card.data.eval_results:
        assert (result.task_type, result.task_name) == (task.hub.task, task.texts.problem)
        assert result.metric_value == found["results"][result.dataset_split][task.main_metric]
    for text in (task.description, task.texts.answer, task.texts.details, f"| {task.size_name.capitalize()} |"):
        assert text in card.text
    program.main(["evaluate", str(out / "nplr"), f"--out={tmp_path / 'again.json'}"])
    assert json.loads((tmp_path / "again.json").read_text())["results"] == found["results"]


def test_the_example_of_its_card_runs(toy, tmp_path, capsys):
    task = make_task(toy)
    config = AutoConfig.for_model("mamba3_nplr", **TINY_MODEL, **task.model_fields | task.model_names)
    new_model(task, config).save_pretrained(tmp_path)
    code = task.example(str(tmp_path), config).replace(", trust_remote_code=True", "")
    exec(compile(code, "example", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == (2 if toy == "parity" else 5)


def test_a_perfect_prediction_is_perfect(toy):
    task = make_task(toy)
    rows = task.rows("validation", 0, 5)
    assert task.metrics(rows["labels"], rows)[task.main_metric] == 1

    class Perfect(torch.nn.Module):
        """Says the labels of the rows of a split that it is asked for, in pieces."""

        def __init__(self, split):
            super().__init__()
            self.anything = torch.nn.Parameter(torch.zeros(1))
            self.labels = torch.from_numpy(task.rows(split, 0, 5)["labels"])

        def forward(self, past_key_values=None, use_cache=True, output_prefix_logits=False, **inputs):
            start = past_key_values or 0
            stop = start + inputs[task.input_column].shape[1]
            piece = self.labels[:, start:stop]
            logits = torch.nn.functional.one_hot(piece, 2) if output_prefix_logits else None
            return SimpleOutput(past_key_values=stop, prefix_logits=logits, actions=piece)

    for split in task.test_sizes:
        assert evaluate(Perfect(split), task, [split], piece_length=3)[split][task.main_metric] == 1


class SimpleOutput:
    def __init__(self, **fields):
        vars(self).update(fields)


@pytest.mark.parametrize("kind", [PrefixClassification, BehaviorCloning])
def test_what_a_task_lacks_is_named(kind):
    with pytest.raises(TypeError, match="abstract methods .*chance.*describe_row.*draw_row.*texts"):
        kind()


OWN = {"words", "groups", "shell_game", "shell_game_episodes", "shell_hand"}
OWN |= {"shell_game_table", "shell_game_pictures", "shell_game_environment", "shell_pixels"}


def imported(path):
    """The last parts of the names of all modules that a file imports, and of all that it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").rpartition(".")[2]
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name.rpartition(".")[2] for alias in node.names)


def test_only_the_list_of_tasks_imports_them():
    files = [path for folder in ("datasets_scripts", "training") for path in (ROOT / folder).glob("*.py")]
    importing = {path.stem for path in files if OWN & {*imported(path)}}
    assert importing - OWN == {"tasks"}


def test_importing_the_tasks_loads_neither_datasets_nor_matplotlib():
    code = "import sys, mamba3_nplr.datasets_scripts.tasks; print(*{'datasets', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
