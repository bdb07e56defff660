"""
Random calls, most of them wrong, of every compiled operator and of what calls them, under the sanitizers.

    PYTHONPATH=tests python tests/programs/fuzz_operators.py --calls 2000 --seed 0

A call ends in one of three ways: it is refused with an error, it returns what the definition returns for the same
arguments, or it is a fault: another result, a right call that is refused, or the end of the process. Prints how many
there were of each, and fails if there was a fault. The calls are made in another process, which is started again after
a crash.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from helpers.fuzz_targets import TARGETS, Call
from helpers.fuzz_wrong import harmless, spoil
from helpers.sanitized import sanitized_environment


def outcome(number: int, seed: int) -> tuple[str, str]:
    """Makes the call of this number; what was called, and how it ended."""
    draw = random.Random(f"{seed} {number}")
    torch.manual_seed(number)
    name = list(TARGETS)[number % len(TARGETS)]
    call = TARGETS[name](draw)
    right = draw.random() < 0.2
    count = 1 if right else draw.choice([1, 1, 1, 2, 3])
    for at in draw.sample(list(call.arguments), min(count, len(call.arguments))):
        x = call.arguments[at]
        call.arguments[at] = harmless(x, draw) if right else spoil(x, draw, "_cpu" in name, count == 1)
    return name, judge(call, right)


def judge(call: Call, right: bool) -> str:
    try:
        found = call.run(call.arguments)
    except Exception as error:
        return f"FAULT: a right call was refused: {error!r}" if right else "refused"
    try:
        expected = call.reference(call.arguments)
    except Exception as error:
        return f"FAULT: accepted, but the definition says {error!r}"
    for one, other in zip(found, expected, strict=True):
        if other is None:  # there is nothing to say about it
            continue
        if one.shape != other.shape or one.device != other.device:
            return f"FAULT: {tuple(one.shape)} on {one.device} in place of {tuple(other.shape)} on {other.device}"
        if not one.numel():
            continue
        atol = call.tolerance * max(1.0, other.double().square().mean().sqrt().nan_to_num().item())
        if not torch.allclose(one.double(), other.double(), rtol=0.0, atol=atol, equal_nan=True):
            return f"FAULT: off by {(one.double() - other.double()).abs().max().item()}, allowed are {atol}"
    return "right"


def work(first: int, calls: int, seed: int) -> None:
    for number in range(first, calls):
        print(number, end=" ", flush=True)
        print(*outcome(number, seed), flush=True)


def make_calls(calls: int, seed: int, environment: dict[str, str]) -> tuple[Counter, list[str]]:
    """How many calls of each target ended how; and of those that are faults, what happened."""
    counts, faults, first = Counter(), [], 0
    while first < calls:
        command = [sys.executable, __file__, "--work", str(first), "--calls", str(calls), "--seed", str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            first, _, ended = line.partition(" ")
            first = int(first) + 1
            name, _, how = ended.partition(" ")
            if not how:  # the process ended in the midst of it
                name, how = list(TARGETS)[(first - 1) % len(TARGETS)], f"FAULT: crashed: {done.stderr[-3000:]}"
            counts[name, how.partition(":")[0]] += 1
            if how.startswith("FAULT"):
                faults.append(f"call {first - 1} of {name}: {how}")
        if not done.stdout:
            raise RuntimeError(f"The process for the calls did not start: {done.stderr[-3000:]}")
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep the libraries with sanitizers for the next time")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.calls, options.seed)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        counts, faults = make_calls(options.calls, options.seed, sanitized_environment(folder))
    ends = ("right", "refused", "FAULT")
    print(f"{'':28}{''.join(f'{end:>10}' for end in ends)}")
    for name in (*TARGETS, "all"):
        number = [sum(counts[x, end] for x in TARGETS if name in (x, "all")) for end in ends]
        print(f"{name:28}{''.join(f'{n:>10}' for n in number)}")
    print(*faults, sep="\n", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
