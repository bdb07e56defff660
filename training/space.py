"""The page as a Space of the Hub: its own files, the package as it is installed, and the trained models."""

import re
from importlib.util import find_spec
from pathlib import Path

from .upload import Upload, licence

CARD, PROGRAM = "README.md", "app.py"
# What a page is made of; whatever else lies beside it stays where it is.
PAGE_FILES = (".css", ".html", ".js", ".md", ".py", ".txt")
PACKAGE = __package__.partition(".")[0]
PARTS = ("configuration", "modeling", "datasets_scripts", "training")
CODE_FILES = (".cpp", ".h", ".py")
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
MODEL_FILES = ("config.json", WEIGHTS, "README.md", "results.json")


def is_page(folder: Path) -> bool:
    """Whether a folder has the program of a page, and a card that says so to the Hub."""
    if not all((folder / name).is_file() for name in (CARD, PROGRAM)):
        return False
    head = re.match(r"---\n(.*?)\n---\n", (folder / CARD).read_text(encoding="utf-8"), re.DOTALL)
    return head is not None and re.search(r"^sdk: gradio$", head[1], re.MULTILINE) is not None


def plan_space(folder: Path, repo_id: str) -> Upload:
    """
    A page with all that it needs to run: the package need not be installed there. The trained models are those in the
    folder or else, as in a checkout, beside it.
    """
    models = model_files(next((x for x in (folder, folder.parent) if (x / CHECKPOINTS).is_dir()), folder))
    if not models:
        raise ValueError(f"{folder} has nothing to play with: there are no trained models in {CHECKPOINTS}/ beside it.")
    page = {path.name: path for path in files_in(folder.glob("*"), PAGE_FILES)}
    files = page | package_files() | models | {"LICENSE": licence()}
    many = sum(name.endswith(WEIGHTS) for name in models)
    return Upload(repo_id, "space", files, "The page", f"A page to play on, with {many} trained models")


def package_files() -> dict[str, Path]:
    """The code of the package by its path where it is installed, with the sources that are compiled there."""
    root = Path(find_spec(PACKAGE).origin).parent
    found = {f"{PACKAGE}/{path.name}": path for path in files_in(root.glob("*"), CODE_FILES)}
    for part in PARTS:
        place = Path(find_spec(f"{PACKAGE}.{part}").origin).parent
        for path in files_in(place.rglob("*"), CODE_FILES):
            found[f"{PACKAGE}/{part}/{path.relative_to(place).as_posix()}"] = path
    return found


def model_files(folder: Path) -> dict[str, Path]:
    found = {}
    for weights in sorted(folder.glob(f"{CHECKPOINTS}/*/{WEIGHTS}")):
        for path in (weights.with_name(name) for name in MODEL_FILES):
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    return found


def files_in(paths, suffixes: tuple[str, ...]) -> list[Path]:
    """Those that are files of these kinds themselves: a link might lead anywhere."""
    return sorted(path for path in paths if path.suffix in suffixes and path.is_file() and not path.is_symlink())
