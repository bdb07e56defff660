"""Converted models against the step formula of the official Mamba-3 module, written here on its own in numpy."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRModel
from mamba3_nplr.modeling.convert_official import config_from_official, convert_official, main

HIDDEN, HEADS, WIDTH, STATE = 12, 3, 8, 10
INNER = HEADS * WIDTH
LAYER = "backbone.layers.1.mixer."


def official_weights(rope_fraction=0.5, norm=True, dtype=torch.float64, state=STATE):
    """Random weights of an official module; nothing is left at its initial value."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape, mean=0.0, std=1.0):
        return (mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    pairs = int(state * rope_fraction) // 2
    weights = {
        "dt_bias": draw(HEADS, mean=-1.0),
        "B_bias": draw(HEADS, 1, state),
        "C_bias": draw(HEADS, 1, state),
        "D": draw(HEADS),
        "in_proj.weight": draw(2 * INNER + 2 * state + 3 * HEADS + pairs, HIDDEN, std=0.4),
        "B_norm.weight": draw(state, mean=1.0, std=0.5),
        "C_norm.weight": draw(state, mean=1.0, std=0.5),
        "out_proj.weight": draw(HIDDEN, INNER, std=0.2),
    }
    return weights | ({"norm.weight": draw(INNER, mean=1.0, std=0.5)} if norm else {})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_normalise(x, gain):
    return gain * x / np.sqrt(np.mean(x**2) + 1e-5)


def turn_pairs(vector, angles):
    turned = vector.copy()
    for i, angle in enumerate(angles):
        first, second = vector[2 * i], vector[2 * i + 1]
        turned[2 * i] = first * math.cos(angle) - second * math.sin(angle)
        turned[2 * i + 1] = first * math.sin(angle) + second * math.cos(angle)
    return turned


def heavy_tail(x):
    return 1 + x if x >= 0 else 1 / (1 - x)


def softplus(x):
    return math.log1p(math.exp(x))


class OfficialHead:
    """One head of the official module, which sees one token after another."""

    def __init__(self, weights, head, activation, floor):
        self.dt_bias, self.skip = weights["dt_bias"][head], weights["D"][head]
        self.key_bias, self.query_bias = weights["B_bias"][head, 0], weights["C_bias"][head, 0]
        self.gain = weights["norm.weight"][head * WIDTH :][:WIDTH] if "norm.weight" in weights else None
        self.activation = {"heavy_tail": heavy_tail, "softplus": softplus}[activation]
        self.floor = floor
        self.memory = np.zeros((WIDTH, len(self.key_bias)))
        self.last_key, self.last_value = np.zeros(len(self.key_bias)), np.zeros(WIDTH)
        self.angle = 0.0

    def step(self, gate, value, key, query, raw_dt, raw_a, raw_trap, raw_angle):
        dt = softplus(raw_dt + self.dt_bias)
        trap = sigmoid(raw_trap)
        self.angle = self.angle + dt * math.pi * np.tanh(raw_angle)
        key, query = turn_pairs(key + self.key_bias, self.angle), turn_pairs(query + self.query_bias, self.angle)

        alpha = math.exp(-max(self.activation(raw_a), self.floor) * dt)
        beta, gamma = (1 - trap) * dt * alpha, trap * dt
        before, now = np.outer(self.last_value, self.last_key), np.outer(value, key)
        self.memory = alpha * self.memory + beta * before + gamma * now
        self.last_key, self.last_value = key, value

        out = self.memory @ query + self.skip * value
        if self.gain is not None:
            out = rms_normalise(out, self.gain)
        return out * gate * sigmoid(gate)


def official_output(weights, inputs, activation="heavy_tail", floor=1e-4):
    """What the official module makes of `inputs` (batch, length, hidden)."""
    w = {key: weight.double().numpy() for key, weight in weights.items()}
    state = len(w["B_norm.weight"])
    ends = np.cumsum([INNER, INNER, state, state, HEADS, HEADS, HEADS])
    outputs = np.zeros(inputs.shape)
    for row, sequence in enumerate(inputs.double().numpy()):
        heads = [OfficialHead(w, head, activation, floor) for head in range(HEADS)]
        for t, token in enumerate(sequence):
            z, x, b, c, dt, a, trap, angle = np.split(w["in_proj.weight"] @ token, ends)
            b, c = rms_normalise(b, w["B_norm.weight"]), rms_normalise(c, w["C_norm.weight"])
            parts = []
            for h, head in enumerate(heads):
                mine = slice(h * WIDTH, (h + 1) * WIDTH)
                parts.append(head.step(z[mine], x[mine], b, c, dt[h], a[h], trap[h], angle))
            outputs[row, t] = w["out_proj.weight"] @ np.concatenate(parts)
    return torch.from_numpy(outputs)


def random_inputs(length=37):
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def assert_same_numbers(found, expected):
    assert expected.std() > 0.1  # otherwise the tolerance would say little
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key].dtype == expected[key].dtype, key
        assert torch.equal(found[key], expected[key]), key


