"""
Policies and classifiers as graphs that run without this package, and as ONNX files that run without torch.

    python -m mamba3_nplr.modeling.export CHECKPOINT OUT

writes three files: `sequence.onnx`, from whole sequences to the outputs at every position; `step.onnx`, from one input
and the state before it to its output and the state after it; `initial_state.npz`, the state before the first input.
"""

import argparse
import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import AutoConfig

from .families import FAMILIES, HEADS, load, own_name
from .recurrent_cache import LayerStates

SEQUENCE_FILE, STEP_FILE, STATE_FILE = "sequence.onnx", "step.onnx", "initial_state.npz"
INPUTS = {
    "tokens": "input_ids",
    "observations": "observations",
    "pixels": "observations",
    "embeddings": "inputs_embeds",
}
# What a graph is traced with. Sizes of 0 and 1 would be taken for fixed.
BATCH, LENGTH = 2, 3


def export_sequence(model: nn.Module) -> ExportedProgram:
    """
    The graph of a policy or classifier over whole sequences, of any batch and length: observations (batch, length,
    observation_size) to actions (batch, length, action_size), or input_ids (batch, length) to the logits of every
    prefix (batch, length, num_labels). An output depends on no later input, so that sequences of different lengths may
    be filled up at their ends with anything.

    The graph holds operators of torch only, and computes in float32, or float64 if the model does. The model stays as
    it is.
    """
    return trace(SequenceModule(model))


def export_step(model: nn.Module) -> ExportedProgram:
    """
    The graph of a single step, of any batch: an input of each row, (batch, observation_size) or (batch,), and the
    tensors of the state before it, to the output (batch, action_size or num_labels) and the tensors of the state after
    it, in the order of `initial_state`. Otherwise as `export_sequence`.
    """
    return trace(StepModule(model))


def initial_state(model: nn.Module, batch: int = 1) -> dict[str, torch.Tensor]:
    """The state before the first input of each row, by the names that its tensors have in `step.onnx`."""
    return StepModule(model).initial_state(batch)


def export_onnx(model: nn.Module, folder: str | Path) -> None:
    """
    Writes a policy or classifier into a folder as the files that this module's description names, in float32:
    onnxruntime does not have every operator in float64.

    In `sequence.onnx` and `step.onnx` the inputs and outputs have the names of the model's: `observations` and
    `actions`, or `input_ids` and `logits`. The tensors of a state are called as in `initial_state.npz`, such as
    `layer0_h`, those after a step `next_layer0_h`. In `initial_state.npz` they have one row; others are copies of it.
    """
    require_onnx()
    folder, step = Path(folder), StepModule(model, torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(SequenceModule(model, torch.float32), folder / SEQUENCE_FILE)
    write_onnx(step, folder / STEP_FILE)
    np.savez(folder / STATE_FILE, **{name: part.numpy() for name, part in step.initial_state(1).items()})


def require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX files need onnx and onnxscript: pip install 'mamba3_nplr[onnx]'.") from error


def write_onnx(module: "ExportedModule", path: Path) -> None:
    name, *state = module.example_inputs()
    program = trace(module)
    # The graph is traced once more here, and with gradients its loops would be others.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="# The axis name: batch will not be used")  # of a state: it is, once
        torch.onnx.export(
            program,
            f=path,
            input_names=[name, *state],
            output_names=[module.output_name, *(f"next_{part}" for part in state)],
            # Only for the names of the axes; that they are open is in the program.
            dynamic_shapes=open_shapes(module.open_axes, len(state)),
            external_data=False,
            verbose=False,
        )


def trace(module: "ExportedModule") -> ExportedProgram:
    inputs = tuple(module.example_inputs().values())
    axes = {axis: Dim(name) for axis, name in module.open_axes.items()}
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=open_shapes(axes, len(inputs) - 1))


def open_shapes(axes: dict, parts: int) -> tuple:
    """The open axes of the arguments of `forward`: those of the input, and the rows of all parts of a state."""
    return (axes, tuple({0: axes[0]} for _ in range(parts))) if parts else (axes,)


