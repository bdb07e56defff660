"""The Hub: datasets and models pushed and pulled with the real client, over HTTP, against a server on this machine."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hub_server import HubServer
from mamba3_nplr.datasets_scripts.build import build
from without_package import BLOCKER

TOKEN = "hf_right"

DATASETS = textwrap.dedent(
    """
    import sys
    from datasets import load_dataset
    from huggingface_hub import HfApi, create_repo
    from mamba3_nplr.datasets_scripts.tasks import make_task

    out, api = sys.argv[1], HfApi()
    create_repo("user/name", repo_type="dataset")
    api.upload_folder(repo_id="user/name", repo_type="dataset", folder_path=out)

    def check(rows, name, split):
        made = make_task(name, test_size=6).rows(split, 0, 6)
        rows = list(rows)
        assert len(rows) == 6
        for i, row in enumerate(rows):
            assert set(row) <= set(made)
            assert all(value == made[column][i].tolist() for column, value in row.items()), (name, split, i)

    for name, split in (("z5", "test_64"), ("shell", "test_standard")):
        whole = load_dataset("user/name", name, split=split)
        assert whole.features == load_dataset(out, name, split=split).features
        check(whole, name, split)
        check(load_dataset("user/name", name, split=split, streaming=True), name, split)
    assert len(load_dataset("user/name", "z5", split="train")) == 20

    local = load_dataset(out, "z5", split="validation")
    create_repo("user/changed", repo_type="dataset")
    api.upload_folder(repo_id="user/changed", repo_type="dataset", folder_path=out)
    local.push_to_hub("user/changed", config_name="z5", split="validation")  # the other splits stay
    check(load_dataset("user/changed", "z5", split="test_64"), "z5", "test_64")
    check(load_dataset("user/changed", "z5", split="validation"), "z5", "validation")
    for _ in range(2):  # the second push replaces the first
        local.push_to_hub("user/other", config_name="z5")
        again = load_dataset("user/other", "z5", split="validation")
        check(again, "z5", "validation")
        assert again.features == local.features
    """
)

FAULTY_DATASETS = textwrap.dedent(
    """
    import json, os, time, urllib.request
    from datasets import load_dataset

    time.sleep = lambda seconds: None  # between the client's attempts

    def faults(**kinds):
        data = json.dumps(kinds).encode()
        urllib.request.urlopen(urllib.request.Request(os.environ["HF_ENDPOINT"] + "/faults", data, method="POST"))

    def rows(**options):
        return list(load_dataset("user/name", "z5", split="test_64", **options))

    def fails(text, **options):
        try:
            rows(**options)
        except Exception as error:
            assert text in f"{error} {error.__cause__} {error.__context__}", error
        else:
            raise AssertionError("should have failed")

    faults(cut_downloads=1000)
    fails("closed connection")
    fails("Disconnected", streaming=True)
    faults(cut_downloads=1)  # the clients try again by themselves
    whole = rows(streaming=True)
    faults(cut_downloads=1)
    assert rows() == whole and len(whole) == 6
    faults(damaged_downloads=1000)
    fails("corrupted", streaming=True)
    fails("corrupted", download_mode="force_redownload")
    faults()
    assert rows(streaming=True) == whole and rows(download_mode="force_redownload") == whole
    """
)

REFUSED = textwrap.dedent(
    """
    import sys
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    def refused(push):
        try:
            push()
        except HfHubHTTPError as error:
            assert error.response.status_code == 401, error
            assert "Invalid credentials" in str(error) or "Invalid username" in str(error), error
        else:
            raise AssertionError("pushed without the right to")
    """
)

REFUSED_DATASETS = REFUSED + textwrap.dedent(
    """
    from datasets import load_dataset

    local = load_dataset(sys.argv[1], "z5", split="validation")
    for token in ("hf_wrong", False):
        for name in ("user/name", "user/never"):
            folder = {"repo_id": name, "repo_type": "dataset", "folder_path": sys.argv[1], "path_in_repo": "sub"}
            refused(lambda: HfApi(token=token).create_repo(name, repo_type="dataset"))
            if name == "user/name":
                refused(lambda: HfApi(token=token).upload_folder(**folder))
            refused(lambda: local.push_to_hub(name, config_name="z5", token=token))
    """
)

MODELS = REFUSED + textwrap.dedent(
    """
    import torch
    from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification
    from safetensors.torch import save_file

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "state_size": 6, "head_dim": 4}
    model = Mamba3NPLRForSequenceClassification(Mamba3NPLRConfig(**sizes, num_rope_pairs=2, num_labels=5)).eval()
    refused(lambda: model.push_to_hub("user/never", token="hf_wrong"))
    refused(lambda: model.save_pretrained("kept", push_to_hub=True, repo_id="user/never", token="hf_wrong"))
    model.push_to_hub("user/model")
    model.save_pretrained("folder", push_to_hub=True, repo_id="user/model2")
    model.save_pretrained("shards", push_to_hub=True, repo_id="user/shards", max_shard_size="5KB")
    refused(lambda: model.push_to_hub("user/model", token="hf_wrong"))
    ids = torch.randint(0, 11, (3, 9))
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, "expected.safetensors")
    """
)

WITHOUT_THE_PACKAGE = BLOCKER + textwrap.dedent(
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    expected = load_file("expected.safetensors")
    for name in ("user/model", "user/model2"):
        model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(expected["ids"]).logits, expected["logits"]), name
    model.push_to_hub("user/model3")
    assert not any(name.startswith("mamba3_nplr") for name in sys.modules)
    """
)

