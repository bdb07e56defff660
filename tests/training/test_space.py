"""The page on the Hub: all that it needs, and nothing else. That it runs there is tested in a browser."""

import shutil
import socket
import textwrap

import pytest

from helpers.hub_client import TOKENS, run_script
from helpers.hub_server import HubServer
from helpers.made_players import save_player
from helpers.places import ROOT
from mamba3_nplr.training import publish
from mamba3_nplr.training.space import is_page, package_files


@pytest.fixture
def page(tmp_path):
    """A copy of the page in a folder like a checkout, to change."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "demo", tmp_path / "checkout" / "demo", ignore=ignore)
    for task in ("shell", "s5_generators"):
        save_player(tmp_path / "checkout" / "checkpoints", task, "nplr")
    return tmp_path / "checkout" / "demo"


def test_the_package_is_there_as_it_is_installed():
    files = package_files()
    for path in (ROOT / "modeling").rglob("*.*"):
        if path.suffix in (".py", ".h", ".cpp"):
            assert files[f"mamba3_nplr/{path.relative_to(ROOT).as_posix()}"] == path
    assert {"mamba3_nplr/__init__.py", "mamba3_nplr/training/space.py"} <= set(files)
    assert not any("__pycache__" in name or "tests" in name for name in files)


def test_only_files_of_the_page_and_of_models_are_published(page):
    before = publish.plan(page, "user").files
    (page / ".env").write_text("mine")
    (page / "notes.log").write_text("mine")
    (page / "linked.py").symlink_to(__file__)
    (page.parent / "checkpoints" / "shell-nplr-seed0" / "optimizer.pt").write_text("mine")
    (page.parent / "checkpoints" / "unfinished").mkdir()
    assert publish.plan(page, "user").files == before
    own = {path.name for path in (ROOT / "demo").iterdir() if path.is_file()}
    assert {name for name in before if "/" not in name} == own | {"LICENSE"}
    models = {name for name in before if name.startswith("checkpoints/")}
    assert models == {
        f"checkpoints/{task}-nplr-seed0/{file}"
        for task in ("shell", "s5_generators")
        for file in ("config.json", "model.safetensors")
    }


def test_a_page_without_models_is_refused(page, capsys):
    shutil.rmtree(page.parent / "checkpoints")
    with pytest.raises(SystemExit) as stop:
        publish.main([str(page), "--owner=user", "--dry_run"])
    assert stop.value.code == 2 and "there are no trained models in checkpoints/" in capsys.readouterr().err


def test_a_folder_is_a_page_by_its_program_and_card(page):
    assert is_page(page)
    card = (page / "README.md").read_text(encoding="utf-8")
    (page / "README.md").write_text(card.replace("sdk: gradio", "sdk: static"), encoding="utf-8")
    assert not is_page(page)
    (page / "README.md").unlink()
    assert not is_page(page) and not is_page(page.parent)


def test_a_dry_run_shows_the_space_without_network(page, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("a dry run has used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    publish.main([str(page), "--dry_run"])
    shown = capsys.readouterr().out
    assert "space OWNER/shell-game\n" in shown and "mamba3_nplr/modeling/heads.py" in shown
    assert f"bytes in {len(publish.plan(page, 'OWNER').files)} files" in shown


PUSH = textwrap.dedent(
    """
    import sys
    from mamba3_nplr.publish import main

    for _ in range(2):  # the second changes nothing
        main([sys.argv[1], "--private"])
    """
)


def test_the_page_is_pushed_as_the_dry_run_shows_it(page, tmp_path):
    with HubServer(tmp_path / "hub", TOKENS) as hub:
        done = run_script(hub, tmp_path, PUSH, page)
    assert f"user/shell-game: {hub.url}/spaces/user/shell-game" in done.stdout
    repository, planned = hub.repository("user/shell-game", "spaces"), publish.plan(page, "user").files
    assert repository.private and len(repository.history()) == 2
    assert set(repository.files()) - {".gitattributes"} == set(planned)
    for name, content in planned.items():
        assert repository.read(name) == (content if isinstance(content, bytes) else content.read_bytes()), name
