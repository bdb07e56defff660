"""The page as a program and as a Space: nothing in it asks another machine, and what it needs is listed."""

import base64
import logging
import re
import socket
import tomllib

import pytest
from huggingface_hub import RepoCard

import app
from browser import BROKEN, as_bytes, in_sentences
from helpers.hub_server import card_problems
from helpers.made_players import save_player
from helpers.places import ROOT
from trained_models import TrainedModels

DEMO = ROOT / "demo"
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address


@pytest.mark.parametrize("path", sorted(DEMO.glob("*.[chjp]*")), ids=lambda path: path.name)
def test_no_file_names_another_machine(path):
    text = path.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert not re.findall(r"https?:|//[a-z0-9-]+\.[a-z]|@import", text)


def test_the_page_has_its_tabs_and_no_telemetry(models):
    page = app.build(models)
    config = page.get_config_file()
    assert page.analytics_enabled is False and config["analytics_enabled"] is False
    labels = [block["props"].get("label") for block in config["components"] if block["type"] == "tabitem"]
    assert labels == ["Shell game", "Words", "Inside"]


def test_policies_are_named_in_the_order_of_the_page(tmp_path):
    for task, name in (("shell", "nplr_exact"), ("shell", "mamba3"), ("shell_jitter", "nplr")):
        save_player(tmp_path, task, name)
    named = {timing: [*policies] for timing, policies in app.named_policies(TrainedModels(tmp_path)).items()}
    assert named == {"fixed": ["nplr_exact", "mamba3"], "jittered": ["nplr_exact", "nplr", "mamba3"]}


def test_templates_are_plain_text():
    """gradio reads them as a template of two languages; a mark of either would be taken for code."""
    for path in DEMO.glob("*.html"):
        assert not re.search(r"\{\{|\$\{|`|<script", path.read_text(encoding="utf-8")), path


def test_requirements_are_those_of_the_package_with_the_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = (DEMO / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert listed == [*project["dependencies"], *project["optional-dependencies"]["demo"]]


def test_the_card_is_that_of_a_space():
    card = RepoCard.load(DEMO / "README.md", repo_type="space")
    facts = card.data.to_dict()
    assert card_problems(facts) == [] and facts["license"] == "apache-2.0"
    assert facts["sdk"] == "gradio" and (DEMO / facts["app_file"]).is_file()
    assert card_problems({"colorTo": "mauve"}) and card_problems({"short_description": 61 * "x"})


def test_the_program_says_which_folder_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main(["--checkpoints", str(tmp_path / "none")])
    assert stop.value.code == 2 and f"--checkpoints {tmp_path / 'none'} is not there" in capsys.readouterr().err


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_the_program_says_which_ports_there_are(port, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main([f"--port={port}"])
    assert stop.value.code == 2 and f"--port {port} is not allowed; it must be from 1 to" in capsys.readouterr().err


def test_the_program_says_that_a_port_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SystemExit) as stop:
        port = server.getsockname()[1]
        app.main([f"--port={port}", f"--checkpoints={tmp_path}"])
    assert stop.value.code == 2 and f"--port {port} is taken by another program" in capsys.readouterr().err


def test_whatever_fails_is_a_sentence_and_its_trace_is_in_the_log(caplog):
    def fails(number):
        return {"part": 1 / number}

    answered = in_sentences(fails)
    assert answered({"number": 4}) == {"part": 0.25} and answered.__name__ == "fails"
    with caplog.at_level(logging.ERROR):
        assert answered({"number": 0}) == {"error": BROKEN} == answered({"unknown": 1})
    assert "ZeroDivisionError" in caplog.text


def test_numbers_become_bytes_of_their_range():
    packed = base64.b64decode(as_bytes([-1.0, 0.0, 1.0, 3.0], -1, 1))
    assert list(packed) == [0, 128, 255, 255]