def mixer_weights(model):
    return dict(model.layers[0].mixer.state_dict())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rope_fraction", [0.5, 1.0])
@pytest.mark.parametrize("activation", ["heavy_tail", "softplus"])
class TestOutput:
    def test_whole_sequence(self, activation, rope_fraction, norm):
        weights, inputs = official_weights(rope_fraction, norm), random_inputs()
        model = convert_official(weights, decay_activation=activation)
        with torch.no_grad():
            found = model(inputs_embeds=inputs).last_hidden_state
        assert_same_numbers(found, official_output(weights, inputs, activation))

    def test_token_by_token(self, activation, rope_fraction, norm):
        weights, inputs = official_weights(rope_fraction, norm), random_inputs()
        model, cache, found = convert_official(weights, decay_activation=activation), None, []
        for token in inputs.split(1, dim=1):
            with torch.no_grad():
                output = model(inputs_embeds=token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.last_hidden_state)
        assert_same_numbers(torch.cat(found, dim=1), official_output(weights, inputs, activation))


def test_output_of_several_chunks():
    weights, inputs = official_weights(), random_inputs(length=Mamba3NPLRConfig.chunk_size + 37)
    with torch.no_grad():
        found = convert_official(weights)(inputs_embeds=inputs).last_hidden_state
    assert_same_numbers(found, official_output(weights, inputs))


def test_decay_is_bounded_by_a_min():
    weights, inputs = official_weights(), random_inputs()
    with torch.no_grad():
        found = convert_official(weights, a_min=0.7)(inputs_embeds=inputs).last_hidden_state
    assert_same_numbers(found, official_output(weights, inputs, floor=0.7))
    assert (found - official_output(weights, inputs)).abs().max() > 1e-3


def test_default_activation_is_the_newest():
    assert config_from_official(official_weights()).decay_activation == "heavy_tail"


@pytest.mark.parametrize(("state", "rope_fraction", "pairs"), [(10, 0.5, 2), (10, 1.0, 5), (16, 0.5, 4), (2, 1.0, 1)])
def test_config_has_the_sizes_of_the_weights(state, rope_fraction, pairs):
    config = config_from_official(official_weights(rope_fraction, norm=False, state=state))
    assert (config.hidden_size, config.expand, config.num_heads, config.head_dim) == (HIDDEN, 2, HEADS, WIDTH)
    assert (config.state_size, config.num_rope_pairs) == (state, pairs)
    assert (config.output_norm, config.reflection_rank, config.input_type) == (False, 0, "embeddings")
    assert (config.num_hidden_layers, config.residual, config.use_rope) == (1, False, True)


def test_model_holds_a_trainable_copy():
    weights = official_weights()
    model = convert_official(weights)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.layers[0].mixer.D.data.zero_()
    assert_same_weights(weights, official_weights())


def two_layers():
    """The weights of a model with two Mamba-3 layers, the second of which is that of `official_weights`."""
    first = {f"backbone.layers.0.mixer.{key}": weight + 1 for key, weight in official_weights().items()}
    others = {"backbone.embedding.weight": torch.zeros(5, HIDDEN), "backbone.layers.10.mixer.D": torch.zeros(1)}
    return first | {LAYER + key: weight for key, weight in official_weights().items()} | others


