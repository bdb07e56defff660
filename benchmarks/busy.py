"""
A training step of Mamba-3 + NPLR on a quiet machine and beside other work, as a ratio: with threads that spin while
they wait for each other, and with threads that soon sleep, as train_hf.py makes them.

    python benchmarks/busy.py [--turns N] [--seconds S] [--out results/busy.json]

The other work is one busy loop for each core, so a program that is slowed in proportion takes twice as long. Each
measurement is a process of its own, since the libraries read these settings when they are loaded; all take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from record import add_out, heading, write_results

SETTINGS = {
    "two threads, spinning": {"OMP_NUM_THREADS": "2"},
    "two threads, sleeping soon": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(seconds: float) -> float:
    """Milliseconds of a training step at the S5 shape."""
    from mamba3_nplr.training.host_memory import keep_memory
    from models import Trainee

    keep_memory()
    trainee, steps = Trainee("nplr", "S5"), 0
    for _ in range(3):
        trainee.step()
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        trainee.step()
        steps += 1
    return 1000 * (time.perf_counter() - start) / steps


def measure_beside(loops: int, settings: dict[str, str], seconds: float) -> float:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        command = [sys.executable, __file__, "--measure", "--seconds", str(seconds)]
        environment = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"} | settings
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return float(done.stdout.split()[-1])
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a training step beside other work.")
    parser.add_argument("--turns", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement (default: %(default)s)")
    add_out(parser)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(measure(given.seconds))
        return
    print(heading(turns=given.turns), flush=True)
    cores = len(os.sched_getaffinity(0))
    found = {name: {0: [], cores: []} for name in SETTINGS}
    for _ in range(given.turns):
        for name, settings in SETTINGS.items():
            for loops, times in found[name].items():
                times.append(measure_beside(loops, settings, given.seconds))
    results = {}
    print(f"| {cores} cores | quiet (ms) | beside {cores} busy loops (ms) | ratio |\n| --- | --- | --- | --- |")
    for name, times in found.items():
        quiet, busy = (statistics.median(x) for x in times.values())
        results[name] = {"variables": SETTINGS[name], "quiet_ms": quiet, "busy_ms": busy, "ratio": busy / quiet}
        print(f"| {name} | {quiet:.0f} | {busy:.0f} | {busy / quiet:.1f} |")
    settings = {"turns": given.turns, "seconds": given.seconds, "busy_loops": cores}
    write_results(given.out, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