class ExportedModule(nn.Module):
    """
    A copy of a policy or classifier as it goes into a graph: on the processor, for evaluation, with the scan as its
    definition, in `dtype`, or else that of the model if it is at least float32.
    """

    open_axes: dict[int, str]  # the axes of the input whose size stays open, by name

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        super().__init__()
        if not hasattr(model, "head_name"):
            raise ValueError(
                f"{type(model).__name__} cannot be exported; it must be a policy (...ForBehaviorCloning) or a "
                "classifier (...ForSequenceClassification or ...ForTokenClassification)."
            )
        if not hasattr(model.config, "scan_backend"):
            raise ValueError(
                f"{type(model).__name__} cannot be exported: only models that run on the scan have a form for graphs."
            )
        self.dtype = dtype or torch.promote_types(model.dtype, torch.float32)
        model = copy.deepcopy(model).to("cpu", self.dtype).eval().requires_grad_(False)
        self.model, self.head, self.config = model.model, getattr(model, model.head_name), model.config
        self.config.scan_backend = "reference"
        self.input_name = INPUTS[self.config.input_type]
        self.output_name, self.output_size = model.output_name, model.output_size

    def run(self, inputs: torch.Tensor, states: LayerStates | None) -> torch.Tensor:
        """Inputs (batch, length, ...) to outputs (batch, length, ...), and `states` to those after the inputs."""
        hidden_states = self.model.run_blocks(self.model.embed(self.input_name, inputs, None), None, None, states)
        return self.head(hidden_states)[..., : self.output_size]

    def example_inputs(self) -> dict[str, torch.Tensor]:
        """What a graph is traced with: the input, and the tensors of a state if there is one, by name."""
        raise NotImplementedError

    def example(self, *shape: int) -> torch.Tensor:
        """An array of this shape, of tokens or of vectors."""
        if self.input_name == "input_ids":
            return torch.zeros(shape, dtype=torch.long)
        sizes = {"observations": self.config.observation_size, "inputs_embeds": self.config.hidden_size}
        return torch.zeros(*shape, sizes[self.input_name], dtype=self.dtype)


class SequenceModule(ExportedModule):
    open_axes = {0: "batch", 1: "length"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.run(inputs, None)

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {self.input_name: self.example(BATCH, LENGTH)}


class StepModule(ExportedModule):
    open_axes = {0: "batch"}

    def forward(self, inputs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = self.layer_states(inputs.shape[0], state)
        outputs = self.run(inputs[:, None], states)
        return outputs[:, 0], *named_parts(states).values()

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {self.input_name: self.example(BATCH)} | self.initial_state(BATCH)

    def layer_states(self, rows: int, state: Sequence[torch.Tensor]) -> LayerStates:
        """The states of the layers from their parts that hold anything."""
        parts, states = iter(state), LayerStates()
        for layer in self.model.layers:
            shapes = layer.mixer.state_shapes(rows)
            whole = (next(parts) if holds_anything(shape) else state[0].new_zeros(shape) for shape in shapes)
            states.append(type(shapes)(*whole))
        return states

    @torch.no_grad()
    def initial_state(self, rows: int) -> dict[str, torch.Tensor]:
        like = torch.zeros(rows, 1, self.config.hidden_size, dtype=self.dtype)
        parts = named_parts([layer.mixer.initial_state(like) for layer in self.model.layers])
        return {name: part.contiguous() for name, part in parts.items()}


def named_parts(states: Sequence[tuple]) -> dict[str, torch.Tensor]:
    """The tensors of the layers' states by name, without those that an option of the model leaves empty."""
    return {
        f"layer{number}_{name}": part
        for number, state in enumerate(states)
        for name, part in state._asdict().items()
        if holds_anything(part.shape)
    }


def holds_anything(shape: Sequence[int]) -> bool:
    """Whether part of a state with this shape, which starts with the number of rows, is not empty."""
    return all(size > 0 for size in tuple(shape)[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba3_nplr.modeling.export",
        description="Writes a policy or classifier as ONNX files, for whole sequences and for single steps.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, or repository of the Hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that the files are written to")
    given = parser.parse_args(arguments)
    try:
        require_onnx()
        export_onnx(load_model(given.checkpoint), given.out)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print(f"Wrote {', '.join(str(given.out / name) for name in (SEQUENCE_FILE, STEP_FILE, STATE_FILE))}")


def load_model(checkpoint: str) -> nn.Module:
    """The model of a checkpoint, as the class that it was saved as."""
    classes = [family.model(head) for family in FAMILIES for head in HEADS if head != "Model"]
    paths = {own_name(path): path for path in classes}
    saved_as = (AutoConfig.from_pretrained(checkpoint).architectures or [None])[0]
    if saved_as not in paths:
        raise ValueError(f"{checkpoint} holds a {saved_as}; it must be one of {', '.join(paths)}.")
    return load(paths[saved_as]).from_pretrained(checkpoint)


if __name__ == "__main__":
    main()