@pytest.mark.parametrize("prefix", [LAYER, LAYER.removesuffix(".")])
def test_prefix_selects_one_module(prefix):
    assert_same_weights(mixer_weights(convert_official(two_layers(), prefix=prefix)), official_weights())
    assert config_from_official(two_layers(), prefix=prefix).num_heads == HEADS


@pytest.mark.parametrize("prefix", ["", "backbone.layers.2.mixer.", "backbone"])
def test_wrong_prefix_lists_the_right_ones(prefix):
    with pytest.raises(ValueError, match="missing .*in_proj.weight") as error:
        convert_official(two_layers(), prefix=prefix)
    assert f"prefix={prefix!r}" in str(error.value)
    assert f"'backbone.layers.0.mixer.', {LAYER!r}" in str(error.value)


REQUIRED = [key for key in official_weights() if key != "norm.weight"]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_weight_is_named(key):
    weights = official_weights()
    del weights[key]
    with pytest.raises(ValueError, match=f"missing {key}\\."):
        convert_official(weights)


def test_unexpected_weight_is_named():
    with pytest.raises(ValueError, match=r"unexpected in_proj\.bias\."):
        convert_official(official_weights() | {"in_proj.bias": torch.zeros(3)})


ROWS = len(official_weights()["in_proj.weight"])
WRONG_SHAPES = {
    "in_proj.weight": [(ROWS, 11), (ROWS + 4, HIDDEN), (ROWS - 2, HIDDEN), (ROWS,)],
    "dt_bias": [(HEADS, 1), (0,)],
    "B_bias": [(HEADS, STATE), (HEADS + 1, 1, STATE), (HEADS, 1, STATE + 1)],
    "C_bias": [(HEADS, 2, STATE), (HEADS, 1, STATE - 1)],
    "B_norm.weight": [(STATE, 1)],
    "C_norm.weight": [(STATE + 1,), ()],
    "D": [(HEADS + 1,)],
    "norm.weight": [(WIDTH,)],
    "out_proj.weight": [(HIDDEN, INNER, 1)],
}


@pytest.mark.parametrize(("key", "shape"), [(key, shape) for key, shapes in WRONG_SHAPES.items() for shape in shapes])
def test_wrong_shape_is_named(key, shape):
    with pytest.raises(ValueError, match="must") as error:
        convert_official(official_weights() | {key: torch.zeros(shape)})
    assert f"{key} has shape {shape}; " in str(error.value)


def test_wrong_shape_says_what_is_expected():
    with pytest.raises(ValueError, match=r"it must be \(3, 1, 10\): heads=3 by dt_bias, state=10 by B_norm\.weight\."):
        convert_official(official_weights() | {"C_bias": torch.zeros(HEADS, 1, STATE + 1)})


def test_width_must_divide_evenly():
    weights = official_weights(norm=False)
    more_heads = {"dt_bias": torch.zeros(5), "D": torch.zeros(5)}
    more_heads |= {key: torch.zeros(5, 1, STATE) for key in ("B_bias", "C_bias")}
    with pytest.raises(ValueError, match=r"dt_bias \(5,\); inner=24 must be a multiple of heads=5"):
        convert_official(weights | more_heads)
    fractional = {"out_proj.weight": torch.zeros(16, INNER), "in_proj.weight": torch.zeros(ROWS, 16)}
    with pytest.raises(ValueError, match=r"out_proj\.weight has shape \(16, 24\).*multiple of hidden=16"):
        convert_official(weights | fractional)


def test_mimo_is_refused():
    mimo = torch.zeros(HEADS, 4, WIDTH)
    with pytest.raises(ValueError, match=r"mimo_x with shape \(3, 4, 8\).*SISO"):
        convert_official(official_weights() | {"mimo_x": mimo, "mimo_z": mimo, "mimo_o": mimo})
    with pytest.raises(ValueError, match=r"B_bias with shape \(3, 4, 10\).*SISO"):
        convert_official(official_weights() | {"B_bias": torch.zeros(HEADS, 4, STATE)})


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_are_refused(groups):
    rows = ROWS + 2 * STATE * (groups - 1)
    with pytest.raises(ValueError, match=rf"in_proj\.weight has shape \({rows}, 12\): B and C in {groups} groups"):
        convert_official(official_weights() | {"in_proj.weight": torch.zeros(rows, HIDDEN)})