ACCESS = textwrap.dedent(
    """
    import json, os, time, urllib.request
    import torch
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification as Model
    from pathlib import Path

    time.sleep = lambda seconds: None  # between the client's attempts
    sizes = {"vocab_size": 11, "hidden_size": 12, "state_size": 6, "head_dim": 4, "num_rope_pairs": 2, "num_labels": 5}

    def make(seed):
        torch.manual_seed(seed)
        return Model(Mamba3NPLRConfig(**sizes))

    def load(name, **options):
        return Model.from_pretrained(name, **options)

    def same(a, b):
        return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())

    def fails(action, kinds, *texts):
        try:
            action()
        except kinds as error:
            chain = f"{error} {error.__cause__} {error.__context__}"
            assert all(text in chain for text in texts), chain
        else:
            raise AssertionError("should have failed")

    def faults(**kinds):
        data = json.dumps(kinds).encode()
        urllib.request.urlopen(urllib.request.Request(os.environ["HF_ENDPOINT"] + "/faults", data, method="POST"))

    def cached(name):
        folder = Path(os.environ["HF_HOME"], "hub", "models--" + name.replace("/", "--"))
        return [path for path in folder.rglob("*.safetensors") if path.exists()]

    api, first, second = HfApi(), make(1), make(2)
    """
)

PRIVATE = ACCESS + textwrap.dedent(
    """
    first.push_to_hub("user/private", private=True)
    first.push_to_hub("user/public")
    assert same(load("user/private"), first)
    # A private repository looks like one that is not there, to everyone else; what is in the cache is not asked for.
    for name in ("user/private", "user/missing"):
        for token in (False, "hf_other"):
            fails(lambda: load(name, token=token, cache_dir="other"), OSError, name, "private repository", "token")
            fails(lambda: HfApi(token=token).model_info(name), RepositoryNotFoundError)
    fails(lambda: load("user/public", token="hf_wrong", cache_dir="other"), (OSError, HfHubHTTPError), "401")
    assert same(load("user/public", token="hf_other", cache_dir="other"), first)
    assert same(load("user/private", token="hf_reader", cache_dir="other"), first)
    for token in ("hf_other", "hf_reader"):
        fails(lambda: second.push_to_hub("user/public", token=token), HfHubHTTPError, "403")
    fails(lambda: second.push_to_hub("other/new"), HfHubHTTPError, "403", "other")

    start = api.model_info("user/public").sha
    api.create_tag("user/public", tag="v1")
    api.create_branch("user/public", branch="next")
    second.push_to_hub("user/public", revision="next")
    assert same(load("user/public"), first) and same(load("user/public", revision="next"), second)
    second.push_to_hub("user/public", commit_message="second")
    assert same(load("user/public"), second)
    assert same(load("user/public", revision="v1"), first) and same(load("user/public", revision=start), first)
    assert [commit.title for commit in api.list_repo_commits("user/public")][0] == "second"
    fails(lambda: load("user/public", revision="v2"), OSError, "v2")
    file = {"path_or_fileobj": b"", "path_in_repo": "file", "repo_id": "user/public"}
    fails(lambda: api.upload_file(**file, revision="v2"), RevisionNotFoundError)
    """
)

CUT = ACCESS + textwrap.dedent(
    """
    first.push_to_hub("user/cut")
    before = api.list_repo_commits("user/cut")
    faults(cut_uploads=1000)
    fails(lambda: second.push_to_hub("user/cut"), RuntimeError, "model.safetensors")
    assert api.list_repo_commits("user/cut") == before and same(load("user/cut", cache_dir="one"), first)
    faults(cut_uploads=1)  # the client tries again by itself
    second.push_to_hub("user/cut")
    assert len(api.list_repo_commits("user/cut")) == len(before) + 1

    faults(cut_downloads=1000)
    fails(lambda: load("user/cut"), Exception, "")
    assert not cached("user/cut")
    faults(cut_downloads=1)
    assert same(load("user/cut"), second) and cached("user/cut")

    faults(damaged_downloads=1)
    first.push_to_hub("user/damaged")
    fails(lambda: load("user/damaged"), OSError, "model.safetensors of user/damaged", "checksum", "load again")
    assert not cached("user/damaged")
    assert same(load("user/damaged"), first)
    """
)

