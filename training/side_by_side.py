"""
Several runs at a time, each a process of its own: started in order, watched through pipes, and ended together with the
process that has started them, however that ends.

A process is forked off, so that it has at once all that was imported; it may then replace itself by another program.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from . import progress
from .live_display import LiveDisplay

PR_SET_PDEATHSIG = 1  # of Linux' sys/prctl.h
PATIENCE = 0.25  # seconds until the display is drawn again
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Job:
    """
    One of several runs, and what is known of it.

    Args:
        name: For the display.
        work: Called in a process of its own with the number of its place among those at work, from 0. What it raises
            is a failure, and so is an exit code other than 0.
        log: File to which all that it prints is appended.
    """

    name: str
    work: Callable[[int], object]
    log: Path
    stage: str = "waiting"  # then "starting", "training", "testing"; and "done", "failed" or "stopped"
    told: dict = field(default_factory=dict)  # the last value of each field that it has told
    failure: str | None = None
    started: float | None = None
    since: float | None = None  # when the stage began
    ended: float | None = None

    @property
    def is_running(self) -> bool:
        return self.started is not None and self.ended is None


class SideBySide:
    """
    Args:
        at_once: Processes at a time.
        share_last: Whether to start all that are left once they are fewer than twice as many: they then share the
            cores to the end, where else the last ones would leave some of them idle.
        display: To be shown all jobs now and then.
        when_done: Called with a job that has ended well.
    """

    def __init__(
        self,
        jobs: list[Job],
        at_once: int,
        display: LiveDisplay,
        share_last: bool = False,
        when_done: Callable[[Job], object] | None = None,
    ):
        self.jobs = jobs
        self.at_once = at_once
        self.display = display
        self.share_last = share_last
        self.when_done = when_done
        self.processes: dict[int, tuple[Job, multiprocessing.Process]] = {}  # by the pipes through which they tell
        self.places: dict[int, int] = {}  # the places that are taken, by the same
        self.unread: dict[int, bytes] = {}
        self.stopped: int | None = None
        self.owner = os.getpid()

    def run(self) -> int | None:
        """Works until every job has ended. Returns the number of the signal that has stopped it, or None."""
        with self.handle_signals():
            try:
                while self.start_jobs() or self.processes:
                    for pipe in wait(list(self.processes), PATIENCE):
                        self.read(pipe)
                    self.display.show(self.jobs)
            finally:  # if anything went wrong here, nobody would watch them
                self.end_all(at_once=False)
        self.display.finish(self.jobs)
        return self.stopped

    def start_jobs(self) -> bool:
        """Starts as many as may run now; returns whether there were any."""
        waiting = [] if self.stopped else [job for job in self.jobs if job.stage == "waiting"]
        left = len(waiting) + len(self.processes)
        limit = left if self.share_last and left < 2 * self.at_once else self.at_once
        started = waiting[: limit - len(self.processes)]
        for job in started:
            if not self.stopped:
                self.start(job)
        return bool(started)

    def start(self, job: Job) -> None:
        pipe, end_of_child = os.pipe()
        place = min(set(range(len(self.places) + 1)) - set(self.places.values()))
        process = multiprocessing.get_context("fork").Process(
            target=work_in_child, args=(job, place, end_of_child, [pipe, *self.processes], os.getpid()), name=job.name
        )
        process.start()
        os.close(end_of_child)  # so that the pipe ends with the child
        job.stage, job.started = "starting", time.monotonic()
        job.since = job.started
        self.processes[pipe], self.places[pipe], self.unread[pipe] = (job, process), place, b""
        if self.stopped:  # meanwhile
            process.terminate()

    def read(self, pipe: int) -> None:
        job, process = self.processes[pipe]
        found = os.read(pipe, 1 << 16)
        *lines, self.unread[pipe] = (self.unread[pipe] + found).split(b"\n")
        for line in lines:
            told = json.loads(line)
            job.told |= told
            if "stage" in told:
                job.stage, job.since = told["stage"], time.monotonic()
        if not found:
            process.join()
            os.close(pipe)
            del self.processes[pipe], self.places[pipe], self.unread[pipe]
            self.note_end(job, process.exitcode)

    def note_end(self, job: Job, code: int) -> None:
        job.ended = time.monotonic()
        if code == 0:
            job.stage = "done"
            if self.when_done:
                self.when_done(job)
        elif self.stopped and code in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL):
            job.stage = "stopped"
        else:
            job.stage, job.failure = "failed", job.told.get("failure") or describe_end(code, job.log)

    @contextmanager
    def handle_signals(self):
        """The first signal stops all runs, each after a checkpoint; a second ends them at once."""

        def note(number, frame):
            if os.getpid() != self.owner:  # a child that has just been forked off
                os._exit(128 + number)
            self.end_all(at_once=self.stopped is not None)
            self.stopped = number

        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_all(self, at_once: bool) -> None:
        for _, process in self.processes.values():
            process.kill() if at_once else process.terminate()


def work_in_child(job: Job, place: int, pipe: int, ends_of_parent: list[int], parent: int) -> None:
    """What the process of a job does."""
    for end in ends_of_parent:  # which would seem to be listened to for as long as this process lives
        os.close(end)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Ctrl-C goes to all processes of a terminal: the parent hands it on, once.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    end_with_parent(parent)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # A notebook, for one, has put others in their place.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.set_inheritable(pipe, True)
    os.environ[progress.PIPE] = str(pipe)
    job.work(place)


def end_with_parent(parent: int) -> None:
    """Has the system stop this process when its parent ends. Elsewhere than on Linux its next report finds out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before it was asked for
        os._exit(1)


def describe_end(code: int, log: Path) -> str:
    """Why a process has ended that has not said it through its pipe."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: by someone, or by the system for want of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    last = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(last) if line.strip()), f"exit code {code}")
