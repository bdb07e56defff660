"""Publishing: exactly what was evaluated or built, all of it or nothing, and nothing that is not ready."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
import textwrap
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard, ModelCard

from helpers import training_program
from helpers.hub_client import FAULTS, TOKENS, run_client, run_script
from helpers.hub_server import HubServer, card_problems
from helpers.places import ROOT
from helpers.training_program import EPISODES, WORDS
from helpers.without_package import BLOCKER
from mamba3_nplr.datasets_scripts import build
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.hub.contents import read_contents, write_contents
from mamba3_nplr.modeling.hub.folder_lock import FolderInUseError, folder_lock
from mamba3_nplr.training import publish, record
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.model_card import model_card


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Finished runs of both kinds and built datasets."""
    folder = tmp_path_factory.mktemp("publish")
    program = training_program.load_program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "git_revision", lambda: "0123456789abcdef")
        program.main([*WORDS, f"--output_dir={folder / 'words'}"])
        program.main([*EPISODES, f"--output_dir={folder / 'episodes'}"])
        patch.setattr(build, "make_task", lambda name: make_task(name, test_size=6))
        build.build(folder / "data", train_size=20, names=["z5", "shell"])
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
    "run.json has been changed": lambda run: flip(run / "run.json"),
    "README.md is not there": lambda run: (run / "README.md").unlink(),
    "README.md has been changed": lambda run: flip(run / "README.md"),
    "published with --allow_edited README.md": lambda run: flip(run / "README.md"),
    "results.json has been changed": lambda run: flip(run / "results.json"),
    "results.json has 2 bytes instead of": lambda run: (run / "results.json").write_text("[]"),
    "results.png has been changed": lambda run: flip(run / "results.png"),
    "results.png is a symbolic link": lambda run: link(run / "results.png"),
    "config.json is a symbolic link": lambda run: link(run / "config.json"),
    "contents.json is not there": lambda run: (run / "contents.json").unlink(),
    "contents.json cannot be read": lambda run: (run / "contents.json").write_text("null"),
    "run.json has no checksum in contents.json": lambda run: list_files(run, without="run.json"),
    "a run was stopped while it was writing": lambda run: (run / ".unfinished").mkdir(),
    "is not evaluated": lambda run: (run / "results.json").unlink(),
    "uncommitted changes": lambda run: change(run / "results.json", environment={"git": "0123+"}),
    "there are no results": lambda run: change(run / "results.json", results={}),
}


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def change(path, **fields):
    """As if the run itself had written it so."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    list_files(path.parent)


def list_files(run, without=None):
    write_contents(run, [name for name in read_contents(run) if name != without])


def link(path):
    """What was written, elsewhere; it might be anything by the time of the upload."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize(("message", "spoil"), SPOILED.items())