class TestCommand:
    def test_round_trip(self, tmp_path):
        source, out = tmp_path / "official.safetensors", tmp_path / "converted"
        save_file(two_layers(), source)
        command = [sys.executable, "-m", "mamba3_nplr.modeling.convert_official", source, out, "--prefix", LAYER]
        run = subprocess.run([*command, "--decay_activation", "softplus"], capture_output=True, text=True, check=True)
        assert run.stdout.count("\n") == 1
        for part in (f"Wrote {out}", "hidden_size 12", "3 heads of 8", "state_size 10", "float64"):
            assert part in run.stdout

        model, inputs = Mamba3NPLRModel.from_pretrained(out), random_inputs()
        assert_same_weights(mixer_weights(model), official_weights())
        with torch.no_grad():
            found = model(inputs_embeds=inputs).last_hidden_state
        assert_same_numbers(found, official_output(official_weights(), inputs, "softplus"))

    def test_options_reach_the_configuration(self, tmp_path):
        save_file(official_weights(), tmp_path / "official.safetensors")
        main([str(tmp_path / "official.safetensors"), str(tmp_path / "out"), "--a_min", "0.01"])
        config = Mamba3NPLRConfig.from_pretrained(tmp_path / "out")
        assert (config.a_min, config.decay_activation) == (0.01, "heavy_tail")

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, "mixed"])
    def test_keeps_values_and_dtypes(self, tmp_path, dtype):
        weights = official_weights(dtype=torch.bfloat16 if dtype == "mixed" else dtype)
        if dtype == "mixed":  # an official module made with dtype=torch.bfloat16 has these in float32
            single = official_weights(dtype=torch.float32)
            weights |= {key: single[key] for key in ("dt_bias", "B_bias", "C_bias", "D")}
        source, out = tmp_path / "official.safetensors", tmp_path / "out"
        save_file(weights, source)
        main([str(source), str(out)])
        written = load_file(out / "model.safetensors")
        assert_same_weights({key.removeprefix("layers.0.mixer."): x for key, x in written.items()}, weights)
        loaded = mixer_weights(Mamba3NPLRModel.from_pretrained(out))
        assert all(torch.equal(loaded[key].double(), weights[key].double()) for key in weights)
        if dtype != "mixed":
            assert loaded["in_proj.weight"].dtype == dtype

    def check_error(self, capsys, arguments, *parts):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert all(part in message for part in parts), message

    @pytest.mark.parametrize("name", ["official.pt", "official.bin", "official.safetensors"])
    def test_nothing_is_unpickled(self, tmp_path, capsys, name):
        torch.save(Trap(tmp_path / "sprung"), tmp_path / name)
        wanted = "not a safetensors file" if name.endswith(".safetensors") else "save_file"
        self.check_error(capsys, [tmp_path / name, tmp_path / "out"], name, wanted)
        assert not (tmp_path / "sprung").exists()
        assert not (tmp_path / "out").exists()
        with (tmp_path / name).open("rb") as file:
            torch.load(file, weights_only=False)
        assert (tmp_path / "sprung").exists()  # or the test would have shown nothing

    def test_errors_of_the_conversion(self, tmp_path, capsys):
        source, out = tmp_path / "official.safetensors", tmp_path / "out"
        save_file(two_layers(), source)
        self.check_error(capsys, [source, out], "missing", LAYER)
        self.check_error(capsys, [source, out, "--prefix", LAYER, "--a_min", "-1"], "a_min=-1.0", "at least 0")
        self.check_error(capsys, [tmp_path / "absent.safetensors", out], "absent.safetensors")

    def test_output_must_be_another_folder(self, tmp_path, capsys):
        source = tmp_path / "model.safetensors"
        save_file(official_weights(), source)
        before = source.read_bytes()
        (tmp_path / "file").touch()
        self.check_error(capsys, [source, tmp_path / "file"], "file", "folder")
        self.check_error(capsys, [source, tmp_path], str(tmp_path), "another folder")
        assert source.read_bytes() == before


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()
