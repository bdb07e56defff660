"""Downloads the tests of the installed transformers: its source distribution holds them, its wheel does not."""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path


def tests_folder() -> Path:
    """Where the tests of the installed transformers version are kept, or would be."""
    return Path(sys.prefix) / "transformers_tests" / version("transformers") / "tests"


def download(folder: Path) -> Path:
    """The source distribution of the installed transformers version, downloaded into `folder`."""
    requirement = f"transformers=={version('transformers')}"
    options = ["--quiet", "--no-deps", "--no-binary", "transformers", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = list(folder.glob("transformers-*.tar.gz"))
    if result.returncode != 0 or not archives:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no archive came"]
        sys.exit(f"Cannot download the source distribution of {requirement}: {reason[-1]}")
    return archives[0]


def extract(archive: Path, target: Path) -> None:
    """Puts the tests/ folder of the archive at `target`, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as folder, tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.split("/")[1:2] == ["tests"]]
        if not members:
            sys.exit(f"{archive.name} holds no tests/ folder.")
        tar.extractall(folder, members=members, filter="data")
        [unpacked] = Path(folder).glob("*/tests")
        # Not in source distributions; the tests look for it beside them.
        (unpacked / "__init__.py").touch()
        unpacked.rename(target)


def main() -> None:
    target = tests_folder()
    if target.is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        extract(download(Path(folder)), target)


if __name__ == "__main__":
    main()
