"""The cache of compiled code: what is whole and one's own is loaded, anything else is built again or refused."""

import logging
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from mamba3_nplr.modeling.scan.cpu import compiled
from mamba3_nplr.modeling.scan.cpu import library as cpu_library
from mamba3_nplr.modeling.scan.cpu.library import cache_folder, library_key

pytestmark = pytest.mark.skipif(cpu_library.compiler() is None, reason="there is no C++ compiler")

SOURCE = """
#ifndef ANSWER
#define ANSWER 42
#endif
extern "C" int answer() { return ANSWER; }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MAMBA3_NPLR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def said(monkeypatch):
    """What is said to the user, except for the announcements of compilations."""
    texts = []
    monkeypatch.setattr(cpu_library.logger, "warning", texts.append)
    return lambda: [text for text in texts if not text.startswith("Compiling")]


def answer(source=SOURCE):
    """Of the library as a new process would load it."""
    return cpu_library.load_library.__wrapped__("tiny", source).answer()


def built(folder) -> Path:
    """A library that this process has not loaded: the system takes a loaded one for the next of that name."""
    return cpu_library.build(SOURCE, folder / f"tiny-{library_key(SOURCE)}")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def give_away(path, monkeypatch):
    """Makes a file or folder one of another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(cpu_library.os, "geteuid", lambda: 12345)


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:1000] + bytes(255 - x for x in content[1000:-1000]) + content[-1000:],
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "text": lambda content: b"not a library",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(damage, folder, said):
    path = built(folder)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert answer() == 42
    assert "damaged" in said()[0] and str(path) in said()[0]
    (again,) = folder.iterdir()
    assert cpu_library.why_bad(again) is None
    assert answer() == 42 and len(said()) == 1


def test_a_whole_library_that_does_not_load_here_is_left_to_other_machines(folder, said):
    built(folder).unlink()
    other = folder / "other"
    other.write_bytes(b"for another system")
    other.chmod(0o755)
    other = other.rename(folder / f"tiny-{library_key(SOURCE)}-{cpu_library.checksum(other)}.so")
    assert answer() == 42
    assert other.exists() and len(list(folder.iterdir())) == 2
    assert "cannot be loaded here" in said()[0]


def test_it_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("rename") or replace(*paths))
    built(folder)
    assert events == ["file", "rename", "folder"]


