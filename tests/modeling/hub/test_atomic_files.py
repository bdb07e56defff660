"""Files that are written at once by several, or by one that is killed, are whole, and nothing else is left."""

import errno
import threading

import pytest

from mamba3_nplr.modeling.hub import atomic_files
from mamba3_nplr.modeling.hub.atomic_files import write_atomically


def test_writers_at_once_do_not_meet(tmp_path):
    path, both = tmp_path / "out.json", threading.Barrier(2, timeout=10)

    def write(text):
        def slowly(part):
            with open(part, "w") as file:
                file.write(text)
                file.flush()
                both.wait()  # both are half done
                file.write(text)

        write_atomically(path, slowly)

    threads = [threading.Thread(target=write, args=[letter * 1000]) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 2000, "b" * 2000)
    assert list(tmp_path.iterdir()) == [path]


def test_parts_are_swept_when_their_owner_is_gone_and_not_before(tmp_path):
    path, alive = tmp_path / "[1].json", []
    abandoned = [tmp_path / ".[1].json.0123abcd.part.json", tmp_path / ".[1].json.part.json"]
    others = [
        tmp_path / f".{name}" for name in ("1.json.0123abcd.part.json", "[1].json.part", "[1].json.0123abcd.json")
    ]
    for file in (*abandoned, *others):
        file.write_text("half")

    def write(part):
        part.write_text("first")
        alive.append(part)
        write_atomically(path, lambda other: other.write_text("second"))
        assert part.read_text() == "first"

    write_atomically(path, write)
    assert path.read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
    assert alive[0].parent == tmp_path and alive[0].suffix == ".json"


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("before")

    def fail(part):
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_files_are_as_readable_as_others(tmp_path):
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "atomic", lambda part: part.write_text(""))
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_system_without_locks_writes_and_sweeps_nothing(tmp_path, monkeypatch):
    def no_locks(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic_files, "try_lock", no_locks)
    left = tmp_path / ".out.json.0123abcd.part.json"
    left.write_text("perhaps alive")
    write_atomically(tmp_path / "out.json", lambda part: part.write_text("whole"))
    assert (tmp_path / "out.json").read_text() == "whole" and left.exists()
