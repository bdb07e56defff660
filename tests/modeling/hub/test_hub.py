"""The Hub: datasets and models pushed and pulled with the real client, over HTTP, against a server on this machine."""

import json
import sys
import textwrap

import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HTTPError
from transformers.dynamic_module_utils import get_imports

from helpers.hub_client import FAULTS, READ_ONLY, TOKENS, run_client, run_script
from helpers.hub_server import HubServer
from helpers.places import TESTS
from helpers.training_program import PROGRAM
from helpers.without_package import other_packages
from mamba3_nplr.datasets_scripts.build import build
from mamba3_nplr.modeling.hub.code_export import source_files
from mamba3_nplr.modeling.hub.errors import clear_errors

DATASETS = textwrap.dedent(
    """
    import sys
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError, NonMatchingSplitsSizesError
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

    # Private ones look to others as if they were not there; every revision stays.
    api.create_repo("user/private", repo_type="dataset", private=True)
    first = api.upload_folder(repo_id="user/private", repo_type="dataset", folder_path=out).oid
    api.create_branch("user/private", repo_type="dataset", branch="next")
    gone = {"repo_id": "user/private", "repo_type": "dataset", "revision": "next"}
    api.delete_folder("shell", **gone)
    for token in (False, "hf_other"):
        for streaming in (False, True):
            try:
                load_dataset("user/private", "shell", token=token, streaming=streaming)
            except DatasetNotFoundError as error:
                assert "user/private" in str(error)
            else:
                raise AssertionError("read without the right to")
    reader = {"token": "hf_reader", "split": "test_standard"}
    for revision in ("main", first):
        for streaming in (False, True):
            options = {"revision": revision, "streaming": streaming, **reader}
            check(load_dataset("user/private", "shell", **options), "shell", "test_standard")
    try:
        load_dataset("user/private", "shell", revision="next", **reader)
    except NonMatchingSplitsSizesError:
        pass  # there the card still lists what has been deleted
    else:
        raise AssertionError("read what is in another revision")

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

FAULTY_DATASETS = FAULTS + textwrap.dedent(
    """
    import sys
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub import HfApi
    from mamba3_nplr import load_dataset as load_checked
    from pathlib import Path

    out, position, api = sys.argv[1], int(sys.argv[2]), HfApi()
    FILE = "z5/test_64-00000-of-00001.parquet"

    def rows(load=load_checked, name="z5", split="test_64", **options):
        return list(load("user/name", name, split=split, **options))

    def cached(pattern):
        return [path for path in Path(os.environ["HF_HOME"]).rglob(pattern) if path.exists()]

    for load in (load_dataset, load_checked):
        fails(lambda: rows(load, token="hf_wrong"), OSError, "user/name", "401", "Invalid credentials")
        fails(lambda: load("user/missing", "z5"), DatasetNotFoundError, "'user/missing' doesn't exist on the Hub")
    fails(lambda: rows(token="hf_wrong"), OSError, "user/name could not be loaded", "does not know the token")
    fails(lambda: rows(token="hf_wrong\\n"), OSError, "user/name could not be loaded", "line break")
    assert not cached("*.parquet")

    # What the libraries say themselves.
    faults(cut_downloads=1000)
    fails(lambda: rows(load_dataset), Exception, "closed connection")
    fails(lambda: rows(load_dataset, streaming=True), ConnectionError, "Disconnected")
    # What we say.
    fails(rows, ConnectionError, "user/name could not be loaded: the connection broke off", "load again")
    assert not cached("*.parquet") and not cached("*.incomplete") and not cached("*.arrow")
    faults()
    whole = rows()
    assert len(whole) == 6
    faults(cut_downloads=1)  # the clients try again by themselves
    assert rows(load_dataset, streaming=True) == whole
    faults(cut_downloads=1)
    assert rows(load_dataset, download_mode="force_redownload") == whole

    # A file that nobody can read.
    faults(damaged_downloads=1000)
    fails(lambda: rows(load_dataset, streaming=True), Exception, "corrupted")
    shell = {"name": "shell", "split": "test_standard"}
    refused = ("of user/name did not arrive as uploaded", "load again")
    fails(lambda: rows(load_dataset, **shell), DatasetGenerationError)
    faults()
    fails(lambda: rows(load_dataset, **shell), DatasetGenerationError)  # datasets keeps it
    fails(lambda: rows(**shell), OSError, "shell/test_standard-", *refused)
    assert len(rows(**shell)) == len(rows(load_dataset, **shell)) == 6
    faults(damaged_downloads=1000)
    fails(lambda: rows(download_mode="force_redownload"), OSError, FILE, *refused)
    assert not cached("z5/*.parquet") and cached("shell/*.parquet")
    faults()
    assert rows() == whole and rows(load_dataset) == whole

    # A file that can be read, and says something else.
    faults(damaged_downloads=1, position=position, path=FILE)
    wrong = rows(load_dataset, download_mode="force_redownload")
    assert len(wrong) == 6 and wrong != whole
    found = api.verify_repo_checksums("user/name", repo_type="dataset").mismatches  # as `hf cache verify`
    assert [mismatch["path"] for mismatch in found] == [FILE]
    fails(rows, OSError, f"{FILE} of user/name did not arrive as uploaded", "has been removed", "load again")
    assert rows() == whole and rows(load_dataset) == whole
    everything = load_checked("user/name", "z5")
    assert list(everything["test_64"]) == whole

    # Uploads: all or nothing.
    for kind, reason in (("cut_uploads", "disconnected"), ("damaged_uploads", "announced sha256")):
        repository = {"repo_id": f"user/{kind}", "repo_type": "dataset"}
        api.create_repo(**repository)
        faults(**{kind: 1000})
        try:
            api.upload_folder(**repository, folder_path=out)
        except RuntimeError as error:
            assert "Error while uploading" in str(error) and reason in str(error.__cause__), error
        else:
            raise AssertionError("should have failed")
        assert api.list_repo_files(**repository) == [".gitattributes"]
        faults()
        api.upload_folder(**repository, folder_path=out)
        assert set(api.list_repo_files(**repository)) == set(api.list_repo_files("user/name", repo_type="dataset"))
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
    from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification, pad_sequences
    from safetensors.torch import save_file
    from transformers import Trainer, TrainingArguments

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

    @torch.no_grad()
    def logits():
        return model.eval()(ids).logits

    expected = {"ids": ids, "user/model": logits(), "user/model2": logits()}
    # Trainer of transformers, with every checkpoint.
    arguments = {"max_steps": 2, "save_steps": 1, "push_to_hub": True, "hub_model_id": "user/plain"}
    arguments = TrainingArguments("plain", **arguments, hub_always_push=True, report_to="none", use_cpu=True)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=pad_sequences)
    trainer.train()
    trainer.push_to_hub()
    save_file(expected | {"user/plain": logits()}, "expected.safetensors")
    """
)

# Nor Triton, as where torch is made for processors only: transformers looks at the imports of all files.
WITHOUT_THE_PACKAGE = textwrap.dedent(
    """
    import sys
    from importlib.util import find_spec
    assert find_spec("mamba3_nplr") is None and find_spec("triton") is None
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    expected = load_file("expected.safetensors")
    for name in ("user/plain", "user/model", "user/model2"):
        model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True)
        with torch.no_grad():
            torch.testing.assert_close(model(expected["ids"]).logits, expected[name], rtol=0, atol=1e-5)
    model.push_to_hub("user/model3")
    assert not any(name.startswith("mamba3_nplr") for name in sys.modules)
    """
)

ACCESS = FAULTS + textwrap.dedent(
    """
    import torch
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification as Model
    from pathlib import Path
    from transformers import AutoModelForSequenceClassification, pipeline

    sizes = {"vocab_size": 11, "hidden_size": 12, "state_size": 6, "head_dim": 4, "num_rope_pairs": 2, "num_labels": 5}

    def make(seed):
        torch.manual_seed(seed)
        return Model(Mamba3NPLRConfig(**sizes))

    def load(name, **options):
        return Model.from_pretrained(name, **options)

    def same(a, b):
        return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())

    def cached(name):
        folder = Path(os.environ["HF_HOME"], "hub", "models--" + name.replace("/", "--"))
        found = [*folder.rglob("*.safetensors"), *folder.rglob("*.incomplete")]
        # Large files are named by their sha256.
        return found + [path for path in folder.rglob("blobs/*") if len(path.name) == 64]

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
    wrong = {"token": "hf_wrong", "cache_dir": "wrong"}
    fails(lambda: load("user/public", **wrong), OSError, "user/public could not be loaded", "token", "hf auth login")
    auto = AutoModelForSequenceClassification.from_pretrained
    fails(lambda: auto("user/public", **wrong), OSError, "user/public", "401", "Invalid credentials")
    fails(lambda: load("user/public", token="hf_wrong\\n"), OSError, "user/public could not be loaded", "line break")
    assert not list(Path("wrong").rglob("*.json"))
    assert same(load("user/public", token="hf_other", cache_dir="other"), first)
    assert same(load("user/private", token="hf_reader", cache_dir="other"), first)
    for token in ("hf_other", "hf_reader"):
        refused = ("403", "user/public could not be pushed: the token does not allow it", "hf auth login")
        fails(lambda: second.push_to_hub("user/public", token=token), HfHubHTTPError, *refused)
    fails(lambda: second.push_to_hub("other/new"), HfHubHTTPError, "403", "other/new could not be pushed")
    for token in ("hf_wrong", "hf_wrong\\n", False):
        for name in ("user/public", "user/never"):
            refused = (f"{name} could not be pushed: ", "the token", "hf auth login")
            fails(lambda: second.push_to_hub(name, token=token), OSError, *refused)
            to_hub = {"push_to_hub": True, "repo_id": name, "token": token}
            fails(lambda: second.save_pretrained("folder", **to_hub), OSError, *refused)
    assert same(load("user/public", cache_dir="after"), first) and not api.repo_exists("user/never")

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
    for kind, reason in (("cut_uploads", "the connection broke off"), ("damaged_uploads", "announced sha256")):
        faults(**{kind: 1000})
        for name in ("user/cut", "user/new"):
            fails(lambda: second.push_to_hub(name), OSError, f"{name} could not be pushed: ", reason)
            to_hub = {"push_to_hub": True, "repo_id": name}
            fails(lambda: second.save_pretrained("folder", **to_hub), OSError, f"{name} could not be pushed: ", reason)
        assert api.list_repo_commits("user/cut") == before and same(load("user/cut", cache_dir=kind), first)
        assert api.list_repo_files("user/new") == [".gitattributes"]
    faults(cut_uploads=1000)
    fails(lambda: second.push_to_hub("user/cut"), ConnectionError, "all of this push or nothing; push again")
    faults()
    second.push_to_hub("user/new")
    faults(cut_uploads=1)  # the client tries again by itself
    second.push_to_hub("user/cut")
    assert len(api.list_repo_commits("user/cut")) == len(before) + 1
    faults(cut_answers=1000)  # the commit is there, but the client never hears of it
    fails(lambda: first.push_to_hub("user/cut"), ConnectionError, "user/cut", "all of this push or nothing; push again")
    faults()
    first.push_to_hub("user/cut")  # there is nothing left to do
    second.push_to_hub("user/cut")
    assert len(api.list_repo_commits("user/cut")) == len(before) + 3

    auto = AutoModelForSequenceClassification.from_pretrained
    faults(cut_downloads=1000)
    for loader in (load, auto, lambda name: auto(name, trust_remote_code=True)):
        fails(lambda: loader("user/cut"), ConnectionError, "user/cut could not be loaded: the connection broke off",
              "load again")
        assert not cached("user/cut")
    fails(lambda: pipeline("state-tracking", model="user/cut"), ValueError, "user/cut could not be loaded: the connec")
    assert not cached("user/cut")
    faults()
    assert same(load("user/cut"), second)
    faults(cut_downloads=1)
    assert same(load("user/new"), second) and cached("user/new")

    first.push_to_hub("user/damaged")
    for position in (-1, 0):  # in the weights, and in what says where they are
        for loader in (load, auto):
            faults(damaged_downloads=1, position=position)
            refused = ("model.safetensors of user/damaged", "checksum", "load again")
            fails(lambda: loader("user/damaged"), OSError, *refused)
            assert not cached("user/damaged")
    api.create_tag("user/damaged", tag="v1")
    second.push_to_hub("user/damaged")
    options = {"revision": "v1", "cache_dir": "elsewhere"}
    faults(damaged_downloads=1)
    fails(lambda: load("user/damaged", **options), OSError, "model.safetensors of user/damaged", "load again")
    assert same(load("user/damaged", **options), first) and same(load("user/damaged"), second)
    """
)

TRAINING = FAULTS + textwrap.dedent(
    """
    import contextlib, io, sys
    from pathlib import Path

    sys.path[:0] = sys.argv[1].split(":")
    from huggingface_hub import HfApi
    from mamba3_nplr.publish import main as publish
    from helpers.training_program import WORDS, load_program

    program = load_program()
    push = [*WORDS, "--push_to_hub"]

    def stops(code, *options):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                program.main([*push, *options])
            except SystemExit as stop:
                assert stop.code == code, said.getvalue()
            else:
                raise AssertionError("should have stopped")
        print(said.getvalue(), file=sys.stderr)
        return said.getvalue()

    for token in ("hf_wrong", "hf_wrong\\n"):
        said = stops(2, "--output_dir=never", "--hub_model_id=user/never", f"--hub_token={token}")
        assert "user/never could not be made: the token" in said.replace("the Hub does not know ", "")
    assert "other/never could not be made: the token" in stops(2, "--output_dir=never", "--hub_model_id=other/never")
    assert not list(Path("never").iterdir())  # refused before training
    said = stops(2, "--output_dir=never", "--hub_model_id=user/never", "--hub_strategy=checkpoint")
    assert "optimizer" in said and not list(Path("never").iterdir())
    program.main([*push, "--output_dir=run", "--hub_model_id=user/trained", "--hub_token=hf_right"])
    program.main(["evaluate", "user/trained", "--out=found.json"])
    found, results = (json.loads(Path(name).read_text()) for name in ("found.json", "run/results.json"))
    assert found["results"] == results["results"]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        program.main(["evaluate", "user/nosuch"])
    assert "user/nosuch is neither a folder here nor a repository that the Hub shows" in said.getvalue()

    # Uploads that fail do not end the training, and nothing is lost.
    faults(cut_uploads=1000)
    said = stops(1, "--output_dir=cut", "--hub_model_id=user/cut", "--hub_revision=side", "--hub_private_repo=true")
    for step in (3, 6, 8):
        assert f"cut/checkpoint-{step} could not be uploaded: user/cut could not be uploaded: the connection" in said
    advice = "python -m mamba3_nplr.publish cut --owner user --name cut --revision side"
    assert "The run is finished and in cut" in said and said.strip().endswith(advice), said
    assert HfApi().list_repo_files("user/cut", revision="side") == [".gitattributes"]
    faults()
    publish([*advice.split()[3:], "--allow_uncommitted"])
    whole = set(HfApi().list_repo_files("user/trained"))
    assert set(HfApi().list_repo_files("user/cut", revision="side")) == whole
    program.main([*push, "--output_dir=again", "--hub_model_id=user/cut", "--hub_revision=other", "--hub_strategy=end"])
    assert set(HfApi().list_repo_files("user/cut", revision="other")) == whole
    assert len(HfApi().list_repo_commits("user/cut", revision="other")) == 2
    assert HfApi().list_repo_files("user/cut") == [".gitattributes"] and HfApi().model_info("user/cut").private
    """
)


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", TOKENS, READ_ONLY) as server:
        yield server


@pytest.fixture
def run(hub, tmp_path):
    return lambda script, *arguments: run_script(hub, tmp_path, script, *arguments)


def readable_but_wrong(path):
    """A byte in which a Parquet file can be damaged so that it still reads, as something else."""
    content, rows = path.read_bytes(), pq.read_table(path).to_pylist()
    other = path.with_suffix(".damaged")
    for position in range(len(content)):
        other.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            found = pq.read_table(other).to_pylist()
        except Exception:  # of any kind: they come from the decoder of what was hit
            continue
        if found != rows and len(found) == len(rows) and found[0].keys() == rows[0].keys():
            other.unlink()
            return position
    raise AssertionError("every damage is seen")


def contents(hub):
    """Every file the server keeps, to the byte."""
    return {path: path.read_bytes() for path in hub.folder.rglob("*") if path.is_file()}


def test_an_error_that_is_being_handled_is_not_the_reason_of_the_next():
    try:
        raise HTTPError("cut")
    except HTTPError:
        with pytest.raises(OSError, match="^other$"), clear_errors("user/name", "loaded", "Again."):
            raise OSError("other")  # noqa: B904
    message = "user/name could not be loaded: the connection broke off .cut.. Again."
    with pytest.raises(ConnectionError, match=message), clear_errors("user/name", "loaded", "Again."):
        raise OSError("other") from HTTPError("cut")


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
    run(REFUSED_DATASETS, out)
    assert contents(hub) == before
    run(FAULTY_DATASETS, out, readable_but_wrong(out / "z5" / "test_64-00000-of-00001.parquet"))
    assert not list(hub.folder.rglob("*.part"))


def test_models(hub, run, tmp_path):
    run(MODELS)
    assert {path.name for path in (hub.folder / "models" / "user").iterdir()} == {"model", "model2", "shards", "plain"}
    titles = [commit["title"] for commit in hub.repository("user/plain").history()]
    assert titles == ["End of training", *(f"Training in progress, step {i}" for i in (2, 1)), "initial commit"]
    packages = other_packages(tmp_path.with_name(f"{tmp_path.name}_packages"), "triton")
    command = [sys.executable, "-S", "-c", WITHOUT_THE_PACKAGE]
    run_client(hub, tmp_path, command, PYTHONPATH=str(packages))
    shards = {path.name for path in (tmp_path / "shards").glob("*.safetensors")}
    assert len(shards) > 1 and shards <= set(hub.repository("user/shards").files())
    saved = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir() if path.name != "README.md"}
    assert {"model.safetensors", "config.json", "modeling_mamba3_nplr.py"} <= set(saved)
    assert json.loads(saved["config.json"])["auto_map"]
    for name in ("user/model", "user/model2", "user/model3"):
        repository = hub.repository(name)
        assert set(repository.files()) == set(saved) | {".gitattributes", "README.md"}
        assert {path: repository.read(path) for path in saved} == saved, name


def test_the_code_of_checkpoints_needs_nothing_but_what_the_models_need(tmp_path):
    """As transformers sees it: whatever is imported anywhere outside of a `try`."""
    needed = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"}
    for family in ("mamba3_nplr", "delta_family", "ids4"):
        for name, source in source_files(f"mamba3_nplr.modeling.modeling_{family}").items():
            (tmp_path / f"{family}_{name}").write_text(source)
    for path in tmp_path.iterdir():
        assert set(get_imports(path)) <= needed | sys.stdlib_module_names, path.name


def test_access_and_revisions(run):
    run(PRIVATE)


def test_cut_connections_and_damaged_files(hub, run):
    run(CUT)
    assert not list(hub.folder.rglob("*.part"))


def test_a_finished_run_is_uploaded_and_evaluated(hub, run, tmp_path):
    run(TRAINING, ":".join([str(TESTS), *filter(None, sys.path)]))
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
    # Where the Hub cannot be reached, what was downloaded is taken, and anything else refused after one attempt.
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home0")}
    evaluate = [sys.executable, PROGRAM, "evaluate"]
    found = run_client(hub, tmp_path, [*evaluate, "user/trained"], **gone)
    assert "| test_8 |" in found.stdout and "Retrying" not in found.stderr
    refused = run_client(hub, tmp_path, [*evaluate, "user/nosuch"], code=2, **gone)
    assert "user/nosuch is neither a folder here nor in the cache" in refused.stderr
    assert "Retrying" not in refused.stderr