TRAINING = textwrap.dedent(
    """
    import json
    import sys
    from pathlib import Path

    sys.path[:0] = sys.argv[1].split(":")
    from training_program import WORDS, load_program

    program = load_program()
    push = [*WORDS, "--push_to_hub"]
    try:
        program.main([*push, "--output_dir=never", "--hub_model_id=user/never", "--hub_token=hf_wrong"])
    except SystemExit as stop:
        assert stop.code == 2
    assert not list(Path("never").glob("checkpoint-*"))  # refused before training
    try:
        program.main([*push, "--output_dir=never", "--hub_model_id=user/never", "--hub_strategy=checkpoint"])
    except SystemExit as stop:
        assert stop.code == 2
    assert not Path("never").exists()
    program.main([*push, "--output_dir=run", "--hub_model_id=user/trained"])
    program.main(["evaluate", "user/trained", "--out=found.json"])
    found, results = (json.loads(Path(name).read_text()) for name in ("found.json", "run/results.json"))
    assert found["results"] == results["results"]
    assert not any("hf_right" in path.read_text() for path in Path("run").rglob("*.json"))
    """
)


@pytest.fixture
def hub(tmp_path):
    tokens = {TOKEN: "user", "hf_reader": "user", "hf_other": "other"}
    with HubServer(tmp_path / "hub", tokens, read_only=("hf_reader",)) as server:
        yield server


@pytest.fixture
def run(hub, tmp_path):
    """Runs a script in a process that knows no other Hub, with a home of its own each time."""

    def run_script(script, *arguments):
        home = tmp_path / f"home{len(list(tmp_path.glob('home*')))}"
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", script, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run_script


def contents(hub):
    """Every file the server keeps, to the byte."""
    return {path: path.read_bytes() for path in hub.folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("small_test_sets")
def test_datasets(hub, run, tmp_path):
    out = tmp_path / "out"
    build(out, train_size=20, names=["z5", "shell"])
    run(DATASETS, out)
    uploaded = hub.repository("user/name", "datasets")
    built = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path: uploaded.read(path) for path in uploaded.files()}.items() >= built.items()
    pushed = hub.repository("user/other", "datasets").files()
    assert set(pushed) == {".gitattributes", "README.md", "z5/validation-00000-of-00001.parquet"}
    before = contents(hub)
    run(FAULTY_DATASETS)
    run(REFUSED_DATASETS, out)
    assert contents(hub) == before


def test_models(hub, run, tmp_path):
    run(MODELS)
    assert {path.name for path in (hub.folder / "models" / "user").iterdir()} == {"model", "model2", "shards"}
    run(WITHOUT_THE_PACKAGE)
    shards = {path.name for path in (tmp_path / "shards").glob("*.safetensors")}
    assert len(shards) > 1 and shards <= set(hub.repository("user/shards").files())
    saved = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir() if path.name != "README.md"}
    assert {"model.safetensors", "config.json", "modeling_mamba3_nplr.py"} <= set(saved)
    assert json.loads(saved["config.json"])["auto_map"]
    for name in ("user/model", "user/model2", "user/model3"):
        repository = hub.repository(name)
        assert set(repository.files()) == set(saved) | {".gitattributes", "README.md"}
        assert {path: repository.read(path) for path in saved} == saved, name


def test_access_and_revisions(run):
    run(PRIVATE)


def test_cut_connections_and_damaged_files(hub, run):
    run(CUT)
    assert not list(hub.folder.rglob("*.part"))


def test_a_finished_run_is_uploaded(hub, run, tmp_path):
    run(TRAINING, ":".join([str(Path(__file__).parent), *filter(None, sys.path)]))
    repository = hub.repository("user/trained")
    names = set(repository.files())
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "modeling_mamba3_nplr.py",
        "results.json",
        "run.json",
    } <= names
    kinds = (".md", ".json", ".py", ".safetensors", ".gitattributes", ".png", "LICENSE")
    assert all("/" not in name and name.endswith(kinds) for name in names)
    titles = [commit["title"] for commit in repository.history()]
    assert titles == ["nplr on s5_generators", "Step 8", "Step 6", "Step 3", "initial commit"]
    for name in ("README.md", "model.safetensors", "results.json", "results.png"):
        assert repository.read(name) == (tmp_path / "run" / name).read_bytes()
    assert b"model-index" in repository.read("README.md") and b'"user/trained"' in repository.read("README.md")
