"""The C++ files as the one text that is compiled and exported."""

import re
import subprocess

import pytest

from mamba3_nplr.modeling.scan.cpu import library, source

FILES = {path.name: path.read_text() for path in source.FOLDER.iterdir() if path.suffix in (".h", ".cpp")}


def test_every_file_is_there_once_and_after_those_it_includes():
    bodies = {name: re.split("^#include .*\n", text, flags=re.MULTILINE)[-1] for name, text in FILES.items()}
    assert {source.SOURCE.count(body) for body in bodies.values()} == {1}
    assert not re.search('^#include "|^#pragma once', source.SOURCE, re.MULTILINE)
    for name, text in FILES.items():
        for included in source.OWN_INCLUDE.findall(text):
            assert source.SOURCE.index(bodies[included]) < source.SOURCE.index(bodies[name]), (included, name)


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_compiler_names_a_file_and_the_line_in_it(name, tmp_path):
    lines = FILES[name].splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if line.startswith("template"))
    start = source.SOURCE.index("\n".join(lines[number - 1 :]))
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(f"{source.SOURCE[:start]}#error wrong\n{source.SOURCE[start:]}")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        library.run_compiler([*library.compiler_or_error(), "-E", str(wrong)])
    assert failed.value.stderr.startswith(f"{name}:{number}:")


def test_a_checkpoint_gets_the_same_text():
    exported = {}
    exec(source.exported_module(), exported)
    assert exported["SOURCE"] == source.SOURCE
