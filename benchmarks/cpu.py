"""
The block on a processor with each implementation of the scan, beside its floor and two blocks of transformers.

    python benchmarks/cpu.py [--repeats N] [--out results/cpu.json] [--plot docs/cpu.png]
    python benchmarks/cpu.py --against REVISION [--alone]

All variants take turns in one run, so that a noisy machine slows them alike; ratios are medians over the turns. The
floor is the block in eager torch with the scan replaced by the identity, which still asks for every gradient: what
remains are the projections and the coefficients. `floor_pruned` asks for that of u alone, so that torch skips the
backward pass of the coefficients, and of one projection too. `products` are the matrix products of the block alone,
below which no code for the rest can bring it. Peak memory is that of a pass in a process of its own.
The process keeps the memory that it frees, as train_hf.py does; `--default_malloc` leaves that to the system, which
costs the floor more than the compiled block. With `--against` the block with the compiled mixer takes turns with that
of another revision, as a ratio to it; with `--alone` too, it is the compiled mixer without its projections.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Mamba2Config, Qwen3NextConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from against import add_against, measure_against, serve
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning, Mamba3NPLRModel
from mamba3_nplr.modeling.mixers.mamba3_backends import MIXER_BACKENDS
from mamba3_nplr.modeling.mixers.mamba3_cpu import mixer_cpu
from mamba3_nplr.modeling.scan.dispatch import BACKENDS, Backend
from mamba3_nplr.modeling.scan.sequences import token_order
from mamba3_nplr.training.host_memory import keep_memory
from memory import added_memory
from record import add_out, heading, write_results

SHAPES = {
    "S5": (64, 64, {}),
    "shell": (32, 213, {}),
    "long": (8, 2048, {}),
    "LM": (1, 2048, {"hidden_size": 1024, "expand": 2, "head_dim": 64, "state_size": 64, "num_rope_pairs": 16}),
}
PEERS = ("mamba2", "gated_delta_rule")
# What the pictures and tables call the variants.
NAMES = {
    "cpu_fused": "compiled mixer",
    "cpu_scan": "compiled scan",
    "floor_pruned": "floor, fewer gradients",
    "chunkwise": "chunkwise torch",
    "chunkwise_compiled": "chunkwise torch, torch.compile",
    "reference": "definition, step by step",
    "mamba2": "transformers' Mamba-2",
    "gated_delta_rule": "transformers' gated delta rule",
}
OURS = ("cpu_fused", "cpu_scan")  # drawn first
SCANS = ("floor", "products", "floor_pruned", "reference", "chunkwise", "chunkwise_compiled", "cpu_scan", "cpu_fused")
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
SCALING_BATCH = 4


class Identity(torch.autograd.Function):
    """u, with a gradient of zeros for everything else that would have had one."""

    @staticmethod
    def forward(ctx, u, *others):
        ctx.others = others
        return u.view_as(u)

    @staticmethod
    def backward(ctx, grad):
        return (grad, *(None if x is None else x.new_zeros(()).expand_as(x) for x in ctx.others))


BACKENDS["floor"] = Backend(lambda inputs, initial, sequences, chunk_size: (Identity.apply(*inputs), initial.h))
BACKENDS["floor_pruned"] = Backend(lambda inputs, initial, sequences, chunk_size: (inputs.u, initial.h))
BACKENDS["cpu_scan"] = BACKENDS["cpu_fused"] = BACKENDS["cpu"]
MIXER_BACKENDS["cpu_fused"] = MIXER_BACKENDS["cpu"]


class MatrixProducts(torch.autograd.Function):
    """Those of linear maps on inputs that are there: forward and, in the backward pass, both gradients."""

    @staticmethod
    def forward(ctx, x, inputs, weights):
        ctx.inputs, ctx.weights = inputs, weights
        ctx.outputs = [rows @ weight.T for rows, weight in zip(inputs, weights, strict=True)]
        return ctx.outputs[-1]

    @staticmethod
    def backward(ctx, _):
        for rows, weight, grad in zip(ctx.inputs, ctx.weights, ctx.outputs, strict=True):
            grad @ weight, grad.T @ rows
        return None, None, None


class Products(torch.nn.Module):
    """The matrix products of a block, and nothing else."""

    def __init__(self, mixer):
        super().__init__()
        self.weights = [layer.weight.detach() for layer in mixer.modules() if isinstance(layer, torch.nn.Linear)]
        self.inputs = []

    def forward(self, x):
        tokens = x.shape[:-1].numel()
        if not self.inputs or len(self.inputs[0]) != tokens:
            self.inputs = [torch.randn(tokens, weight.shape[1]) for weight in self.weights]
        return MatrixProducts.apply(x, self.inputs, self.weights)


def make_block(variant: str, mixer):
    """The block of a variant, with the sizes of `mixer` and, where it is the same block, its weights."""
    config = mixer.config
    sizes = {"hidden_size": config.hidden_size}
    if variant == "mamba2":
        sizes |= {"num_heads": config.num_heads, "head_dim": config.head_dim, "state_size": config.state_size}
        return Mamba2Mixer(Mamba2Config(**sizes, expand=config.expand, n_groups=1, chunk_size=64), layer_idx=0)
    if variant == "gated_delta_rule":
        sizes |= {"linear_num_key_heads": config.num_heads, "linear_num_value_heads": config.num_heads}
        sizes |= {"linear_key_head_dim": config.state_size, "linear_value_head_dim": config.head_dim}
        return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), layer_idx=0)
    if variant == "products":
        return Products(mixer)
    block = copy.deepcopy(mixer)
    block.config.scan_backend = variant.removesuffix("_compiled")
    return torch.compile(block) if variant.endswith("_compiled") else block


def make_blocks(fields: dict, variants: list[str]) -> dict:
    mixer = Mamba3NPLRModel(Mamba3NPLRConfig(**fields)).layers[0].mixer
    return {variant: make_block(variant, mixer) for variant in variants}


def make_input(batch: int, length: int, fields: dict) -> torch.Tensor:
    return torch.randn(batch, length, Mamba3NPLRConfig(**fields).hidden_size, requires_grad=True)


def measure(block, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass; with one thread without those that others have its core."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    output = block(x)
    output = output[0] if isinstance(output, tuple) else output
    middle = clock()
    output.backward(torch.ones_like(output))
    return middle - start, clock() - middle


def measure_in_turns(x: torch.Tensor, blocks: dict, repeats: int) -> dict[str, list[tuple[float, float]]]:
    times = {variant: [] for variant in blocks}
    for turn in range(repeats + 1):
        for variant, block in blocks.items():
            measured = measure(block, x)
            if turn:  # the first turn warms up
                times[variant].append(measured)
    return times


def summarise(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    floor = [sum(pair) for pair in times["floor"]]
    return {
        variant: {
            "forward_ms": 1000 * statistics.median(forward for forward, _ in pairs),
            "backward_ms": 1000 * statistics.median(backward for _, backward in pairs),
            "ratio_to_floor": statistics.median(sum(pair) / base for pair, base in zip(pairs, floor, strict=True)),
        }
        for variant, pairs in times.items()
    }


def peak_memory(shape: str, variant: str) -> float:
    """Megabytes that one forward and backward pass adds to a process that has the block and its input."""
    command = [sys.executable, __file__, "--peak_memory", shape, variant]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak_memory(shape: str, variant: str) -> None:
    batch, length, fields = SHAPES[shape]
    block = make_blocks(fields, [variant])[variant]
    measure(block, make_input(1, 16, fields))  # loads what is loaded once
    block.zero_grad()
    x = make_input(batch, length, fields)
    print(added_memory(lambda: measure(block, x)))


def case_of(shape: str, part: str) -> Callable[[], float]:
    """Runs the block with the compiled mixer, or that mixer alone, once forward and backward; returns the seconds."""
    batch, length, fields = SHAPES[shape]
    block, x = make_blocks(fields, ["cpu_fused"])["cpu_fused"], make_input(batch, length, fields)
    if part == "alone":
        block, x = without_projections(block, x.detach()), None
    return lambda: sum(measure(block, x))


def without_projections(mixer, x: torch.Tensor) -> Callable[[None], torch.Tensor]:
    """The compiled mixer from what its projections make of x to what the last one takes."""
    with torch.no_grad():
        projections = [layer(x) for layer in (mixer.in_proj, mixer.k_proj, mixer.beta_proj)]
    state, order = mixer.initial_state(x), token_order(None, None, *x.shape[:2])

    def run(_: None) -> torch.Tensor:
        given = [projection.detach().requires_grad_() for projection in projections]
        return mixer_cpu(*given, mixer.weights(), state, order, **mixer.options)[0]

    return run


def compare_blocks(shape: str, repeats: int, variants: list[str]) -> dict:
    batch, length, fields = SHAPES[shape]
    results = summarise(measure_in_turns(make_input(batch, length, fields), make_blocks(fields, variants), repeats))
    for variant, row in results.items():
        row["peak_memory_mb"] = None if variant.endswith("_compiled") else peak_memory(shape, variant)
        memory = "-" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.0f}"
        times = f"{row['forward_ms']:.1f} | {row['backward_ms']:.1f} | {row['ratio_to_floor']:.2f}"
        print(f"| {shape} | {variant} | {times} | {memory} |", flush=True)
    return results


def measure_scaling(repeats: int) -> dict[int, float]:
    """Microseconds per token, forward and backward, by length; the lengths take turns."""
    block = make_blocks({}, ["cpu_fused"])["cpu_fused"]
    times = {length: [] for length in LENGTHS}
    for turn in range(repeats + 1):
        for length in LENGTHS:
            seconds = sum(measure(block, make_input(SCALING_BATCH, length, {})))
            if turn:
                times[length].append(1e6 * seconds / (SCALING_BATCH * length))
    return {length: statistics.median(found) for length, found in times.items()}


@torch.no_grad()
def measure_steps(repeats: int) -> dict[str, float]:
    """Microseconds of a single step at batch 1: of a block in eager torch and compiled, and of a whole policy."""
    policy = Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig()).eval()
    block, observation = policy.model.layers[0], torch.randn(policy.config.observation_size)
    eager, compiled = copy.deepcopy(block), copy.deepcopy(block)
    eager.mixer.config.scan_backend, compiled.mixer.config.scan_backend = "reference", "cpu"
    x = torch.randn(1, 1, policy.config.hidden_size)
    _, state = block.advance(x, None, None, None)
    steps = {
        "block_eager": lambda: eager.advance(x, state, None, None),
        "block_fused": lambda: compiled.advance(x, state, None, None),
        "select_action": lambda: policy.select_action(observation),
    }
    times = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            for _ in range(50):  # as in a loop, where the last step has left its weights in the cache
                start = time.perf_counter()
                step()
                if turn:
                    times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.5), width_ratios=[2, 1], layout="constrained")
    draw_ratios(left, results["blocks"])
    lengths = list(results["scaling"])
    right.plot(lengths, list(results["scaling"].values()), marker="o")
    right.set(xscale="log", xlabel="length", ylabel="microseconds per token", ylim=(0, None))
    right.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    right.minorticks_off()
    right.set_title("The compiled mixer by length")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_ratios(axes, blocks: dict) -> None:
    """Bars for each shape: ours, then the others, the fastest first; a variant has one colour in all of them."""
    names = [name for name in NAMES if any(name in found for found in blocks.values())]
    width, handles = 0.85 / len(names), []
    for number, name in enumerate(names):
        places, heights = [], []
        for shape, found in enumerate(blocks.values()):
            if name in found:
                order = sorted(set(found) & set(names), key=lambda other: (other not in OURS, ratio(found, other)))
                places.append(shape + (order.index(name) - (len(order) - 1) / 2) * width)
                heights.append(ratio(found, name))
        handles.append(axes.bar(places, heights, width, label=NAMES[name], color=f"C{number}"))
        if name in OURS:
            axes.bar_label(handles[-1], fmt="%.2f", fontsize=8)
    handles.append(axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="floor, without a scan"))
    limits = {shape: ratio(found, "products") for shape, found in enumerate(blocks.values()) if "products" in found}
    if limits:
        ends = [[shape + side * 0.47 for shape in limits] for side in (-1, 1)]
        limit = "limit: matrix products alone"
        handles.append(axes.hlines(list(limits.values()), *ends, color="black", linewidth=2, label=limit))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axes.set(yscale="log", ylabel="forward and backward, as a ratio to the floor", title="The block on a processor")
    axes.set_xticks(range(len(blocks)), blocks)
    axes.set_yticks([0.125 * 2**power for power in range(8)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def ratio(found: dict, variant: str) -> float:
    return found[variant]["ratio_to_floor"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the block with each implementation of the scan on a processor.")
    parser.add_argument("--repeats", type=int, default=9, help="turns that count (default: %(default)s)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--leave_out", nargs="+", default=[], choices=(*SCANS[1:], *PEERS), metavar="VARIANT")
    parser.add_argument("--default_malloc", action="store_true", help="do not keep memory that is freed")
    add_out(parser)
    add_against(parser)
    parser.add_argument("--alone", action="store_true", help="with --against: the mixer without its projections")
    parser.add_argument("--plot", type=Path, help="picture to draw; needs matplotlib")
    parser.add_argument("--peak_memory", nargs=2, metavar=("SHAPE", "VARIANT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.peak_memory:
        print_peak_memory(*given.peak_memory)
        return
    kept = not given.default_malloc and keep_memory()
    if given.serve:
        serve(case_of)
        return
    settings = {"repeats": given.repeats, "keeps_memory": kept}
    print(heading(**settings))
    if given.against:
        cases = [(shape, "alone" if given.alone else "block") for shape in given.shapes]
        write_results(given.out, measure_against(given.against, cases, given.repeats))
        return
    print("| shape | variant | forward (ms) | backward (ms) | ratio to floor | peak memory (MB) |")
    print("| --- | --- | --- | --- | --- | --- |")
    variants = [variant for variant in (*SCANS, *PEERS) if variant not in given.leave_out]
    results = {"settings": settings}
    results["blocks"] = {shape: compare_blocks(shape, given.repeats, variants) for shape in given.shapes}
    results["scaling"] = measure_scaling(given.repeats)
    print("\n| length | microseconds per token |\n| --- | --- |")
    for length, microseconds in results["scaling"].items():
        print(f"| {length} | {microseconds:.2f} |")
    results["steps"] = measure_steps(given.repeats)
    print("\n| single step | microseconds |\n| --- | --- |")
    for name, microseconds in results["steps"].items():
        print(f"| {name} | {microseconds:.0f} |")
    write_results(given.out, results)
    if given.plot:
        draw(results, given.plot)


if __name__ == "__main__":
    main()