def test_a_library_is_used_where_there_is_no_compiler(folder, monkeypatch, said):
    built(folder)
    monkeypatch.setenv("PATH", "")
    assert cpu_library.compiler() is None
    assert answer() == 42 and not said()
    with pytest.raises(OSError, match="no C\\+\\+ compiler was found"):
        answer(SOURCE + "// another")


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: A processor
cpu MHz\t\t: 2596.148
flags\t\t: fpu sse2 avx2
"""


def test_each_processor_has_libraries_of_its_own(monkeypatch, tmp_path):
    """As where machines share a home; an instruction that one of them does not know ends the process."""

    def key(text):
        (tmp_path / "cpuinfo").write_text(text)
        return library_key(SOURCE)

    monkeypatch.setattr(cpu_library, "CPUINFO", tmp_path / "cpuinfo")
    first = key(CPUINFO)
    later = CPUINFO.replace("2596", "1200")
    assert key(later) == key(later + "\n" + later.replace("processor\t: 0", "processor\t: 1")) == first
    assert len({first, key(CPUINFO.replace("avx2", "avx512f")), key(CPUINFO.replace("A proc", "Another proc"))}) == 3
    told = [key("nothing known: here")]  # the compiler is asked
    monkeypatch.setattr(cpu_library, "CPUINFO", tmp_path / "missing")
    assert [library_key(SOURCE)] == told and first not in told


@pytest.mark.parametrize("wrong", ["", "cache", "./cache"])
def test_the_users_cache_is_never_in_the_working_directory(wrong, monkeypatch, tmp_path):
    monkeypatch.delenv("MAMBA3_NPLR_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", wrong)
    assert cache_folder() == tmp_path / ".cache" / "mamba3_nplr"
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(OSError, match="HOME='relative' is not a place for a cache"):
        cache_folder()


def test_variables_choose_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/other")
    monkeypatch.setenv("MAMBA3_NPLR_CACHE", "")
    assert cache_folder() == tmp_path / "other" / "mamba3_nplr"
    monkeypatch.setenv("MAMBA3_NPLR_CACHE", "~/third")
    assert cache_folder() == tmp_path / "third"
    monkeypatch.setenv("MAMBA3_NPLR_CACHE", "third")
    with pytest.raises(OSError, match="MAMBA3_NPLR_CACHE='third' is a relative path, and must be an absolute one"):
        cache_folder()


def test_a_place_that_others_may_write_into_is_refused_and_said(folder, monkeypatch, caplog):
    built(folder)
    folder.chmod(0o777)
    monkeypatch.setattr(compiled, "library", lambda dtype: answer())
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    reason = compiled.try_library.__wrapped__()
    assert f"{folder} may be written by others (mode 777)" in reason and "MAMBA3_NPLR_CACHE names another" in reason
    assert "fall back to the slower chunkwise scan" in caplog.text and reason in caplog.text
    folder.chmod(0o755)
    assert answer() == 42
    folder.parent.chmod(0o777)  # there the folder could be replaced by another
    with pytest.raises(OSError, match=f"is inside {folder.parent}, which everyone may change"):
        answer()
    folder.parent.chmod(0o1777)  # as that of temporary files
    assert answer() == 42


def test_a_place_of_another_user_is_refused(folder, monkeypatch):
    built(folder)
    if os.geteuid():
        folder.parent.chmod(0o755)
    give_away(folder, monkeypatch)
    with pytest.raises(OSError, match=f"{folder} belongs to another user"):
        answer()


def test_a_file_that_others_may_write_is_built_again(folder, said):
    path = built(folder)
    path.chmod(0o777)
    assert answer() == 42 and "may be written by others" in said()[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_file_of_another_user_is_built_again(folder, said, monkeypatch):
    path = built(folder)
    give_away(path, monkeypatch)
    assert answer() == 42 and "belongs to another user" in said()[0]
    assert path.stat().st_uid == 0


def test_a_compiler_that_hangs_is_stopped_with_all_it_started(folder, monkeypatch, tmp_path):
    number = tmp_path / "number"
    monkeypatch.setenv("CXX", script(tmp_path / "slow", f"sleep 1000 &\necho $! > {number}\nwait"))
    monkeypatch.setattr(cpu_library, "SECONDS_TO_COMPILE", 0.5)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="slow did not finish in 0.5 s, and was stopped"):
        answer()
    assert not list(folder.iterdir())
    status = Path("/proc", number.read_text().strip(), "status")
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() - start < 60
        time.sleep(0.01)


def test_messages_of_a_compiler_need_not_be_utf_8(folder, monkeypatch, tmp_path):
    text = "printf 'x.cpp: error: caf\\351\\n   ^\\ncompilation ended.\\n' >&2; exit 1"
    monkeypatch.setenv("CXX", script(tmp_path / "latin", text))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        answer()
    assert compiled.explain(failed.value) == "its compilation failed: x.cpp: error: caf\N{REPLACEMENT CHARACTER}"
    silent = subprocess.CalledProcessError(1, "c++", stderr=" \n")
    assert "exit status 1" in compiled.explain(silent)


def test_cxx_may_hold_options(folder, monkeypatch, said):
    monkeypatch.setenv("CXX", f"{cpu_library.compiler()} -DANSWER=7")
    assert answer() == 7 and not said()
    monkeypatch.delenv("CXX")
    assert answer() == 42


@pytest.mark.parametrize("missing", ["no-such-compiler -O1", "g++ 'never closed"])
def test_a_compiler_that_is_not_there_is_named_and_another_taken(missing, folder, monkeypatch, said):
    monkeypatch.setenv("CXX", missing)
    assert answer() == 42
    assert said() == [f"CXX={missing!r} names no program; c++ is used instead."]


def test_what_a_wrapper_adds_makes_a_library_of_its_own(folder, monkeypatch, tmp_path):
    found, usual = [], cpu_library.compiler()
    for number, name in ((1, "a"), (2, "b"), (1, "c")):
        monkeypatch.setenv("CXX", script(tmp_path / name, f'exec {usual} "$@" -DANSWER={number}'))
        found.append((library_key(SOURCE), answer()))
    assert [number for _, number in found] == [1, 2, 1]
    assert found[0] == found[2] and found[0][0] != found[1][0]
    assert len(list(folder.iterdir())) == 2
