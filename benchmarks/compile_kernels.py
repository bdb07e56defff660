"""
Compiles every Triton kernel of the scan for real GPUs, with no GPU at hand, and prints what each one needs.

    python benchmarks/compile_kernels.py [--record] [--targets sm_90 gfx942] [--out results/kernels.json]

It fails if a kernel does not compile, or keeps more bytes outside of its registers than `results/kernels.json` says.
Bytes and operations a token and head are counted from the algorithm, not measured.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mamba3_nplr.modeling.scan.operator_arguments import SCAN_STATES, SCAN_TOKENS
from mamba3_nplr.modeling.scan.triton.kernels import KERNELS
from mamba3_nplr.modeling.scan.triton.launch import (
    NARROW_BLOCK,
    WIDEST_BLOCK,
    Settings,
    arguments,
    kernel_settings,
    make_settings,
    warps,
)
from record import write_results

RECORD = Path(__file__).parent.parent / "results" / "kernels.json"
TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SIZES = ((16, 16), (32, 32), (64, 64), (128, 128))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HALF = ("u", "B", "C", "k", "y", "dy", "du", "dB", "dC", "dk")  # in the dtype of the inputs
KEPT = ("kept", "dG")  # in that of matrix products; all else is float32
SEQUENCES = ("bounds", "order", "rows")  # given for packed and padded sequences only
# Bytes a token and head of other scans, forward and backward, in bf16.
ANCHORS = {
    (16, 16): {"Mamba-3": (318, 694), "Gated DeltaNet": (716, 1358), "DPLR": (1664, 4232)},
    (64, 64): {"Mamba-3": (1278, 2668), "Gated DeltaNet": (2204, 4914), "DPLR": (5888, 15392)},
}


class Configuration(NamedTuple):
    kernel: str
    n: int
    channels: int
    dtype: str
    block: int | None = None  # of channels, where it is not all of them
    padded: bool = False  # sequences with bounds and an order of their tokens, not rows

    def __str__(self) -> str:
        block = f" block {self.block}" if self.block else ""
        return f"{self.kernel} {self.n}/{self.channels} {self.dtype}{block}{' padded' if self.padded else ''}"


def configurations() -> list[Configuration]:
    found = []
    for n, channels in SIZES:
        small = make_settings(n, channels, torch.float32).small
        for dtype in DTYPES:
            if small:
                found += [Configuration(kernel, n, channels, dtype) for kernel in ("forward_kernel", "backward_kernel")]
                continue
            found.append(Configuration("solve_kernel", n, channels, dtype))
            for block in (WIDEST_BLOCK, NARROW_BLOCK):
                scans = ("forward_kernel", "backward_state_kernel")
                found += [Configuration(kernel, n, channels, dtype, block) for kernel in scans]
            found.append(Configuration("backward_chunk_kernel", n, channels, dtype))
        found.append(Configuration("step_kernel", n, channels, "fp32", min(channels, NARROW_BLOCK)))
    scans = ("solve_kernel", "forward_kernel", "backward_state_kernel", "backward_chunk_kernel")
    found += [Configuration(kernel, 64, 64, "bf16", padded=True) for kernel in scans]
    found += [Configuration(kernel, 16, 16, "bf16", padded=True) for kernel in ("forward_kernel", "backward_kernel")]
    return found


def settings_of(configuration: Configuration, target: GPUTarget) -> Settings:
    exact = "ieee" if target.backend == "hip" else "tf32x3"
    return make_settings(configuration.n, configuration.channels, DTYPES[configuration.dtype], exact)


def compile_kernel(configuration: Configuration, target: GPUTarget):
    settings, function = settings_of(configuration, target), KERNELS[configuration.kernel]
    known = {"length": "i32", "heads": "i32", "settings": kernel_settings(settings, configuration.block)}
    given = arguments(function, tensor_types(configuration, settings), **known)
    kinds = dict(leaves(given.values()))
    source = ASTSource(
        function,
        signature={name: signature(argument) for name, argument in given.items()},
        constexprs={place: kind for place, kind in kinds.items() if not isinstance(kind, str)},
        attrs={place: [["tt.divisibility", 16]] for place, kind in kinds.items() if str(kind).startswith("*")},
    )
    options = {"num_warps": warps(configuration.kernel, settings), "num_stages": 1, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def tensor_types(configuration: Configuration, settings: Settings) -> dict[str, str]:
    """The types of the tensors by name, of those that there are."""
    inputs = (*SCAN_TOKENS, *SCAN_STATES)
    alone = [name.removesuffix("_ptr") for name in KERNELS[configuration.kernel].arg_names if name.endswith("_ptr")]
    absent = {*SEQUENCES, "T"} if settings.small else {*SEQUENCES}  # of small states T is found where it is needed
    names = {*inputs, *(f"d{name}" for name in inputs), *alone} - absent
    types = {name: f"*{configuration.dtype}" if name in HALF + KEPT else "*fp32" for name in names}
    return types | {name: "*i64" for name in SEQUENCES if configuration.padded}


def leaves(given: Iterable) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Arguments with their places, and those in tuples of tensors with two numbers."""
    for place, argument in enumerate(given):
        if isinstance(argument, tuple) and not isinstance(argument, Settings):
            yield from (((place, field), kind) for field, kind in enumerate(argument))
        else:
            yield (place,), argument


