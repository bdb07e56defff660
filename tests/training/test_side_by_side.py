"""Jobs in processes of their own: when they start, what is known of them, and how it is shown."""

import contextlib
import io
import os
import pty
import re
import signal
import sys
import termios
import threading

import pytest

from mamba3_nplr.training import progress
from mamba3_nplr.training.live_display import LiveDisplay, clock, lines_of
from mamba3_nplr.training.progress import TimeLeft, tell
from mamba3_nplr.training.side_by_side import Job, SideBySide


class Watcher(LiveDisplay):
    """Counts the jobs that run at a time."""

    def __init__(self):
        super().__init__(io.StringIO())
        self.running = []

    def show(self, jobs):
        self.running.append(sum(job.is_running for job in jobs))
        super().show(jobs)


def train(place):
    """What a run tells."""
    print("begins", flush=True)
    tell(stage="training", updates=0, total=200)
    for updates in (50, 100, 150, 200):
        tell(updates=updates, speed=12.5, seconds_left=(200 - updates) / 12.5)
        tell(loss=1 / updates)
    tell(stage="testing")


def fail(place):
    raise ValueError("no such thing")


def run(folder, works, display=None, **options):
    jobs = [Job(f"job{number}", work, folder / f"{number}.log") for number, work in enumerate(works)]
    display = display or Watcher()
    return jobs, SideBySide(jobs, display=display, **{"at_once": 2} | options).run(), display


def test_jobs_start_as_places_become_free(tmp_path):
    jobs, stopped, display = run(tmp_path, [train] * 5)
    assert stopped is None and [job.stage for job in jobs] == ["done"] * 5
    assert max(display.running) == 2
    told = {"stage": "testing", "updates": 200, "total": 200, "speed": 12.5, "seconds_left": 0.0, "loss": 0.005}
    assert jobs[0].told == told
    assert all(job.log.read_text() == "begins\n" for job in jobs)


def test_the_last_jobs_share_the_cores(tmp_path):
    starts = []

    class Starts(Watcher):
        def show(self, jobs):
            starts.append([job.stage != "waiting" for job in jobs])
            super().show(jobs)

    jobs, _, _ = run(tmp_path, [train] * 3, Starts(), share_last=True)
    assert starts[0] == [True] * 3 and all(job.stage == "done" for job in jobs)
    starts.clear()
    run(tmp_path, [train] * 4, Starts(), share_last=True)
    assert starts[0] == [True, True, False, False]


def test_each_job_has_a_place_of_its_own(tmp_path):
    def note(place):
        tell(place=place)

    jobs, _, _ = run(tmp_path, [note] * 4, at_once=2)
    assert {job.told["place"] for job in jobs} <= {0, 1}
    jobs, _, _ = run(tmp_path, [note] * 3, at_once=3)
    assert sorted(job.told["place"] for job in jobs) == [0, 1, 2]


ENDS = {
    "ValueError: no such thing": fail,
    "exit code 3": lambda place: sys.exit(3),
    "the last line": lambda place: sys.exit("a line\nthe last line"),
    "ended by SIGUSR1": lambda place: os.kill(os.getpid(), signal.SIGUSR1),
    "killed by SIGKILL": lambda place: os.kill(os.getpid(), signal.SIGKILL),
    "told before": lambda place: tell(failure="told before") or sys.exit("another line"),
}


@pytest.mark.parametrize(("reason", "work"), ENDS.items())
def test_a_job_that_fails_says_why(reason, work, tmp_path):
    jobs, _, display = run(tmp_path, [work, train])
    assert [job.stage for job in jobs] == ["failed", "done"] and jobs[0].failure.startswith(reason)
    line = next(line for line in display.stream.getvalue().splitlines() if line.startswith("job0: failed"))
    assert reason in line and str(jobs[0].log) in line


