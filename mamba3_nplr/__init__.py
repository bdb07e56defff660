"""
Mamba-3 with an input-dependent reflection, as Hugging Face models.

Importing this package makes its models known to the Auto classes of transformers. The classes themselves, and what they
need of torch and transformers, are loaded when they are first used.
"""

from importlib import import_module
from pathlib import Path

# In a checkout the parts of the package are the folders beside this one.
if not (Path(__file__).parent / "modeling").exists():
    __path__.append(str(Path(__file__).parents[1]))

from .modeling.registration import register

__version__ = "0.1.0"

EXPORTS = {
    "AutoModelForBehaviorCloning": ".modeling.auto",
    "DeltaFamilyConfig": ".configuration.configuration_delta_family",
    "DeltaFamilyForBehaviorCloning": ".modeling.modeling_delta_family",
    "DeltaFamilyForSequenceClassification": ".modeling.modeling_delta_family",
    "DeltaFamilyForTokenClassification": ".modeling.modeling_delta_family",
    "DeltaFamilyModel": ".modeling.modeling_delta_family",
    "DeltaFamilyPreTrainedModel": ".modeling.modeling_delta_family",
    "DeltaMixer": ".modeling.mixers.delta",
    "DeltaState": ".modeling.mixers.delta",
    "IDS4Config": ".configuration.configuration_ids4",
    "IDS4ForBehaviorCloning": ".modeling.modeling_ids4",
    "IDS4ForSequenceClassification": ".modeling.modeling_ids4",
    "IDS4ForTokenClassification": ".modeling.modeling_ids4",
    "IDS4Mixer": ".modeling.mixers.ids4",
    "IDS4Model": ".modeling.modeling_ids4",
    "IDS4PreTrainedModel": ".modeling.modeling_ids4",
    "IDS4State": ".modeling.mixers.ids4",
    "Mamba3Mixer": ".modeling.mixers.mamba3",
    "Mamba3NPLRConfig": ".configuration.configuration_mamba3_nplr",
    "Mamba3NPLRForBehaviorCloning": ".modeling.modeling_mamba3_nplr",
    "Mamba3NPLRForSequenceClassification": ".modeling.modeling_mamba3_nplr",
    "Mamba3NPLRForTokenClassification": ".modeling.modeling_mamba3_nplr",
    "Mamba3NPLRModel": ".modeling.modeling_mamba3_nplr",
    "Mamba3NPLRPreTrainedModel": ".modeling.modeling_mamba3_nplr",
    "Mamba3State": ".modeling.mixers.mamba3",
    "ScanState": ".modeling.scan.definition",
    "load_dataset": ".datasets_scripts.loading",
    "pad_sequences": ".modeling.collation",
    "scan": ".modeling.scan.dispatch",
}
__all__ = [*EXPORTS]


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name], __name__), name)


def __dir__():
    return sorted([*globals(), *EXPORTS])


register()
