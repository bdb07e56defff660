"""
The families of models, and the heads that each of them has. What the package exports, what it registers with
transformers, and what a checkpoint says about its classes follow from these two lists. Every import of the package
reads them, so this file imports nothing that takes time.
"""

from importlib import import_module
from typing import NamedTuple

MODELING = __name__.rpartition(".")[0]
PACKAGE = MODELING.rpartition(".")[0]


class Family(NamedTuple):
    model_type: str
    prefix: str  # of the names of its classes
    files: str  # how the names of its files, configuration_... and modeling_..., go on

    @property
    def config(self) -> str:
        """Where its configuration is: module and class."""
        return f"{PACKAGE}.configuration.configuration_{self.files}.{self.prefix}Config"

    def model(self, head: str) -> str:
        """Where its model with a head is: module and class."""
        return f"{MODELING}.modeling_{self.files}.{self.prefix}{head}"


FAMILIES = (
    Family("mamba3_nplr", "Mamba3NPLR", "mamba3_nplr"),
    Family("delta_family", "DeltaFamily", "delta_family"),
    Family("input_dependent_s4", "IDS4", "ids4"),
)

# How the names of the classes end -> where the Auto class is that loads them.
HEADS = {
    "Model": "transformers.AutoModel",
    "ForSequenceClassification": "transformers.AutoModelForSequenceClassification",
    "ForTokenClassification": "transformers.AutoModelForTokenClassification",
    "ForBehaviorCloning": f"{MODELING}.auto.AutoModelForBehaviorCloning",
}


def public_classes() -> list[str]:
    """Where the classes are that the package exports for its families and heads."""
    models = [family.model(kind) for family in FAMILIES for kind in ("PreTrainedModel", *HEADS)]
    return (
        [family.config for family in FAMILIES] + models + [HEADS[head] for head in HEADS if not in_transformers(head)]
    )


def own_name(path: str) -> str:
    """The name of a class without that of its module."""
    return path.rpartition(".")[2]


def load(path: str):
    """What stands at a path of module and name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def in_transformers(head: str) -> bool:
    """Whether transformers has an Auto class for this head; for the others this package has one of its own."""
    return HEADS[head].startswith("transformers.")


def auto_class_without_package(head: str) -> str:
    """The name of the Auto class that loads this head from a checkpoint's own code, where this package is not."""
    return own_name(HEADS[head]) if in_transformers(head) else "AutoModel"
