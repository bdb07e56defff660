"""
Mamba-3 with an input-dependent reflection, as Hugging Face models.

Importing this package makes its models known to the Auto classes of transformers. The classes themselves, and what they
need of torch and transformers, are loaded when they are first used.
"""

from pathlib import Path

# In a checkout the parts of the package are the folders beside this one.
if not (Path(__file__).parent / "modeling").exists():
    __path__.append(str(Path(__file__).parents[1]))

from .modeling import families, registration

__version__ = "0.1.0"

# Name -> where it is.
EXPORTS = {
    families.own_name(path): path
    for path in (
        *families.public_classes(),
        f"{__name__}.datasets_scripts.loading.load_dataset",
        f"{__name__}.modeling.collation.pad_sequences",
        f"{__name__}.modeling.mixers.delta.DeltaMixer",
        f"{__name__}.modeling.mixers.delta.DeltaState",
        f"{__name__}.modeling.mixers.ids4.IDS4Mixer",
        f"{__name__}.modeling.mixers.ids4.IDS4State",
        f"{__name__}.modeling.mixers.mamba3.Mamba3Mixer",
        f"{__name__}.modeling.mixers.mamba3.Mamba3State",
        f"{__name__}.modeling.scan.definition.ScanState",
        f"{__name__}.modeling.scan.dispatch.scan",
    )
}
__all__ = [*EXPORTS]


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return families.load(EXPORTS[name])


def __dir__():
    return sorted([*globals(), *EXPORTS])


registration.register()
