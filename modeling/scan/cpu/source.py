"""The C++ source of the CPU backend, as text: a checkpoint that carries its own code holds Python files only."""

from pathlib import Path

SOURCE = Path(__file__).with_name("scan_cpu.cpp").read_text(encoding="utf-8")


def exported_module() -> str:
    """This module for a checkpoint, where the C++ file is not beside it."""
    return f'"""The C++ source of the CPU backend."""\n\nSOURCE = r"""{SOURCE}"""\n'
