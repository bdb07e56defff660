"""
A training step of each model of the paper, on batches of two of its tasks, as a ratio to that of Mamba-3 + NPLR.

    python benchmarks/models.py [--repeats N] [--models NAME ...] [--out results/models.json]
    python benchmarks/models.py --against REVISION

All models take turns in one run, so that a noisy machine slows them alike; ratios are medians over the turns. The
memory is what a step adds at its peak to the resident memory before it, gradients and optimiser included. With
`--against` each step takes turns with that of another revision, as a ratio to it.

After each step come the products of matrices alone that the linear maps of the model make in a step, forward and
backward, for every token: what a step takes more than these is the price of everything else. A model that computes
what equal tokens share only once makes fewer of them.
"""

import argparse
import ctypes
import statistics
import time

import torch
from torch import nn
from transformers import AutoConfig

import mamba3_nplr
from against import add_against, measure_against, serve
from mamba3_nplr.configuration import presets
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.training.host_memory import keep_memory
from memory import added_memory
from record import add_out, heading, write_results

REFERENCE = "nplr"
# Beside the models of the paper, what norms and residual connection around a block cost.
BARE = {"block_norm": "none", "residual": False, "output_norm": True}
MODELS = presets.MODELS | {"nplr_bare": presets.ModelPreset("Mamba-3 + NPLR, bare", "mamba3_nplr", BARE)}
NAMES = [REFERENCE, *(name for name in MODELS if name != REFERENCE)]
# The task whose batches are trained on, and the head that it needs.
SHAPES = {"S5": ("s5_generators", "ForSequenceClassification"), "shell": ("shell", "ForBehaviorCloning")}
LAST_STEP = 59_999  # where the length of words has grown to 64


class Trainee:
    """A model with its optimiser and a batch."""

    def __init__(self, name: str, shape: str):
        task_name, head = SHAPES[shape]
        task = make_task(task_name)
        preset = MODELS[name]
        config = AutoConfig.for_model(preset.model_type, **(preset.fields_of(task.auto_class) | task.model_fields))
        model_class = getattr(mamba3_nplr, type(config).__name__.removesuffix("Config") + head)
        self.model = model_class(config).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.inputs = task.batch(seed=0, step=LAST_STEP)

    def step(self) -> float:
        """Seconds of one training step."""
        start = time.perf_counter()
        self.model(**self.inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def sizes(self) -> dict[str, int]:
        """Parameters, and numbers in the state of one sequence."""
        layers = self.model.model.layers
        parts = [torch.Size(shape).numel() for layer in layers for shape in layer.mixer.state_shapes(1)]
        return {"parameters": self.model.num_parameters(), "state": sum(parts)}


class MatrixProducts:
    """What the linear maps of a model multiply in one training step, and nothing else."""

    def __init__(self, trainee: Trainee):
        tokens = trainee.inputs["labels"].shape[:2].numel()
        linears = [module for module in trainee.model.modules() if isinstance(module, nn.Linear)]
        sizes = {size for linear in linears for size in (linear.in_features, linear.out_features)}
        vectors = {size: torch.randn(tokens, size) for size in sizes}
        given = trainee.model.get_input_embeddings()  # whose inputs have no gradient
        self.products = [
            (linear.weight.detach(), vectors[linear.in_features], vectors[linear.out_features], linear is not given)
            for linear in linears
        ]

    def run(self) -> float:
        """Seconds of all of them."""
        start = time.perf_counter()
        for weight, x, gradient, has_input_gradient in self.products:
            torch.mm(x, weight.T)
            torch.mm(gradient.T, x)
            if has_input_gradient:
                torch.mm(gradient, weight)
        return time.perf_counter() - start


def peak_memory(trainee: Trainee) -> float:
    """Megabytes that a step adds to the resident memory at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    return added_memory(trainee.step)


def measure(shape: str, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    memory, trainees, times, products = {}, {}, {name: [] for name in names}, {name: [] for name in names}
    for name in names:
        trainees[name] = Trainee(name, shape)
        memory[name] = peak_memory(trainees[name])  # the first step: it makes the gradients and moments too
    alone = {name: MatrixProducts(trainee) for name, trainee in trainees.items()}
    for _ in range(repeats):
        for name in names:
            times[name].append(trainees[name].step())
            products[name].append(alone[name].run())
    return {
        name: {
            "step_ms": 1000 * statistics.median(times[name]),
            "ratio": statistics.median(a / b for a, b in zip(times[name], times[REFERENCE], strict=True)),
            "products_ms": 1000 * statistics.median(products[name]),
            "ratio_to_products": statistics.median(a / b for a, b in zip(times[name], products[name], strict=True)),
            "peak_mb": memory[name],
            **trainees[name].sizes(),
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a training step of each model of the paper.")
    parser.add_argument("--repeats", type=int, default=7, help="turns that count (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, help="some of them only")
    add_out(parser)
    add_against(parser)
    given = parser.parse_args()
    if given.serve:
        keep_memory()
        serve(lambda shape, name: Trainee(name, shape).step)
        return
    names = [REFERENCE, *(name for name in given.models if name != REFERENCE)]
    print(heading(repeats=given.repeats))
    if given.against:
        cases = [(shape, name) for shape in SHAPES for name in names]
        write_results(given.out, measure_against(given.against, cases, given.repeats))
        return
    titles = ("shape", "model", "step (ms)", "ratio to NPLR", "matrix products (ms)", "ratio to these")
    titles += ("peak memory (MB)", "parameters", "state")
    print(f"| {' | '.join(titles)} |")
    print(f"|{' --- |' * len(titles)}")
    results = {}
    for shape in SHAPES:
        results[shape] = measure(shape, names, given.repeats)
        for name, row in results[shape].items():
            numbers = f"{row['step_ms']:.1f} | {row['ratio']:.2f} | {row['products_ms']:.1f}"
            numbers += f" | {row['ratio_to_products']:.2f} | {row['peak_mb']:.0f}"
            print(f"| {shape} | {name} | {numbers} | {row['parameters']:,} | {row['state']:,} |", flush=True)
    write_results(given.out, {"settings": {"repeats": given.repeats}, "results": results})


if __name__ == "__main__":
    main()
