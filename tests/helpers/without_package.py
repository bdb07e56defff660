"""Where this package cannot be imported: the beginning of scripts, or a folder of all other packages."""

import sys
from pathlib import Path

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mamba3_nplr":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Blocker())
"""


def other_packages(folder: Path, *absent: str) -> Path:
    """
    Links to all that is installed, except for this package and those that are `absent`. It is to be the PYTHONPATH of
    `python -S`, which looks nowhere else.
    """
    folder.mkdir()
    left_out = ("mamba3_nplr", "__editable__", *absent)
    for site in map(Path, sys.path):
        for path in site.iterdir() if site.name in ("site-packages", "dist-packages") else ():
            if not path.name.startswith(left_out) and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder
