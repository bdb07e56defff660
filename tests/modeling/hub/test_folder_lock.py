"""A folder has one owner at a time, and none once that has ended, however it ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mamba3_nplr.modeling.hub import folder_lock as locking
from mamba3_nplr.modeling.hub.folder_lock import LOCK, FolderInUseError, folder_lock, only_writer

HOLDER = """
import sys, time
from mamba3_nplr.modeling.hub.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_by_the_name_of_the_first(tmp_path):
    with folder_lock(tmp_path):
        message = f"in use: process {os.getpid()} on .*, since 20.* another folder"
        with pytest.raises(FolderInUseError, match=message), folder_lock(tmp_path):
            pytest.fail("two are in the folder")
        assert (tmp_path / LOCK).exists()  # the refused one has not taken it away
    assert not any(tmp_path.iterdir())
    with pytest.raises(ArithmeticError), folder_lock(tmp_path):
        raise ArithmeticError
    with folder_lock(tmp_path):
        pass


def test_a_killed_owner_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on"), folder_lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()
    with folder_lock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()


def test_an_owner_that_leaves_meanwhile_leaves_no_second_way_in(tmp_path, monkeypatch):
    """Between the opening of the file and its lock the owner removes it: a lock on what is gone keeps nobody out."""
    lock, calls = locking.try_lock, []

    def leave_first(file):
        calls.append(None)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        return lock(file)

    monkeypatch.setattr(locking, "try_lock", leave_first)
    with folder_lock(tmp_path), pytest.raises(FolderInUseError), folder_lock(tmp_path):
        pytest.fail("two are in the folder")
    assert len(calls) == 3


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(file):
        raise OSError(locking.NO_LOCKS[0], "No locks available")

    monkeypatch.setattr(locking, "try_lock", no_locks)
    with pytest.warns(UserWarning, match="file system without locks"), folder_lock(tmp_path):
        pass


FORKING_HOLDER = """
import os, sys, time
from mamba3_nplr.modeling.hub.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by the child: on a busy machine it may start long after its parent goes on
    time.sleep(600)
"""


def test_processes_that_the_owner_has_forked_hold_nothing(tmp_path):
    """As those that load data: they outlive a killed owner by some seconds."""
    command = [sys.executable, "-c", FORKING_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on"), folder_lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        try:
            with folder_lock(tmp_path):
                os.kill(child, 0)  # it is alive
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_killed_writer_is_no_longer_waited_for(tmp_path):
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        with only_writer(tmp_path / "folder"):
            os.write(done, b"x")
            time.sleep(1000)
    entered = threading.Event()

    def wait():
        with only_writer(tmp_path / "folder"):
            entered.set()

    thread = threading.Thread(target=wait)
    try:
        os.read(ready, 1)
        thread.start()
        early = entered.wait(0.2)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not early and entered.wait(60)
    thread.join()


def test_a_process_that_the_writer_has_forked_is_not_waited_for(tmp_path):
    with only_writer(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
    entered = threading.Event()

    def wait():
        with only_writer(tmp_path):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    early = entered.wait(10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    thread.join()
    assert early
