"""Which part of the package may import which, and that all its folders are installed."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.places import ROOT

PACKAGE = "mamba3_nplr"
FOLDERS = ("configuration", "modeling", "datasets_scripts", "training")

# From the bottom to the top: a part imports from itself and from those before it. What has no line of its own belongs
# to the part that it lies in, so that the fifth are the files of modeling/ that lie in none of its folders.
LAYERS = (
    "mamba3_nplr.configuration",
    "mamba3_nplr.modeling.hub",
    "mamba3_nplr.modeling.scan",
    "mamba3_nplr.modeling.mixers",
    "mamba3_nplr.modeling",
    "mamba3_nplr.datasets_scripts",
    "mamba3_nplr.training",
    "mamba3_nplr",
    "train_hf",
)


def source_files() -> dict[str, Path]:
    """The modules of the package and the program, by name."""
    paths = {
        path: (PACKAGE, *path.relative_to(ROOT).parts) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    paths |= {path: path.relative_to(ROOT).parts for path in (*(ROOT / PACKAGE).glob("*.py"), ROOT / "train_hf.py")}
    return {".".join(parts).removesuffix(".py").removesuffix(".__init__"): path for path, parts in paths.items()}


MODULES = source_files()


def imported(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """The line and the module of every import in a file of a package, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*folders, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else module


def layer_of(module: str) -> str | None:
    """The part of the package that a module belongs to; None if it is of another package."""
    inside = [layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.")]
    return max(inside, key=len, default=None)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    path, allowed = MODULES[module], LAYERS[: LAYERS.index(layer_of(module)) + 1]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for line, target in imported(path, package):
        layer = layer_of(target)
        place = f"{path.relative_to(ROOT)}:{line}"
        assert layer in (None, *allowed), f"{place} imports {target}; it may import from {', '.join(allowed)}."


def test_no_test_module_is_imported_by_another():
    """What several need is in tests/helpers."""
    for path in (ROOT / "tests").rglob("*.py"):
        for line, target in imported(path, ""):
            is_test = any(part.startswith("test_") for part in target.split("."))
            assert not is_test, f"{path.relative_to(ROOT)}:{line} imports {target}."


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert set(listed) == {name for name, path in MODULES.items() if path.name == "__init__.py"}
    with_code = {name.rpartition(".")[0] for name in MODULES if name.startswith(f"{PACKAGE}.")}
    assert with_code <= set(listed)
