"""Files that are whole or not there, however many write them and however they end."""

import os
import signal
import threading
import time

from mamba3_nplr.configuration import atomic_files
from mamba3_nplr.configuration.atomic_files import only_writer, write_atomically


def test_several_may_write_one_file(tmp_path):
    path, barrier, failures = tmp_path / "file.json", threading.Barrier(4), []

    def write(part, text):
        part.write_text(text[:3])
        barrier.wait()
        part.write_text(text)

    def run(text):
        try:
            write_atomically(path, lambda part: write(part, text))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(letter * 1000,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and path.read_text() in {letter * 1000 for letter in "abcd"}
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_goes_in_time(tmp_path):
    path = tmp_path / "[a].json"
    child = os.fork()
    if child == 0:
        write_atomically(path, lambda part: part.write_text("half") and os._exit(0))
    os.waitpid(child, 0)
    (part,) = tmp_path.iterdir()
    write_atomically(path, lambda new: new.write_text("whole"))
    assert part.exists()  # it might belong to someone who is at it
    old = time.time() - 2 * atomic_files.ABANDONED
    os.utime(part, (old, old))
    write_atomically(path, lambda new: new.write_text("whole"))
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "whole"


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