def signature(argument) -> str | tuple:
    """The type of an argument; what is known when compiling, as None for a tensor that is not there, has no other."""
    if isinstance(argument, tuple) and not isinstance(argument, Settings):
        return type(argument)(*map(signature, argument))
    return argument if isinstance(argument, str) else "constexpr"


def resources(compiled, target: GPUTarget) -> dict[str, int]:
    """Registers of a thread, bytes of its memory outside of them (which is where spills go), shared bytes."""
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])
        spilled = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)[1])
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {"registers": registers, "spill_bytes": spilled, "shared_bytes": compiled.metadata.shared}


def traffic(n: int, channels: int, size: int) -> tuple[float, float]:
    """Bytes a token and head between memory and the kernels, forward and backward; reads from a cache do not count."""
    settings = make_settings(n, channels, torch.bfloat16 if size == 2 else torch.float32)
    inputs, gates, values = (3 * n + channels) * size, 16, channels * size
    state = n * channels * size / settings.CHUNK
    forward = inputs + gates + values + state
    backward = inputs + gates + values + state + inputs + gates
    if settings.small:
        return forward, backward
    blocks = settings.CHUNK // 16
    inverse = blocks * (blocks + 1) / 2 * 16 * 16 * 4 / settings.CHUNK
    first_dv = channels * 4 / settings.CHUNK
    solve = n * size + 8 + inverse
    state_gradients = 2 * n * size + values + 8 + inverse + state + first_dv
    return solve + forward + inverse, state_gradients + backward + inverse + state + first_dv


def operations(n: int, channels: int) -> tuple[int, int]:
    """Floating-point operations of the matrix products a token and head, forward and backward."""
    c = make_settings(n, channels, torch.bfloat16).CHUNK
    forward = 8 * c * n + 8 * c * channels + 8 * n * channels
    return forward, 32 * c * n + 20 * c * channels + 18 * n * channels


def launches(n: int, channels: int) -> tuple[int, int]:
    return (1, 1) if make_settings(n, channels, torch.float32).small else (2, 2)


def print_costs() -> None:
    print("Counted a token and head, bf16; other scans as compiled for sm_90\n")
    print("| n / P | launches | bytes | operations | Mamba-3 | Gated DeltaNet | DPLR |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for n, channels in SIZES:
        columns = [launches(n, channels), traffic(n, channels, 2), operations(n, channels)]
        columns += [ANCHORS.get((n, channels), {}).get(name) for name in ("Mamba-3", "Gated DeltaNet", "DPLR")]
        cells = ["-" if pair is None else f"{pair[0]:.0f} / {pair[1]:.0f}" for pair in columns]
        print(f"| {n} / {channels} | {' | '.join(cells)} |")
    print()


def compile_all(name: str, recorded: dict) -> tuple[dict, list[str]]:
    """What each kernel needs on a target, and what is wrong with it."""
    results, wrong = {}, []
    for configuration in configurations():
        try:
            found = resources(compile_kernel(configuration, TARGETS[name]), TARGETS[name])
        except Exception as error:  # a compiler fails in many ways, and the other kernels are to be seen too
            wrong.append(f"{configuration} does not compile for {name}: {error}")
            continue
        results[str(configuration)] = found
        used = warps(configuration.kernel, settings_of(configuration, TARGETS[name]))
        print(f"| {name} | {configuration} | {used} | {' | '.join(map(str, found.values()))} |", flush=True)
        allowed = recorded.get(str(configuration), {}).get("spill_bytes")
        if allowed is not None and found["spill_bytes"] > allowed:
            wrong.append(f"{configuration} spills {found['spill_bytes']} bytes on {name}; recorded are {allowed}")
    return results, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels for GPUs that need not be there.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: all")
    parser.add_argument("--record", action="store_true", help="write what was found, for later runs to compare with")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record (default: results/kernels.json)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    recorded = json.loads(given.out.read_text())["kernels"] if given.out.exists() else {}
    print(f"triton {triton.__version__}\n")
    print_costs()
    print("| target | kernel | warps | registers | spill bytes | shared bytes |\n| --- | --- | --- | --- | --- | --- |")
    every_wrong = []
    for name in given.targets:
        results, wrong = compile_all(name, {} if given.record else recorded.get(name, {}))
        every_wrong += wrong
        if given.record:
            recorded[name] = results
            write_results(given.out, {"triton": triton.__version__, "kernels": recorded})
    if every_wrong:
        sys.exit("\n".join(["", *every_wrong]))


if __name__ == "__main__":
    main()
