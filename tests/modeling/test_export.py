"""Graphs of whole sequences and of single steps: what they compute, where they run, and what is in them."""

import subprocess
import sys
import textwrap

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from helpers.family_cases import build_case
from helpers.model_cases import OPTIONS, build
from helpers.scan_cases import error
from mamba3_nplr import (
    DeltaFamilyConfig,
    DeltaFamilyForTokenClassification,
    IDS4Config,
    IDS4ForBehaviorCloning,
    Mamba3NPLRConfig,
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRModel,
)
from mamba3_nplr.modeling import export

EXACT = OPTIONS["exact_tracking"] | {"vocab_size": 4, "num_labels": 24}
MODELS = {
    "paper": lambda: Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig()),
    "rank0": lambda: Mamba3NPLRForBehaviorCloning(Mamba3NPLRConfig(reflection_rank=0)),
    "exact_options": lambda: Mamba3NPLRForSequenceClassification(Mamba3NPLRConfig(**EXACT)),
    "delta_family": lambda: DeltaFamilyForTokenClassification(DeltaFamilyConfig(num_householder=2)).double(),
}
# Every term matters, which amplifies rounding: in float32 two orders of summation would differ by more than 1e-5.
SMALL_MODELS = {
    "two_blocks": lambda: build(Mamba3NPLRForBehaviorCloning),
    "delta_family": lambda: build_case("gdp_everything", "ForTokenClassification", num_hidden_layers=1),
}