def test_what_was_not_evaluated_as_it_is_is_refused(message, spoil, copy, capsys):
    publish.plan(copy / "words", "user")
    spoil(copy / "words")
    with pytest.raises(SystemExit) as stop:
        publish.main([str(copy / "words"), "--owner=user", "--dry_run"])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_card_that_was_edited_is_published_if_asked_for(copy, capsys):
    run = copy / "words"
    card = (run / "README.md").read_text() + "Mine.\n"
    (run / "README.md").write_text(card)
    with pytest.raises(publish.RefusedError, match="README.md has"):
        publish.plan(run, "user")
    publish.main([str(run), "--owner=user", "--dry_run", "--allow_edited=README.md"])
    assert b"Mine." in publish.plan(run, "user", allow_edited=["README.md"]).files["README.md"]
    link(run / "README.md")
    flip(run / "results.png")
    with pytest.raises(publish.RefusedError, match="README.md is a symbolic link; results.png has been changed"):
        publish.plan(run, "user", allow_edited=["README.md"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        publish.main([str(run), "--owner=user", "--dry_run", "--allow_edited=results.json"])
    assert "invalid choice: 'results.json'" in capsys.readouterr().err


def test_only_files_that_the_run_wrote_are_published(copy, capsys):
    run = copy / "words"
    before = publish.plan(run, "user").files
    for name in ("my_secrets.py", "private.safetensors", "private.safetensors.index.json"):
        (run / name).write_text("mine")
    (run / "linked.py").symlink_to(__file__)
    assert publish.plan(run, "user").files == before
    assert {"model.safetensors", "config.json", "modeling_mamba3_nplr.py", "results.json", "results.png"} <= set(before)
    assert not {"trainer_state.json", "contents.json"} & set(before)
    publish.main([str(run), "--owner=user", "--dry_run"])
    assert not re.search("secrets|private|linked", capsys.readouterr().out)


def test_a_model_that_lies_without_its_code_is_published_as_its_run(copy):
    """As those in checkpoints/ do: who pulls it needs the code, and a card that says so."""
    run = copy / "words"
    whole = contents(publish.plan(run, "user"))
    code = [name for name in whole if name.endswith(".py")]
    for name in code:
        (run / name).unlink()
    config = json.loads((run / "config.json").read_text())
    for name in ("auto_map", "custom_pipelines"):
        del config[name]
    (run / "config.json").write_text(json.dumps(config))
    summary = json.loads((run / "results.json").read_text())
    settings = parse_run(shlex.split(summary["command"])[2:])
    (run / "README.md").write_text(model_card(settings, summary, "here", plot=True, carries_code=False))
    write_contents(run, set(read_contents(run)) - set(code))
    published = contents(publish.plan(run, "user"))
    assert json.loads(published.pop("config.json")) == json.loads(whole.pop("config.json"))
    assert code and published == whole


def contents(upload):
    return {name: x if isinstance(x, bytes) else x.read_bytes() for name, x in upload.files.items()}


def test_a_folder_in_which_a_run_goes_on_is_refused(copy, capsys):
    run = copy / "words"
    with folder_lock(run), pytest.raises(SystemExit) as stop:
        publish.main([str(run), "--owner=user", "--dry_run"])
    assert stop.value.code == 2
    assert f"{run} is in use: process {os.getpid()} on {socket.gethostname()}" in capsys.readouterr().err
    publish.main([str(run), str(run), "--owner=user", "--dry_run"])
    assert not list(run.glob(".*"))


def test_a_run_is_kept_out_while_its_folder_is_published(copy, monkeypatch):
    def describe(*_):
        with pytest.raises(FolderInUseError), folder_lock(copy / "words"):
            pass
        return "kept out"

    monkeypatch.setattr(publish, "describe", describe)
    publish.main([str(copy / "words"), "--owner=user", "--dry_run"])


def test_single_checkpoints_are_refused(folders):
    with pytest.raises(publish.RefusedError, match="is not evaluated"):
        publish.plan(folders / "words" / "checkpoint-8", "user")
    with pytest.raises(publish.RefusedError, match="is not there"):
        publish.plan(folders / "nothing", "user")


def test_datasets_that_were_changed_or_not_finished_are_refused(copy):
    data = copy / "data"
    publish.plan(data, "user")
    flip(data / "z5" / "validation-00000-of-00001.parquet")
    with pytest.raises(publish.RefusedError, match="validation-00000-of-00001.parquet has been changed"):
        publish.plan(data, "user")
    for checksums in ("{}", "[]", "not JSON"):
        (data / "checksums.json").write_text(checksums)
        with pytest.raises(publish.RefusedError, match="a build that was stopped"):
            publish.plan(data, "user")
    (data / "README.md").unlink()
    with pytest.raises(publish.RefusedError, match="a build that was stopped"):
        publish.plan(data, "user")


def test_cards_are_valid_and_show_a_picture(folders):
    for name in ("words", "episodes"):
        card = ModelCard.load(folders / name / "README.md")
        assert card_problems(card.data.to_dict()) == [] and card.data.eval_results and card.data.license == "apache-2.0"
        assert "](results.png)" in card.text and (folders / name / "results.png").read_bytes().startswith(b"\x89PNG")
        assert len(snippets(card.text)) == 1
    card = DatasetCard.load(folders / "data" / "README.md")
    assert card_problems(card.data.to_dict()) == [] and card.data.license == "apache-2.0"
    assert "](episode.png)" in card.text and (folders / "data" / "episode.png").read_bytes().startswith(b"\x89PNG")
    assert len(snippets(card.text)) == 1
    assert card_problems({"license": "mine"}) and card_problems({"model-index": [{"name": "x", "results": [{}]}]})


PUBLISH = FAULTS + textwrap.dedent(
    """
    import contextlib, io, sys
    from huggingface_hub import HfApi
    from mamba3_nplr.publish import main

    folders = sys.argv[1:]
    repositories = {"user/s5_generators-nplr-quick-seed0": "model", "user/shell_jitter-nplr-quick-seed0": "model"}
    repositories |= {"user/state-tracking": "dataset"}

    def stops(*texts, options=()):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                main([*folders, "--private", *options])
            except SystemExit as stop:
                assert stop.code == 1
            else:
                raise AssertionError("should have stopped")
        print(said.getvalue(), file=sys.stderr)
        texts = ("publish: ", "as it was, or holds all of its upload; the same command resumes.", *texts)
        assert all(text in said.getvalue() for text in texts), said.getvalue()

    main([*folders, "--owner=user", "--dry_run"])
    print("published")
    name, right = next(iter(repositories)), os.environ["HF_TOKEN"]
    for token, reason in (("hf_wrong", "401"), ("hf_reader", "403"), (None, "401")):
        os.environ["HF_TOKEN"] = token or ""
        stops(reason, f"{name} could not be uploaded", "the token", "hf auth login", options=["--owner=user"])
    stops("no token found", "hf auth login")
    os.environ["HF_TOKEN"] = "hf_wrong"
    stops("Invalid user token", "HF_TOKEN")
    os.environ["HF_TOKEN"] = right
    stops("other/s5_generators-nplr-quick-seed0 could not be uploaded", "403", options=["--owner=other"])
    assert not any(HfApi().repo_exists(x, repo_type=kind) for x, kind in repositories.items())
    for kind, reason in (("cut_uploads", "the connection broke off"), ("damaged_uploads", "announced sha256")):
        for i, (name, repo_type) in enumerate(repositories.items()):
            faults(**{kind: 1000})
            only, folders = folders, folders[i : i + 1]
            stops(f"{name} could not be uploaded: ", reason)
            folders = only
            assert HfApi().list_repo_files(name, repo_type=repo_type) == [".gitattributes"]
    faults()
    for _ in range(2):  # the second changes nothing
        main([*folders, "--private"])
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


NAMES = {
    "s5_generators-nplr-quick-seed0": "models",
    "shell_jitter-nplr-quick-seed0": "models",
    "state-tracking": "datasets",
}


def shown_files(text):
    """Size and name of every file that a dry run shows."""
    return sorted(re.findall(r"^ +([\d,]+)  (\S+)$", text, re.MULTILINE))


def test_publishing_uploads_what_the_dry_run_shows_and_cards_run(folders, tmp_path):
    given = [folders / name for name in ("words", "episodes", "data")]
    with HubServer(tmp_path / "hub", TOKENS, read_only=("hf_reader",)) as hub:
        done = run_script(hub, tmp_path, PUBLISH, *given)
        # The target itself, on a branch; what it depends on is there: it runs this test.
        command = ["make", "-C", ROOT, "-o", "setup", "publish", f"VENV={sys.prefix}"]
        command += [f"FOLDERS={' '.join(map(str, given))}", "OPTIONS=--revision next --collection others"]
        made = run_client(hub, tmp_path, command)
        run_script(hub, tmp_path, SNIPPETS, *(f"user/{name}:{kind[:-1]}" for name, kind in NAMES.items()))
    repositories = {name: hub.repository(f"user/{name}", kind) for name, kind in NAMES.items()}
    kept = [(f"{file['size']:,}", path) for x in repositories.values() for path, file in x.files().items()]
    shown = shown_files(done.stdout.partition("published")[0])
    assert shown == sorted(entry for entry in kept if entry[1] != ".gitattributes")
    for name, repository in repositories.items():
        files = repository.files()
        assert {"README.md", "LICENSE"} <= set(files) and b"Apache License" in repository.read("LICENSE")
        assert f'"user/{name}"'.encode() in repository.read("README.md")
        assert repository.files("next") == files and f"user/{name}: {hub.url}" in made.stdout
        assert len(repository.history()) == 2  # the first, and all of it in one; the same again is nothing new
        assert repository.private
    built = {path.relative_to(folders / "data").as_posix() for path in (folders / "data").rglob("*.*")}
    assert built <= set(repositories["state-tracking"].files())
    words = repositories["s5_generators-nplr-quick-seed0"]
    for file in ("model.safetensors", "results.json", "results.png"):
        assert words.read(file) == (folders / "words" / file).read_bytes()
    check_collections(hub)


def check_collections(hub):
    found = [json.loads(path.read_text()) for path in (hub.folder / "collections" / "user").iterdir()]
    assert {index["title"] for index in found} == {"mamba3_nplr", "others"}
    for index in found:
        assert index["private"] == (index["title"] == "mamba3_nplr")
        items = [(x["id"], x["type"]) for x in index["items"]]
        assert items == [(f"user/{name}", kind[:-1]) for name, kind in NAMES.items()]
        assert "final accuracy" in index["items"][0]["note"]["text"]
        assert index["items"][2]["note"]["text"] == "The tasks: z5, shell"


def test_a_dry_run_needs_no_token_and_no_network(folders, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("a dry run has used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_right")  # is not even looked at
    given = [str(folders / name) for name in ("words", "data")]
    publish.main([*given, "--dry_run"])
    shown = capsys.readouterr().out
    plans = [publish.plan(Path(folder), "OWNER") for folder in given]
    assert [plan.repo_id for plan in plans] == ["OWNER/s5_generators-nplr-quick-seed0", "OWNER/state-tracking"]
    assert "model OWNER/s5_generators-nplr-quick-seed0\n" in shown and "dataset OWNER/state-tracking\n" in shown
    assert "collection OWNER/mamba3_nplr" in shown and "--owner NAME" in shown
    sizes = [
        (f"{len(content if isinstance(content, bytes) else content.read_bytes()):,}", name)
        for plan in plans
        for name, content in plan.files.items()
    ]
    assert shown_files(shown) == sorted(sizes)
    publish.main([*given, "--dry_run", "--owner=me", "--collection="])
    named = capsys.readouterr().out
    assert "model me/s5_generators" in named and "OWNER" not in named and "collection" not in named


def test_a_name_is_for_one_folder(capsys):
    with pytest.raises(SystemExit):
        publish.main(["a", "b", "--name=c", "--owner=user"])
    assert "--name is for a single FOLDER" in capsys.readouterr().err


def test_the_licence_is_that_of_the_project():
    assert publish.licence() == (ROOT / "LICENSE").read_bytes()
