"""
The scan on a GPU, forward and backward, beside fla's Gated DeltaNet and the official Mamba-3 kernels where installed.

    python benchmarks/gpu.py [--shapes small language_model] [--out results/gpu.json]

Nothing is timed before its outputs, and for this package its gradients, agree with the float32 chunkwise scan. Every
comparison is between two implementations of one recurrence: ours with B = k and no carry against Gated DeltaNet, ours
without reflection against Mamba-3.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from mamba3_nplr.modeling.scan.definition import VECTORS, ScanInputs
from mamba3_nplr.modeling.scan.dispatch import scan
from mamba3_nplr.modeling.scan.random_inputs import random_inputs
from mamba3_nplr.modeling.scan.triton.operator import unavailable
from record import add_out, heading, write_results

# batch, length, heads, state, channels
SHAPES = {
    "small": (64, 512, 16, 16, 16),
    "few_rows": (1, 4096, 16, 16, 16),
    "language_model": (8, 2048, 32, 64, 64),
    "language_model_128": (4, 2048, 16, 128, 128),
}
# Of the RMS: 8 bits of mantissa, a few roundings.
TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}


class Variant(NamedTuple):
    """A function of scan inputs that returns y, and the form of the recurrence it runs."""

    form: str
    run: Callable[[ScanInputs], torch.Tensor]
    package: str = "mamba3_nplr"


def ours(backend: str):
    def run(inputs: ScanInputs) -> torch.Tensor:
        named = inputs._asdict()
        positional = [named.pop(name) for name in ("u", "B", "C", "log_decay", "write")]
        return scan(*positional, **named, backend=backend)[0]

    return run


def gated_deltanet(inputs: ScanInputs) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q=inputs.C, k=inputs.k, v=inputs.u, g=inputs.log_decay, beta=inputs.write, scale=1.0, initial_state=None
    )[0]


def official_mamba3(inputs: ScanInputs) -> torch.Tensor:
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    step_size = inputs.write + inputs.carry
    trapezoid = torch.logit(inputs.write / step_size)
    (heads, n), first = inputs.B.shape[2:], inputs.B.shape[:3]
    no_bias = inputs.B.new_zeros(heads, n)
    no_angles = inputs.B.new_zeros(*first, n // 2)
    gates = (x.transpose(1, 2).contiguous() for x in (inputs.log_decay, step_size, trapezoid))
    return mamba3_siso_combined(inputs.C, inputs.B, inputs.u, *gates, no_bias, no_bias, no_angles)


VARIANTS = {
    "reflection, chunkwise": Variant("contractive", ours("chunkwise")),
    "reflection, triton": Variant("contractive", ours("triton")),
    "Gated DeltaNet, triton": Variant("delta", ours("triton")),
    "Gated DeltaNet, fla": Variant("delta", gated_deltanet, "fla"),
    "Mamba-3, triton": Variant("rank0", ours("triton")),
    "Mamba-3, official": Variant("rank0", official_mamba3, "mamba_ssm"),
}


def make_inputs(shape, form: str, dtype: torch.dtype) -> ScanInputs:
    """Random coefficients without a skip connection; gates are float32 as in the models, and their step sizes not 0."""
    inputs = random_inputs(*shape, form, torch.float32, torch.Generator("cuda").manual_seed(0))
    if inputs.carry is not None:
        inputs = inputs._replace(write=inputs.write + 0.01, carry=inputs.carry + 0.01)
    vectors = {name: x.to(dtype) for name, x in inputs._asdict().items() if x is not None and name in VECTORS}
    return inputs._replace(**vectors, D=None)


def with_grad(inputs: ScanInputs) -> ScanInputs:
    return ScanInputs(*(None if x is None else x.detach().clone().requires_grad_() for x in inputs))


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).abs().max() / expected.square().mean().sqrt()).item()


def verify(variant: Variant, shape, dtype: torch.dtype) -> float:
    """The largest deviation from the float32 chunkwise scan, on a short piece of the shape."""
    short = (min(shape[0], 2), min(shape[1], 200), *shape[2:])
    inputs = make_inputs(short, variant.form, dtype)
    exact = with_grad(ScanInputs(*(None if x is None else x.float() for x in inputs)))
    expected = ours("chunkwise")(exact)
    inputs = with_grad(inputs)
    found = variant.run(inputs)
    worst = deviation(found, expected.detach())
    if variant.package == "mamba3_nplr":
        weights = torch.randn_like(expected)
        leaves = [x for x in exact if x is not None]
        wanted = torch.autograd.grad((expected * weights).sum(), leaves)
        grads = torch.autograd.grad((found.float() * weights).sum(), [x for x in inputs if x is not None])
        worst = max([worst, *(deviation(*pair) for pair in zip(grads, wanted, strict=True))])
    return worst


def measure(variant: Variant, shape, dtype: torch.dtype) -> dict[str, float]:
    """Median milliseconds of a forward pass, and of a forward and backward pass."""
    from triton.testing import do_bench

    inputs = with_grad(make_inputs(shape, variant.form, dtype))
    leaves = [x for x in inputs if x is not None]
    gradient = torch.randn_like(inputs.u)

    def forward_only():
        with torch.no_grad():
            variant.run(inputs)

    def both():
        torch.autograd.grad(variant.run(inputs), leaves, gradient)

    return {
        "forward_ms": do_bench(forward_only, return_mode="median"),
        "both_ms": do_bench(both, return_mode="median"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Verifies the scan on a GPU, then times it.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of u, B, C and k")
    add_out(parser)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This needs a CUDA or ROCm device, and there is none.")
    reason = unavailable(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        sys.exit(f"The Triton scan cannot run: {reason}.")
    dtype = getattr(torch, given.dtype)
    results, wrong = {}, []
    settings = {"device": torch.cuda.get_device_name(), "dtype": given.dtype}
    print(heading(**settings))
    print("| shape | variant | deviation | forward (ms) | forward and backward (ms) |\n| --- | --- | --- | --- | --- |")
    for shape in given.shapes:
        for name, variant in VARIANTS.items():
            if importlib.util.find_spec(variant.package) is None:
                print(f"| {shape} | {name} | - | {variant.package} is not installed | |")
                continue
            off = verify(variant, SHAPES[shape], dtype)
            if not off < TOLERANCE[dtype]:
                wrong.append(f"{name} is off by {off:.2g} on {shape}")
                print(f"| {shape} | {name} | {off:.1e} | not timed: it disagrees | |", flush=True)
                continue
            times = measure(variant, SHAPES[shape], dtype)
            results.setdefault(shape, {})[name] = {"deviation": off} | times
            numbers = f"{times['forward_ms']:.3f} | {times['both_ms']:.3f}"
            print(f"| {shape} | {name} | {off:.1e} | {numbers} |", flush=True)
    write_results(given.out, {"settings": settings, "results": results})
    if wrong:
        sys.exit("\n".join(["", *wrong]))


if __name__ == "__main__":
    main()
