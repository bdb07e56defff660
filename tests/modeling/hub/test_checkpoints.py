"""Checkpoints: bit-equal round trips, through every Auto class, with and without this package."""

import filecmp
import json
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from helpers.family_cases import build_case
from helpers.model_cases import OPTIONS, build, small_config
from helpers.scan_cases import error
from helpers.without_package import BLOCKER
from mamba3_nplr import (
    AutoModelForBehaviorCloning,
    Mamba3NPLRConfig,
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
    Mamba3NPLRModel,
)
from mamba3_nplr.modeling.families import HEADS
from mamba3_nplr.modeling.hub import self_contained
from mamba3_nplr.modeling.hub.folder_lock import only_writer

AUTO_CLASSES = {
    "AutoModel": (AutoModel, Mamba3NPLRModel),
    "AutoModelForSequenceClassification": (AutoModelForSequenceClassification, Mamba3NPLRForSequenceClassification),
    "AutoModelForTokenClassification": (AutoModelForTokenClassification, Mamba3NPLRForTokenClassification),
    "AutoModelForBehaviorCloning": (AutoModelForBehaviorCloning, Mamba3NPLRForBehaviorCloning),
}
OBSERVATIONS = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IDS = torch.tensor([[1, 5, 3, 2, 9, 9, 0], [4, 4, 1, 7, 10, 2, 6]])

WITHOUT_THE_PACKAGE = BLOCKER + textwrap.dedent(
    """
    from pathlib import Path
    import torch
    import transformers
    from safetensors.torch import load_file

    # As in scan_cases, which needs the package.
    def error(found, expected):
        return (found - expected).abs().max() / expected.square().mean().sqrt()

    for folder in sorted(Path(sys.argv[1]).iterdir()):
        auto, inputs = folder.name.partition("_")[0], load_file(folder / "inputs.safetensors")
        expected = inputs.pop("expected")
        # There is no Auto class for policies in transformers: AutoModel loads them.
        auto_class = getattr(transformers, auto, transformers.AutoModel)
        model = auto_class.from_pretrained(folder / f"checkpoint_{folder.name}", trust_remote_code=True)
        with torch.no_grad():
            found = model(**inputs)[0]
        # Weights that were read lie at other addresses than those that were made: some matrix products round by that.
        assert error(found, expected) < 1e-10, (folder.name, error(found, expected))
        model.save_pretrained(folder / "again")
        if "Behavior" in auto:
            model.select_action(inputs["observations"][:, 0])
        print(folder.name, type(model).__name__, type(model).__module__.partition(".")[0])
    # The code of one checkpoint loads beside that of another, and again if it has changed.
    scan = folder / f"checkpoint_{folder.name}" / "mamba3_nplr_scan.py"
    source = scan.read_text()
    scan.write_text(source + "# changed")
    model = auto_class.from_pretrained(scan.parent, trust_remote_code=True)
    with torch.no_grad():
        assert error(model(**inputs)[0], expected) < 1e-10
    scan.write_text(source)
    assert not any(name.startswith("mamba3_nplr") for name in sys.modules)
    """
)


@pytest.mark.parametrize("auto", AUTO_CLASSES)
@torch.no_grad()
def test_round_trip_through_the_auto_classes(auto, tmp_path):
    auto_class, model_class = AUTO_CLASSES[auto]
    model = build(model_class)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is Mamba3NPLRConfig
    for loaded in (auto_class.from_pretrained(tmp_path), model_class.from_pretrained(tmp_path)):
        assert type(loaded) is model_class
        inputs = {"observations": OBSERVATIONS} if "Behavior" in auto else {"input_ids": IDS}
        assert error(loaded(**inputs)[0], model(**inputs)[0]) < 1e-10
    assert type(auto_class.from_config(model.config)) is model_class


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_survives_a_round_trip(option, tmp_path):
    model = build(Mamba3NPLRModel, option, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = Mamba3NPLRModel.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in loaded.state_dict().items())


def checkpoints_to_load() -> dict:
    """Models of all families by the name of the Auto class that loads them and their own kind."""
    models = {}
    for auto, (_, kind) in AUTO_CLASSES.items():
        models[f"{auto}_nplr"] = build(kind, "learned_state")
    heads = dict(zip(AUTO_CLASSES, HEADS, strict=True))
    for case in ("gdp_everything", "ids4"):
        models |= {f"{auto}_{case}": build_case(case, head) for auto, head in heads.items()}
    return models


def test_checkpoints_load_where_the_package_is_not(tmp_path):
    models = checkpoints_to_load()
    for name, model in models.items():
        folder = tmp_path / "saved" / name
        # transformers names the code of a local folder after the folder alone, so each needs a name of its own.
        model.save_pretrained(folder / f"checkpoint_{name}")
        inputs = {"observations": OBSERVATIONS} if "Behavior" in name else {"input_ids": IDS}
        with torch.no_grad():
            save_file(inputs | {"expected": model(**inputs)[0].contiguous()}, folder / "inputs.safetensors")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        word for name in sorted(models) for word in (name, type(models[name]).__name__, "transformers_modules")
    ]
    for name in models:
        first, again = (tmp_path / "saved" / name / folder for folder in (f"checkpoint_{name}", "again"))
        names = sorted(path.name for path in first.iterdir())
        assert names == sorted(path.name for path in again.iterdir())
        assert filecmp.cmpfiles(first, again, names, shallow=False)[1:] == ([], [])