@torch.no_grad()
def make(case):
    """A model of usual size whose parameters are all away from their neutral initial values."""
    torch.manual_seed(0)
    model = MODELS[case]().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By case, the folder that the command writes the ONNX files of its model to, when first asked for."""
    found = {}

    def folder(case):
        if case not in found:
            place = tmp_path_factory.mktemp(case)
            make(case).save_pretrained(place / "model")
            export.main([str(place / "model"), str(place / "onnx")])
            found[case] = place / "onnx"
        return found[case]

    return folder


@torch.no_grad()
def example(model, batch, length):
    """Inputs of a model, and what it gives at every position."""
    if model.config.input_type == "observations":
        inputs = torch.randn(batch, length, model.config.observation_size, dtype=model.dtype)
        return inputs, model(observations=inputs).actions
    inputs = torch.randint(0, model.config.vocab_size, (batch, length))
    if "Token" in type(model).__name__:
        return inputs, model(inputs).logits
    return inputs, model(inputs, output_prefix_logits=True).prefix_logits


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


@pytest.mark.parametrize("case", SMALL_MODELS)
def test_a_graph_equals_the_model_at_any_batch_and_length(case):
    model = SMALL_MODELS[case]()
    sequence, step = export.export_sequence(model), export.export_step(model)
    for batch, length in ((1, 1), (3, 1), (1, 5), (4, 37)):
        inputs, expected = example(model, batch, length)
        assert error(sequence.module()(inputs), expected) < 1e-10
        found, state = [], export.initial_state(model, batch).values()
        for x in inputs.unbind(1):
            output, *state = step.module()(x, *state)
            found.append(output)
        assert error(torch.stack(found, dim=1), expected) < 1e-10
    for program in (sequence, step):
        targets = {str(node.target) for graph in graphs(program.graph_module) for node in graph.nodes}
        assert not [x for x in targets if "mamba3_nplr" in x] and any(x.startswith("aten.") for x in targets)


def graphs(module):
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


@pytest.mark.parametrize("case", MODELS)
def test_onnx_equals_the_model_at_any_batch_and_length(case, folders):
    model, run = make(case), session(folders(case) / "sequence.onnx")
    [given] = run.get_inputs()
    assert given.shape[:2] == ["batch", "length"]
    for batch, length in ((1, 1), (3, 1), (1, 5), (4, 67)):
        inputs, expected = example(model, batch, length)
        [found] = run.run(None, {given.name: inputs.numpy()})
        assert found.shape == expected.shape and error(torch.tensor(found), expected) < 1e-5


@pytest.mark.parametrize("case", MODELS)
def test_onnx_steps_equal_the_model(case, folders):
    model, run = make(case), session(folders(case) / "step.onnx")
    first = np.load(folders(case) / "initial_state.npz")
    name, *parts = [x.name for x in run.get_inputs()]
    assert parts == list(first) == list(export.initial_state(model))
    assert [x.name for x in run.get_outputs()][1:] == [f"next_{part}" for part in parts]
    for batch in (1, 3):
        inputs, expected = example(model, batch, 50)
        found, state = [], [np.repeat(first[part], batch, axis=0) for part in parts]
        for x in inputs.unbind(1):
            output, *state = run.run(None, {name: x.numpy()} | dict(zip(parts, state, strict=True)))
            found.append(output)
        assert error(torch.tensor(np.stack(found, axis=1)), expected) < 1e-5


def test_phases_are_summed_in_float64(folders):
    graph = onnx.shape_inference.infer_shapes(onnx.load(folders("paper") / "sequence.onnx")).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    assert [types[node.input[0]] for node in nodes(graph) if node.op_type == "CumSum"] == [onnx.TensorProto.DOUBLE]


def test_onnx_holds_standard_operators_in_one_file(folders):
    for name in ("sequence.onnx", "step.onnx"):
        file = folders("paper") / name
        proto = onnx.load(file, load_external_data=False)
        onnx.checker.check_model(proto, full_check=True)
        assert {node.domain for node in nodes(proto.graph)} <= {"", "ai.onnx"} and not proto.functions
        assert not any(x.data_location == onnx.TensorProto.EXTERNAL for x in proto.graph.initializer)
    assert "Scan" not in {node.op_type for node in nodes(proto.graph)}  # a step is no loop


def nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


WITHOUT_TORCH = textwrap.dedent(
    """
    import sys
    for name in ("torch", "transformers", "mamba3_nplr", "onnx", "onnxscript"):
        sys.modules[name] = None  # importing it is an error

    import numpy as np
    import onnxruntime

    policy = onnxruntime.InferenceSession("step.onnx")
    state = dict(np.load("initial_state.npz"))
    actions = []
    for observation in np.load("observations.npy"):
        action, *after = policy.run(None, {"observations": observation[None], **state})
        state = dict(zip(state, after))
        actions.append(action[0])
    np.save("actions.npy", actions)
    """
)


def test_a_policy_runs_without_torch(folders):
    model, folder = make("paper"), folders("paper")
    observations, _ = example(model, 1, 20)
    np.save(folder / "observations.npy", observations[0].numpy())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    model.reset()
    expected = torch.stack([model.select_action(x) for x in observations[0]])
    assert error(torch.tensor(np.load(folder / "actions.npy")), expected) < 1e-5


def test_the_model_stays_as_it_is():
    model = make("rank0").to(torch.bfloat16).train()
    model.select_action(torch.randn(16))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    program, state = export.export_step(model), model.policy_states
    # Few processors compute in half precision: the copy is float32.
    assert program.module()(torch.randn(1, 16), *export.initial_state(model).values())[0].dtype == torch.float32
    assert model.config.scan_backend == "auto" and model.training and model.policy_states is state
    assert all(x.requires_grad for x in model.parameters())
    after = model.state_dict()
    assert all(after[name].dtype == x.dtype and torch.equal(after[name], x) for name, x in before.items())


def test_the_command_writes_these_files(folders):
    assert {path.name for path in folders("rank0").iterdir()} == {"sequence.onnx", "step.onnx", "initial_state.npz"}


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, capsys):
    model = build(Mamba3NPLRModel, dtype=torch.float32)
    with pytest.raises(ValueError, match="Mamba3NPLRModel cannot be exported; it must be a policy"):
        export.export_sequence(model)
    with pytest.raises(ValueError, match="IDS4ForBehaviorCloning cannot be exported: only models that run on the"):
        export.export_step(IDS4ForBehaviorCloning(IDS4Config(hidden_size=4, state_size=3)))
    model.save_pretrained(tmp_path / "model")
    for name, message in (
        ("model", "holds a Mamba3NPLRModel; it must be one of Mamba3NPLRForSequenceClassification, "),
        ("nothing", "nothing"),
    ):
        with pytest.raises(SystemExit):
            export.main([str(tmp_path / name), str(tmp_path / "out")])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'mamba3_nplr\[onnx\]'"):
        export.export_onnx(make("rank0"), tmp_path / "out")