def test_a_job_may_become_another_program(tmp_path):
    program = (
        f"import os; os.write(int(os.environ[{progress.PIPE!r}]), b'{{\"stage\": \"testing\"}}\\n'); print('here')"
    )

    def become(place):
        os.execv(sys.executable, [sys.executable, "-c", program])

    jobs, _, _ = run(tmp_path, [become, lambda place: os.execv("/bin/false", ["false"])])
    assert jobs[0].stage == "done" and jobs[0].told == {"stage": "testing"} and jobs[0].log.read_text() == "here\n"
    assert jobs[1].stage == "failed" and jobs[1].failure == "exit code 1"


def without_times(line):
    return re.sub(r"\d+:\d\d", "TIME", line)


def test_lines_without_a_terminal(tmp_path):
    _, _, display = run(tmp_path, [train], at_once=1)
    said = display.stream.getvalue().splitlines()
    assert without_times(said[-1]) == "job0: done in TIME" and not any("\x1b" in line or "\r" in line for line in said)
    assert len(said) == len(set(said))


def screen(written, width):
    """What a terminal shows in the end, line by line, of what was written to it."""
    lines, row = {}, 0
    for sequence, number, text in re.findall(r"\x1b\[((\d*)[AKJ])|([^\x1b]+)", re.sub("\r(?!\n)", "", written)):
        if sequence.endswith("A"):
            row -= int(number)
        elif sequence == "J":
            lines = {place: line for place, line in lines.items() if place < row}
        elif not sequence:
            for part in text.split("\r\n")[:-1]:
                lines[row] = part or lines.get(row, "")
                row += 1
            if not text.endswith("\r\n"):
                lines[row] = text.split("\r\n")[-1]
        assert row >= 0 and all(len(line) < width for line in lines.values())
    return [lines[place] for place in sorted(lines)]


def test_lines_of_a_terminal(tmp_path, monkeypatch):
    """They are written over each other, and none is longer than the terminal is wide."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    written = []

    def read():
        with contextlib.suppress(OSError):  # once the other end is closed
            while True:
                written.append(os.read(ours, 1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        print("before", file=terminal, flush=True)
        _, _, display = run(tmp_path, [train, fail, train], LiveDisplay(terminal))
    reader.join()
    os.close(ours)
    written = b"".join(written).decode()
    assert display.live and "\x1b[3A" in written
    failed = "job1  failed: ValueError: no such thing"
    shown = [without_times(line) for line in screen(written, 40)]
    assert shown == ["before", "job0  done in TIME", failed, "job2  done in TIME"]


def test_where_there_is_no_room_for_all(tmp_path):
    jobs = [Job(f"job{number}", train, tmp_path / "log") for number in range(20)]
    for job in jobs[:12]:
        job.stage, job.started, job.ended = "done", 0.0, 50.0 + int(job.name[3:])
    jobs[12].stage, jobs[12].started, jobs[12].told = "training", 65.0, {"updates": 5, "total": 10, "loss": 2.0}
    assert lines_of(jobs, 30)[0] == "job0   done in 0:50" and len(lines_of(jobs, 30)) == 20
    running = "job12   50%  5 of 10 updates  loss 2"
    assert lines_of(jobs, 4) == ["job10  done in 1:00", "job11  done in 1:01", running, "10 done, 7 waiting"]
    jobs[3].stage, jobs[3].failure = "failed", "why"
    assert lines_of(jobs, 4)[0] == f"job3   failed: why ({tmp_path / 'log'})"
    assert lines_of([], 4) == []


def test_the_time_left_follows_the_length_of_the_sequences():
    lengths = [2 + step // 10 for step in range(1000)]
    left = TimeLeft(lengths)
    assert left.seconds_after(0) is None
    for step in range(100):
        left.add(step, 9.0 if step < TimeLeft.WARM_UP else 0.01 + 0.002 * lengths[step])
    expected = sum(0.01 + 0.002 * length for length in lengths[100:])
    assert left.seconds_after(100) == pytest.approx(expected)
    assert left.seconds_after(1000) == 0
    constant = TimeLeft([7] * 50)
    for step in range(20):
        constant.add(step, 0.5)
    assert constant.seconds_after(20) == pytest.approx(15.0)


def test_times_are_read_as_on_a_clock():
    assert [clock(x) for x in (0, 7.4, 750, 11_100)] == ["0:00", "0:07", "12:30", "3:05:00"]