def test_a_checkpoint_holds_weights_configuration_and_flat_code_only(tmp_path):
    build(Mamba3NPLRForBehaviorCloning).save_pretrained(tmp_path)
    suffixes = {path.suffix for path in tmp_path.iterdir()}
    assert suffixes == {".safetensors", ".json", ".py"}
    for path in tmp_path.glob("*.py"):
        assert not re.search(r"^\s*from \.\.", path.read_text(), re.MULTILINE)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == auto_map["AutoModelForBehaviorCloning"]
    for entry in auto_map.values():
        module, name = entry.split(".")
        assert f"class {name}(" in (tmp_path / f"{module}.py").read_text()


def test_a_base_model_loads_from_a_head(tmp_path):
    model = build(Mamba3NPLRForBehaviorCloning)
    model.save_pretrained(tmp_path)
    base = Mamba3NPLRModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.model(observations=OBSERVATIONS).last_hidden_state
        assert error(base(observations=OBSERVATIONS).last_hidden_state, expected) < 1e-10


def test_large_models_are_sharded(tmp_path):
    model = build(Mamba3NPLRModel, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = Mamba3NPLRModel.from_pretrained(tmp_path)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_weights_of_a_checkpoint_carry_the_names_of_the_contract(tmp_path):
    build(Mamba3NPLRModel, dtype=torch.float32).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"layers.0.mixer.in_proj.weight", "layers.1.mixer.k_proj.weight", "layers.0.mixer.B_norm.weight"} <= set(
        names
    )


def test_registering_for_an_auto_class_leaves_the_checkpoint_as_it_is(tmp_path):
    Mamba3NPLRConfig.register_for_auto_class()
    Mamba3NPLRModel.register_for_auto_class("AutoModel")
    build(Mamba3NPLRModel).save_pretrained(tmp_path / "after")
    assert Mamba3NPLRConfig._auto_class is None and Mamba3NPLRModel._auto_class is None


def test_only_the_main_process_writes(tmp_path):
    build(Mamba3NPLRModel).save_pretrained(tmp_path / "folder", is_main_process=False)
    assert not list((tmp_path / "folder").glob("*.py")) and not list((tmp_path / "folder").glob("config.json"))


def test_a_class_made_up_by_a_wrapper_saves_what_it_stands_for(tmp_path):
    """As FSDP does it: another base, another name, in a module that does not hold it."""
    model = Mamba3NPLRForSequenceClassification(small_config())
    model.save_pretrained(tmp_path / "plain")
    made_up = {"__module__": "torch.nn.modules.linear"}
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model), torch.nn.Module), made_up)
    model.save_pretrained(tmp_path / "wrapped")
    compared = filecmp.dircmp(tmp_path / "plain", tmp_path / "wrapped")
    assert not compared.diff_files and not compared.left_only and not compared.right_only


def assert_same_files(first, second):
    names = sorted(path.name for path in Path(first).iterdir())
    assert names == sorted(path.name for path in Path(second).iterdir())
    assert filecmp.cmpfiles(first, second, names, shallow=False)[1:] == ([], [])


def test_what_someone_else_wrote_into_the_folder_stays(tmp_path):
    """Whatever it is called, unless it is called after a family of models."""
    sources = [*Path(self_contained.__file__).parents[1].rglob("*.py"), Path("train.py"), Path("utils.py")]
    mine = [tmp_path / path.name for path in sources if not path.stem.startswith(("modeling_", "configuration_"))]
    assert tmp_path / "losses.py" in mine and tmp_path / "heads.py" in mine
    for path in mine:
        path.write_text("mine")
    model = build(Mamba3NPLRModel)
    for _ in range(2):
        model.save_pretrained(tmp_path)
        assert all(path.read_text() == "mine" for path in mine)


def test_code_of_a_newer_version_takes_the_place_of_an_older_one(tmp_path, monkeypatch):
    model = build(Mamba3NPLRModel)
    model.save_pretrained(tmp_path / "new")
    entries = Mamba3NPLRModel.__module__, Mamba3NPLRConfig.__module__
    older = {name: f"older = {name!r}" for name in self_contained.source_files(*entries)}
    with monkeypatch.context() as patch:
        patch.setattr(self_contained, "source_files", lambda *modules: older)
        model.save_pretrained(tmp_path / "old")
    assert (tmp_path / "old" / "mamba3_nplr_modeling.py").read_text().startswith("older")
    model.save_pretrained(tmp_path / "old")
    assert_same_files(tmp_path / "old", tmp_path / "new")


def test_several_threads_may_save_one_model(tmp_path):
    model = build(Mamba3NPLRForSequenceClassification, dtype=torch.float32)
    model.save_pretrained(tmp_path / "alone")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            folders = [tmp_path / f"number{i}" for i in range(8)] + [tmp_path / "one"] * 8
            list(pool.map(model.save_pretrained, folders))
    finally:
        sys.setswitchinterval(interval)
    for folder in set(folders):
        assert_same_files(folder, tmp_path / "alone")
    assert not hasattr(model.config, "custom_pipelines")


def test_a_save_waits_for_another_into_the_same_folder(tmp_path):
    model = build(Mamba3NPLRModel)
    with ThreadPoolExecutor(1) as pool:
        with only_writer(tmp_path / "one"):
            waiting = pool.submit(model.save_pretrained, tmp_path / "one")
            model.save_pretrained(tmp_path / "other")
            assert not waiting.done() and not list((tmp_path / "one").iterdir())
        waiting.result()
    assert_same_files(tmp_path / "one", tmp_path / "other")
