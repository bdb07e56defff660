"""
transformers' own tests for any model, made importable: `ModelTesterMixin`, `ConfigTester`.

`make setup` downloads them. They are loaded as the package `transformers_tests`; what they import from folders that the
source distribution lacks is replaced by stand-ins.
"""

import sys
from importlib import import_module
from types import ModuleType

from mamba3_nplr.modeling.families import FAMILIES
from programs.fetch_transformers_tests import tests_folder

PACKAGE = "transformers_tests"

# One value unlike the default for each field that every configuration has.
CONFIG_COMMON_KWARGS = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "no", 1: "yes", 2: "maybe"},
    "is_encoder_decoder": True,
    "label2id": {"no": 0, "yes": 1, "maybe": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}

STAND_INS = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_COMMON_KWARGS},
}

# The tests choose labels and checks by the names in these tables, which hold only the models inside transformers.
CLASS_NAMES = {
    "MODEL_MAPPING_NAMES": "Model",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "ForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "ForTokenClassification",
}


def load_package() -> None:
    folder = tests_folder()
    if not folder.is_dir():
        raise FileNotFoundError(f"The tests of transformers are not in {folder}: run `make setup`.")
    add_module(PACKAGE, __path__=[str(folder)])
    for name, contents in STAND_INS.items():
        add_module(f"{PACKAGE}.{name.partition('.')[0]}")
        add_module(f"{PACKAGE}.{name}", **contents)


def add_module(name: str, **contents) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load_common_tests() -> ModuleType:
    """The module with `ModelTesterMixin`, to which the classes of this package are known."""
    module = import_module(f"{PACKAGE}.test_modeling_common")
    for table, suffix in CLASS_NAMES.items():
        ours = {family.model_type: family.prefix + suffix for family in FAMILIES}
        # A copy: transformers itself keeps its tables.
        setattr(module, table, {**getattr(module, table), **ours})
    return module


load_package()
common = load_common_tests()
ConfigTester = import_module(f"{PACKAGE}.test_configuration_common").ConfigTester
