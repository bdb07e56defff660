"""The beginning of scripts that run in a process where this package cannot be imported."""

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mamba3_nplr":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Blocker())
"""
