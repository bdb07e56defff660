"""The package as installed: quiet and light to import, complete as a wheel, with no generic names."""

import inspect
import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import pytest

from helpers.places import ROOT
from mamba3_nplr.modeling.families import FAMILIES, HEADS, load

LIGHT = """
import sys, warnings
warnings.simplefilter("error")
import torch, transformers
before = set(sys.modules)
import mamba3_nplr
new = {name for name in set(sys.modules) - before if not name.startswith("mamba3_nplr")}
heavy = {"transformers.modeling_utils", "transformers.models.auto.modeling_auto", "triton", "datasets", "accelerate"}
heavy |= {"transformers.pipelines"}
assert not new & heavy, new & heavy
assert not torch.cuda.is_initialized()
"""

REGISTERS = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CONFIG_MAPPING
names = set(CONFIG_MAPPING.keys())
mamba2 = CONFIG_MAPPING["mamba2"]
import mamba3_nplr
from mamba3_nplr.modeling.families import FAMILIES
assert set(CONFIG_MAPPING.keys()) - names == {family.model_type for family in FAMILIES}
assert {"mamba3_nplr", "delta_family", "input_dependent_s4"} <= {family.model_type for family in FAMILIES}
assert CONFIG_MAPPING["mamba2"] is mamba2
assert type(AutoModel.from_config(AutoConfig.for_model("mamba3_nplr"))) is mamba3_nplr.Mamba3NPLRModel
"""

REGISTERS_WITHOUT_BEING_ASKED = """
import mamba3_nplr
from transformers import pipeline
from transformers.pipelines import get_supported_tasks
assert {"state-tracking", "behavior-cloning"} <= set(get_supported_tasks())
from transformers import AutoConfig, AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("mamba3_nplr", num_labels=7))
assert type(model).__name__ == "Mamba3NPLRForSequenceClassification" and model.num_labels == 7
"""

SUBMODULE_FIRST = """
import mamba3_nplr.modeling.{}
from transformers import AutoModel
from mamba3_nplr import AutoModelForBehaviorCloning, DeltaFamilyConfig, DeltaFamilyModel, Mamba3NPLRConfig
assert type(AutoModel.from_config(DeltaFamilyConfig())) is DeltaFamilyModel
assert AutoModelForBehaviorCloning.from_config(Mamba3NPLRConfig()).num_parameters() == 74832
"""
SUBMODULES = ("modeling_ids4", "sequence_model")

# Each of the functions loads something first that others wait for, in an order that no one can foresee.
IN_THREADS = """
import sys, threading, traceback
import mamba3_nplr
sys.setswitchinterval(1e-5)

def configuration():
    from transformers import AutoConfig
    assert type(AutoConfig.for_model("mamba3_nplr")).__name__ == "Mamba3NPLRConfig"

def model():
    from transformers import AutoModel
    assert type(AutoModel.from_config(mamba3_nplr.IDS4Config())).__name__ == "IDS4Model"

def task():
    from transformers.pipelines import check_task
    assert check_task("state-tracking")[1]["impl"].__name__ == "StateTrackingPipeline"

def ours():
    from mamba3_nplr.modeling.pipelines import custom_pipelines
    assert mamba3_nplr.DeltaFamilyForSequenceClassification and mamba3_nplr.AutoModelForBehaviorCloning

def run(use):
    barrier.wait()
    try:
        use()
    except BaseException:
        failures.append(traceback.format_exc())

