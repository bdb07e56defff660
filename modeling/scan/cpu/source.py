"""
The C++ source of the CPU backend as one text, which is what is compiled: a checkpoint that carries its own code holds
Python files only.
"""

import re
from pathlib import Path

FOLDER, FIRST = Path(__file__).parent, "library.cpp"
OWN_INCLUDE = re.compile(r'#include "([\w.]+)"')


def joined(name: str, taken: set[str]) -> str:
    """
    A file with the files beside it that it includes in place of their `#include`, each where it is first needed and
    added to `taken`. Errors of the compiler name file and line as they stand here.
    """
    taken.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").splitlines(), start=1):
        included = OWN_INCLUDE.fullmatch(line)
        if included and included[1] not in taken:
            lines += [joined(included[1], taken), f'#line {number + 1} "{name}"']
        else:
            lines.append("" if included or line == "#pragma once" else line)
    return "\n".join(lines)


SOURCE = joined(FIRST, set()) + "\n"


def exported_module() -> str:
    """This module for a checkpoint, where the C++ files are not beside it."""
    return f'"""The C++ source of the CPU backend."""\n\nSOURCE = r"""{SOURCE}"""\n'
