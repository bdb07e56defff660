"""
A step of a whole policy in a control loop at batch 1, from a NumPy array to a NumPy array: in eager torch, by modules
of which each block is a compiled call, and by one compiled call for all of it.

    python benchmarks/step.py [--repeats N] [--count] [--out results/step.json]

All variants take turns in one run, so that a noisy machine slows them alike; the ratio is the median over the turns.
`--count` adds instructions and calls of malloc, which callgrind counts (see callgrind.py): it needs valgrind, and
minutes.
"""

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

import callgrind
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning
from record import add_out, heading, write_results

STEPS_IN_TURN, COUNTED_STEPS = 50, 500
ALLOCATORS = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")


def make_steps() -> dict:
    """What takes a step, by the name of its variant."""
    torch.manual_seed(0)
    observation = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    eager, modules, fused = (
        Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(scan_backend=backend)).eval()
        for backend in ("reference", "auto", "auto")
    )

    def step_by_modules():
        action, modules.policy_states = modules.next_action_by_modules(observation, modules.policy_states)
        return action

    return {
        "eager": lambda: eager.select_action(observation),
        "compiled_blocks": step_by_modules,
        "select_action": lambda: fused.select_action(observation),
    }


def measure(steps: dict, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of a step, by the median of each turn: their median, the least, and the ratio to the eager one."""
    times = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            found = [seconds(step) for _ in range(STEPS_IN_TURN)]
            if turn:  # the first turn warms up
                times[name].append(1e6 * statistics.median(found))
    return {
        name: {
            "microseconds": statistics.median(found),
            "least_microseconds": min(found),
            "ratio_to_eager": statistics.median(a / b for a, b in zip(found, times["eager"], strict=True)),
            "python_bytes": python_bytes(steps[name]),
        }
        for name, found in times.items()
    }


def seconds(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def python_bytes(step) -> int:
    """Bytes that Python and NumPy allocate for a step at its peak."""
    tracemalloc.start()
    for _ in range(3):
        step()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


def counts_of(name: str, folder: Path) -> dict[str, float]:
    """Instructions and allocations of a step, as callgrind counts them in a process of its own."""
    counted = callgrind.count([__file__, "--counted", name], folder)
    calls = callgrind.calls_in(counted)
    return {
        "instructions": callgrind.all_instructions(counted) / COUNTED_STEPS,
        "mallocs": sum(calls[name] for name in ALLOCATORS) / COUNTED_STEPS,
    }


def take_counted_steps(name: str) -> None:
    """What runs under callgrind, which counts after the first steps."""
    step = make_steps()[name]
    for _ in range(10):
        step()
    callgrind.start_counting()
    for _ in range(COUNTED_STEPS):
        step()
    callgrind.stop_counting()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a step of a whole policy in a control loop.")
    parser.add_argument("--repeats", type=int, default=40, help="turns that count (default: %(default)s)")
    parser.add_argument("--count", action="store_true", help="count instructions and allocations; takes minutes")
    parser.add_argument("--counted", metavar="VARIANT", help=argparse.SUPPRESS)
    add_out(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.counted:
        take_counted_steps(given.counted)
        return
    print(heading(repeats=given.repeats))
    results = measure(make_steps(), given.repeats)
    reason = callgrind.why_no_count() if given.count else "it was not asked for"
    if given.count and reason:
        print(f"Nothing is counted: {reason}.", file=sys.stderr)
    if reason is None:
        with tempfile.TemporaryDirectory() as folder:
            for name, row in results.items():
                row.update(counts_of(name, Path(folder)))
    print("| step | microseconds | least | ratio to eager | bytes of Python | instructions | mallocs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in results.items():
        counts = f"{row['instructions']:,.0f} | {row['mallocs']:.0f}" if "instructions" in row else "- | -"
        times = f"{row['microseconds']:.0f} | {row['least_microseconds']:.0f} | {row['ratio_to_eager']:.3f}"
        print(f"| {name} | {times} | {row['python_bytes']:,} | {counts} |", flush=True)
    write_results(given.out, {"settings": {"repeats": given.repeats}, "results": results})


if __name__ == "__main__":
    main()
