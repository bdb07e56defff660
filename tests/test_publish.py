"""Publishing: exactly what was evaluated or built, all of it or nothing, and nothing that is not ready."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import training_program
from hub_server import HubServer, card_problems
from huggingface_hub import DatasetCard, ModelCard
from mamba3_nplr.datasets_scripts import build as building
from mamba3_nplr.datasets_scripts import publish as publishing
from mamba3_nplr.datasets_scripts import run_record
from mamba3_nplr.datasets_scripts.tasks import make_task
from training_program import EPISODES, WORDS
from without_package import BLOCKER


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Finished runs of both kinds and built datasets."""
    folder = tmp_path_factory.mktemp("publish")
    program = training_program.load_program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_record, "git_revision", lambda: "0123456789abcdef")
        program.main([*WORDS, f"--output_dir={folder / 'words'}"])
        program.main([*EPISODES, f"--output_dir={folder / 'episodes'}"])
        patch.setattr(building, "make_task", lambda name: make_task(name, test_size=6))
        building.build(folder / "data", train_size=20, names=["z5", "shell"])
    return folder


@pytest.fixture
def copy(folders, tmp_path):
    """A folder of its own to spoil."""
    shutil.copytree(folders, tmp_path / "copy")
    return tmp_path / "copy"


def snippets(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


SPOILED = {
    "model.safetensors has been changed": lambda run: flip(run / "model.safetensors"),
    "modeling_mamba3_nplr.py has been changed": lambda run: flip(run / "modeling_mamba3_nplr.py"),
    "run.json is not there": lambda run: (run / "run.json").unlink(),
    "README.md is missing": lambda run: (run / "README.md").unlink(),
    "other.safetensors was not there": lambda run: shutil.copy(run / "model.safetensors", run / "other.safetensors"),
    "a run is being written": lambda run: (run / ".unfinished").mkdir(),
    "is not evaluated": lambda run: (run / "results.json").unlink(),
    "uncommitted changes": lambda run: change(run / "results.json", environment={"git": "0123+"}),
    "there are no results": lambda run: change(run / "results.json", results={}),
}


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("message", "spoil"), SPOILED.items())
def test_what_was_not_evaluated_as_it_is_is_refused(message, spoil, copy, capsys):
    publishing.plan(copy / "words", "user")
    spoil(copy / "words")
    with pytest.raises(SystemExit) as stop:
        publishing.main([str(copy / "words"), "--owner=user", "--dry_run"])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_single_checkpoints_are_refused(folders):
    with pytest.raises(publishing.RefusedError, match="is not evaluated"):
        publishing.plan(folders / "words" / "checkpoint-8", "user")
    with pytest.raises(publishing.RefusedError, match="is not there"):
        publishing.plan(folders / "nothing", "user")


def test_datasets_that_were_changed_or_not_finished_are_refused(copy):
    data = copy / "data"
    publishing.plan(data, "user")
    flip(data / "z5" / "validation-00000-of-00001.parquet")
    with pytest.raises(publishing.RefusedError, match="validation-00000-of-00001.parquet has been changed"):
        publishing.plan(data, "user")
    (data / "README.md").unlink()
    with pytest.raises(publishing.RefusedError, match="a build that was stopped"):
        publishing.plan(data, "user")


def test_cards_are_valid_and_show_a_picture(folders):
    for name in ("words", "episodes"):
        card = ModelCard.load(folders / name / "README.md")
        assert card_problems(card.data.to_dict()) == [] and card.data.eval_results and card.data.license == "apache-2.0"
        assert "](results.png)" in card.text and (folders / name / "results.png").read_bytes().startswith(b"\x89PNG")
        assert len(snippets(card.text)) == 1
    assert card_problems(DatasetCard.load(folders / "data" / "README.md").data.to_dict()) == []
    assert card_problems({"license": "mine"}) and card_problems({"model-index": [{"name": "x", "results": [{}]}]})