uses = [configuration, model, task, ours] * 2
barrier, failures = threading.Barrier(len(uses)), []
threads = [threading.Thread(target=run, args=(use,)) for use in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, "".join(failures)
"""

INTERRUPTED = """
import sys
import mamba3_nplr

class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name in names:
            names.remove(name)
            raise KeyboardInterrupt(name)

def use():
    from transformers import AutoConfig, AutoModel, pipeline
    from transformers.pipelines import check_task
    assert type(AutoModel.from_config(AutoConfig.for_model("mamba3_nplr"))).__name__ == "Mamba3NPLRModel"
    assert check_task("behavior-cloning")[1]["impl"].__name__ == "BehaviorCloningPipeline"

# What is loaded by the modules after which we register, and then by our own.
names = ["transformers.models.auto.auto_mappings", "transformers.models.auto.auto_factory"]
names += ["mamba3_nplr.configuration.configuration_mamba3_nplr", "mamba3_nplr.modeling.modeling_mamba3_nplr"]
names += ["transformers.pipelines.base", "mamba3_nplr.modeling.pipelines"]
sys.meta_path.insert(0, Interruption())
interruptions = 0
while True:
    try:
        use()
        break
    except KeyboardInterrupt:
        interruptions += 1
assert interruptions == 6 and not names, (interruptions, names)
"""


def python(code, cwd, **environment):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment or None, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_is_quiet_and_light(tmp_path):
    assert python(LIGHT, tmp_path) == ""


def test_the_auto_classes_know_the_models_in_any_order_of_imports(tmp_path):
    for code in (REGISTERS, REGISTERS_WITHOUT_BEING_ASKED, *map(SUBMODULE_FIRST.format, SUBMODULES)):
        python(code, tmp_path)


def test_the_auto_classes_may_be_used_first_in_several_threads(tmp_path):
    python(IN_THREADS, tmp_path)


def test_the_auto_classes_know_the_models_after_an_interruption(tmp_path):
    python(INTERRUPTED, tmp_path)


def test_a_registration_of_someone_else_goes_first():
    from mamba3_nplr.modeling.registration import Entries

    loaded = []
    known = {"a": 1}
    entries = Entries(known, {"a": lambda: 2, "b": lambda: loaded.append("b") or 3})
    assert "b" in entries and list(entries) == ["a", "b"] and len(entries) == 2 and not loaded
    assert dict(entries) == {"a": 1, "b": 3} and "c" not in entries
    entries["b"] = 4
    assert entries["b"] == known["b"] == 4 and len(entries) == 2


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_every_family_has_every_head(family, head):
    model_class = load(family.model(head))
    assert model_class.__module__ == family.model(head).rpartition(".")[0] and inspect.getdoc(model_class)
    assert pickle.loads(pickle.dumps(model_class)) is model_class
    assert model_class.config_class is load(family.config) and model_class.config_class.model_type == family.model_type
    assert load(HEADS[head])._model_mapping[load(family.config)] is model_class


def test_exports_exist():
    import mamba3_nplr

    for name in mamba3_nplr.__all__:
        assert getattr(mamba3_nplr, name).__name__ == name


def test_the_wheel_is_complete_and_claims_one_name(tmp_path):
    # A copy, so that nothing left over from an earlier build can find its way in.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        archive.extractall(tmp_path / "site")
    assert {name.partition("/")[0] for name in names} == {"mamba3_nplr"}
    expected = {f"mamba3_nplr/{path.name}" for path in (ROOT / "mamba3_nplr").glob("*.py")}
    for folder in ("configuration", "modeling", "datasets_scripts", "training"):
        sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
        expected |= {f"mamba3_nplr/{path.relative_to(ROOT)}" for path in sources}
    assert set(names) == expected
    origin = "import mamba3_nplr.modeling.scan.dispatch as scan; print(scan.__file__)"
    assert str(tmp_path) in python(origin, tmp_path, PYTHONPATH=str(tmp_path / "site"))


THREADS = """
import os, sys

class Spy:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))

sys.meta_path.insert(0, Spy())
sys.path.insert(0, ROOT)
import train_hf
"""


@pytest.mark.parametrize(
    ("given", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_training_lets_waiting_threads_sleep_unless_told_otherwise(given, found):
    """The library of the threads reads it when torch is loaded, and never again."""
    environment = {name: x for name, x in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = THREADS.replace("ROOT", repr(str(ROOT)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == found
