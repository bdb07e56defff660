"""The comparison's picture: a stranger to it can read which model is which, and what is measured."""

import json

import pytest
from matplotlib.figure import Figure

from helpers.places import ROOT
from mamba3_nplr.configuration.presets import MODELS
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training import comparison

MAIN = ROOT / "results" / "main.json"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    figures = []

    def keep(**options):
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr(comparison, "figure_class", lambda: keep)
    return figures


def test_the_picture_shows_what_was_found(drawn, tmp_path):
    comparison.main([str(MAIN), str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    [axes] = drawn[0].axes
    found = json.loads(MAIN.read_text())
    lengths = [64, 128, 512, 2048, 8192]
    assert "S5" in axes.get_title() and "length" in axes.get_xlabel() and "64" in axes.get_xlabel()
    assert axes.get_xscale() == "log" and [x.get_text() for x in axes.get_xticklabels()] == [f"{x:,}" for x in lengths]
    lines = {line.get_label(): line for line in axes.lines}
    for model, title in (("mamba3", "Mamba-3"), ("nplr", "Mamba-3 + NPLR")):
        line = lines[f"{title} ({model})"]
        assert list(line.get_xdata()) == lengths
        expected = [100 * found[model]["results"][f"test_{x}"]["final_accuracy"] for x in lengths]
        assert list(line.get_ydata()) == expected
    assert lines["chance"].get_linestyle() == "--" and lines["chance"].get_ydata()[0] == pytest.approx(100 / 60)
    assert {x.get_text() for x in drawn[0].legends[0].get_texts()} == {x for x in lines if not x.startswith("_")}


def test_models_are_told_apart(drawn, tmp_path):
    assert len({preset.title for preset in MODELS.values()}) == len(MODELS)
    task = make_task("shell")
    results = {split: {"success": 0.5, "chance": 0.2} for split in task.test_sizes}
    summaries = {model: {"metric": "success", "results": results} for model in MODELS}
    summaries["bad"] = {"failed": "not finite"}
    comparison.draw_comparison(task, summaries, tmp_path / "picture.png")
    [axes] = drawn[0].axes
    lines = [line for line in axes.lines if "(" in line.get_label()]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(MODELS)
    assert "Shell game" in axes.get_title() and "windows" in axes.get_xlabel()


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    (tmp_path / "failed.json").write_text('{"nplr": {"failed": "not finite"}}')
    (tmp_path / "list.json").write_text("[3]")
    wrong = {"nosuch.json": "nosuch.json", "failed.json": "None of the runs has finished", "list.json": "does not hold"}
    for name, message in wrong.items():
        with pytest.raises(SystemExit):
            comparison.main([str(tmp_path / name), str(tmp_path / "picture.png")])
        assert message in capsys.readouterr().err