PUBLISH = textwrap.dedent(
    """
    import sys, time, urllib.request, os
    from mamba3_nplr.publish import main

    time.sleep = lambda seconds: None
    def faults(text):
        urllib.request.urlopen(urllib.request.Request(os.environ["HF_ENDPOINT"] + "/faults", text, method="POST"))

    folders = sys.argv[1:]
    main([*folders, "--dry_run"])
    print("published")
    faults(b'{"cut_uploads": 1000}')
    try:
        main(folders)
    except SystemExit as stop:
        assert stop.code == 1
    faults(b"{}")
    main(folders)
    main(folders)  # again: the same
    try:
        main([*folders, "--owner=other"])
    except SystemExit as stop:
        assert stop.code == 1
    """
)

SNIPPETS = BLOCKER + textwrap.dedent(
    """
    import re
    from huggingface_hub import hf_hub_download

    for name, kind in [name.split(":") for name in sys.argv[1:]]:
        with open(hf_hub_download(name, "README.md", repo_type=kind)) as card:
            [block] = re.findall(r"^```python\\n(.*?)^```", card.read(), re.MULTILINE | re.DOTALL)
        assert name in block
        exec(compile(block, name, "exec"), {})
    assert not any(name.startswith("mamba3_nplr") for name in sys.modules)
    """
)


def test_publishing_uploads_what_the_dry_run_shows_and_cards_run(folders, tmp_path):
    names = {
        "s5_generators-nplr-quick-seed0": "models",
        "shell_jitter-nplr-quick-seed0": "models",
        "state-tracking": "datasets",
    }
    with HubServer(tmp_path / "hub", tokens={"hf_right": "user", "hf_other": "other"}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        environment |= {
            "HF_TOKEN": "hf_right",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin",
            "PYTHONPATH": ":".join(sys.path),
        }

        def run(script, *arguments):
            command = [sys.executable, "-c", script, *map(str, arguments)]
            done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done

        done = run(PUBLISH, *(folders / name for name in ("words", "episodes", "data")))
        run(SNIPPETS, *(f"user/{name}:{kind[:-1]}" for name, kind in names.items()))
    assert "the same command goes on" in done.stderr
    assert "403" in done.stderr and not (hub.folder / "models" / "other").exists()
    shown = re.findall(r"^ +([\d,]+)  (\S+)$", done.stdout.partition("published")[0], re.MULTILINE)
    repositories = {name: hub.repository(f"user/{name}", kind) for name, kind in names.items()}
    kept = [(f"{file['size']:,}", path) for x in repositories.values() for path, file in x.files().items()]
    assert sorted(shown) == sorted(entry for entry in kept if entry[1] != ".gitattributes")
    for name, repository in repositories.items():
        files = repository.files()
        assert {"README.md", "LICENSE"} <= set(files) and b"Apache License" in repository.read("LICENSE")
        assert f'"user/{name}"'.encode() in repository.read("README.md")
    built = {path.relative_to(folders / "data").as_posix() for path in (folders / "data").rglob("*.*")}
    assert built <= set(repositories["state-tracking"].files())
    words = repositories["s5_generators-nplr-quick-seed0"]
    for file in ("model.safetensors", "results.json", "results.png"):
        assert words.read(file) == (folders / "words" / file).read_bytes()
    assert len(words.history()) == 2  # the first, and all of it in one; the same again is nothing new
    [path] = (hub.folder / "collections" / "user").iterdir()
    index = json.loads(path.read_text())
    assert index["title"] == "mamba3_nplr"
    assert [(x["id"], x["type"]) for x in index["items"]] == [(f"user/{x}", kind[:-1]) for x, kind in names.items()]
    assert "final accuracy" in index["items"][0]["note"]["text"]


def test_a_name_is_for_one_folder(capsys):
    with pytest.raises(SystemExit):
        publishing.main(["a", "b", "--name=c", "--owner=user"])
    assert "--name is for a single FOLDER" in capsys.readouterr().err


def test_the_licence_is_that_of_the_project():
    assert publishing.licence() == (Path(__file__).parent.parent / "LICENSE").read_bytes()
