"""Several runs on a terminal, each a line that is kept up to date; elsewhere a plain line for whatever happens."""

import os
import sys
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from .side_by_side import Job

INTERVAL = 0.2  # seconds between two pictures
PARTS = 10  # of a run, after each of which there is a plain line
WORTH_SAYING = 3  # seconds of a stage
UP, CLEAR_LINE, CLEAR_BELOW = "\r\x1b[{}A", "\x1b[K", "\x1b[J"


class LiveDisplay:
    """
    Args:
        stream: Where to write, by default the standard output.
    """

    def __init__(self, stream: IO[str] | None = None):
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.drawn = 0  # lines
        self.drawn_at = -INTERVAL
        self.said: dict[str, tuple] = {}

    def show(self, jobs: list["Job"]) -> None:
        if not self.live:
            self.say_news(jobs)
        elif time.monotonic() >= self.drawn_at + INTERVAL:
            self.draw(jobs)

    def finish(self, jobs: list["Job"]) -> None:
        """The last state of all of them stays."""
        if self.live:
            self.draw(jobs)
        else:
            self.say_news(jobs)
        self.drawn = 0

    def draw(self, jobs: list["Job"]) -> None:
        size = os.get_terminal_size(self.stream.fileno())
        lines = [line[: size.columns - 1] for line in lines_of(jobs, size.lines - 2)]
        up = UP.format(self.drawn) if self.drawn else ""
        self.stream.write(up + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
        self.stream.flush()
        self.drawn, self.drawn_at = len(lines), time.monotonic()

    def say_news(self, jobs: list["Job"]) -> None:
        for job in jobs:
            part = int(PARTS * job.told["updates"] / job.told["total"]) if job.stage == "training" else 0
            news = (job.stage, part)
            if job.stage != "waiting" and self.said.get(job.name) != news:
                print(f"{job.name}: {describe(job)}", file=self.stream, flush=True)
                self.said[job.name] = news


def lines_of(jobs: list["Job"], room: int) -> list[str]:
    """A line for each job or, where there is no room, for those that matter most, and the number of others."""
    if not jobs:
        return []
    shown = jobs
    if len(jobs) > room:
        # Those that run, that have failed, and that were done last.
        ranked = sorted(jobs, key=lambda job: (job.is_running, job.stage == "failed", job.ended or 0), reverse=True)
        matter = [job for job in ranked if job.stage != "waiting"][: max(1, room - 1)]
        shown = [job for job in jobs if job in matter]
    width = max(len(job.name) for job in shown)
    lines = [f"{job.name:<{width}}  {describe(job)}" for job in shown]
    others = [job.stage for job in jobs if job not in shown]
    if others:
        lines.append(", ".join(f"{others.count(stage)} {stage}" for stage in dict.fromkeys(others)))
    return lines


def describe(job: "Job") -> str:
    """What there is to say of a job, without its name."""
    if job.stage == "training":
        return describe_training(job.told)
    if job.stage == "failed":
        return f"failed: {job.failure} ({job.log})"
    if job.stage == "stopped":
        return f"stopped after {job.told.get('updates', 0):,} updates"
    if job.stage == "done":
        return f"done in {clock(job.ended - job.started)}"
    passed = time.monotonic() - job.since if job.is_running else 0
    return f"{job.stage} for {clock(passed)}" if passed >= WORTH_SAYING else job.stage


def describe_training(told: dict) -> str:
    words = [f"{told['updates'] / told['total']:4.0%}", f"{told['updates']:,} of {told['total']:,} updates"]
    if told.get("loss") is not None:
        words.append(f"loss {told['loss']:.4g}")
    if told.get("speed") is not None:
        words.append(f"{told['speed']:.3g} updates/s")
    if told.get("seconds_left") is not None:
        words.append(f"{clock(told['seconds_left'])} left")
    return "  ".join(words)


def clock(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:05:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
