"""Models that read pictures: the laws of observations, whatever form a picture has and however often it comes."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.family_cases import build_case
from helpers.scan_cases import error
from helpers.without_package import BLOCKER
from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning
from mamba3_nplr.modeling import export
from mamba3_nplr.modeling.losses import behavior_cloning_loss
from mamba3_nplr.modeling.pixel_encoder import PixelEncoder, find_equal_pictures

SHAPE = [3, 8, 16]
SIZE = 3 * 8 * 16
PIXELS = {"input_type": "pixels", "pixel_shape": SHAPE, "observation_size": SIZE}
FAMILIES = ["paper", "gdp_everything", "ids4"]


def make(case="paper", head="ForBehaviorCloning", **changes):
    return build_case(case, head, **PIXELS | changes)


def pictures(batch=3, length=9, distinct=5):
    """Some of them come several times."""
    known = torch.randint(0, 256, (distinct, SIZE), dtype=torch.uint8)
    return known[torch.randint(0, distinct, (batch, length))]


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_every_form_of_a_picture_is_the_same(case):
    model, seen = make(case), pictures()
    expected = model(observations=seen).actions
    assert expected.abs().max() > 0.01
    assert error(model(observations=seen.double()).actions, expected) < 1e-10
    assert error(model(observations=seen.view(3, 9, *SHAPE)).actions, expected) < 1e-10
    assert error(model(observations=pictures()).actions, expected) > 1e-3


@pytest.mark.parametrize("case", FAMILIES)
def test_equal_pictures_are_encoded_once_with_the_same_gradients(case, monkeypatch):
    model, seen = make(case), pictures()
    shapes = []
    encode = PixelEncoder.encode
    monkeypatch.setattr(PixelEncoder, "encode", lambda self, x: shapes.append(len(x)) or encode(self, x))
    results = []
    for observations in (seen, seen.double()):
        model.zero_grad()
        actions = model(observations=observations).actions
        actions.square().sum().backward()
        results.append([actions, *(x.grad for x in model.parameters() if x.grad is not None)])
    assert shapes == [5, 27]
    for found, expected in zip(*results, strict=True):
        assert error(found, expected) < 1e-10


def test_equal_pictures_are_found_exactly():
    seen = pictures(4, 10, 7).flatten(0, 1)
    distinct, index = find_equal_pictures(seen)
    assert len(distinct) == len(torch.unique(seen, dim=0)) and torch.equal(distinct[index], seen)
    # One byte makes another picture, wherever it is.
    for place in (0, 7, SIZE - 1):
        other = seen.clone()
        other[3, place] ^= 1
        distinct, index = find_equal_pictures(other)
        assert torch.equal(distinct[index], other)
    assert find_equal_pictures(torch.randint(0, 256, (6, SIZE), dtype=torch.uint8)) is None
    assert find_equal_pictures(seen.double()) is None and find_equal_pictures(seen[:1]) is None


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_pieces_padding_and_single_steps_are_the_whole(case):
    model, seen = make(case), pictures()
    expected = model(observations=seen).actions
    first = model(observations=seen[:, :4], use_cache=True)
    second = model(observations=seen[:, 4:], past_key_values=first.past_key_values)
    assert error(torch.cat([first.actions, second.actions], 1), expected) < 1e-10
    padded = torch.cat([pictures(3, 2), seen], 1)
    mask = torch.ones(3, 11)
    mask[:, :2] = 0
    assert error(model(observations=padded, attention_mask=mask).actions[:, 2:], expected) < 1e-10
    for forms in (lambda x: x.numpy(), lambda x: x.view(3, *SHAPE).numpy(), lambda x: x.double()):
        model.reset()
        steps = [torch.as_tensor(model.select_action(forms(x))) for x in seen.unbind(1)]
        assert error(torch.stack(steps, 1).double(), expected) < 1e-10
    model.reset()
    assert error(torch.as_tensor(model.select_action(seen[1, 0].view(SHAPE).numpy())), expected[1, 0]) < 1e-10


@torch.no_grad()
def test_packed_episodes_are_like_single_ones():
    model, seen = make(), pictures(1, 12)
    packed = model(observations=seen, cu_seqlens=torch.tensor([0, 5, 12])).actions
    single = [model(observations=x).actions for x in (seen[:, :5], seen[:, 5:])]
    assert error(packed, torch.cat(single, 1)) < 1e-10


def test_the_last_number_of_a_picture_is_the_cue():
    model, seen, labels = make(cue_weight=20.0), pictures(2, 6), torch.randn(2, 6, 2, dtype=torch.float64)
    for cue in (torch.zeros(6), torch.arange(6) >= 3):
        seen[..., -1] = cue
        output = model(observations=seen, labels=labels)
        expected = behavior_cloning_loss(output.actions, labels, cue.double().expand(2, 6), 20.0, None, None, None)
        assert torch.isclose(output.loss, expected)


@torch.no_grad()
def test_checkpoints(tmp_path):
    model, seen = make(), pictures()
    model.save_pretrained(tmp_path / "policy")
    expected = model(observations=seen).actions
    loaded = Mamba3NPLRForBehaviorCloning.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    assert loaded.config.pixel_shape == SHAPE and error(loaded(observations=seen).actions, expected) < 1e-10
    np.save(tmp_path / "seen.npy", seen.numpy())
    np.save(tmp_path / "expected.npy", expected.numpy())
    code = BLOCKER + (
        "import numpy as np, torch\nfrom transformers import AutoModel\n"
        "policy = AutoModel.from_pretrained('policy', trust_remote_code=True, dtype=torch.float64).eval()\n"
        "found = policy(observations=torch.from_numpy(np.load('seen.npy'))).actions.detach().numpy()\n"
        "assert abs(found - np.load('expected.npy')).max() < 1e-10\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_graphs_read_pictures_too():
    model, seen = make(num_hidden_layers=1), pictures().double()
    with torch.no_grad():
        expected = model(observations=seen).actions
    assert error(export.export_sequence(model).module()(seen), expected) < 1e-10


WRONG = [
    ({"pixel_shape": None}, "pixel_shape=None is not allowed.*channels, height and width"),
    ({"pixel_shape": [3, 8]}, "pixel_shape=.*channels, height and width"),
    ({"pixel_shape": [3, 8, 12]}, "pixel_shape=.*multiples of 8"),
    ({"pixel_shape": [0, 8, 16]}, "pixel_shape="),
    ({"observation_size": 16}, "observation_size=16 is not allowed: it must be 384, the numbers in pixel_shape"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_shapes_are_named(changes, message):
    with pytest.raises(Exception, match=message):
        Mamba3NPLRConfig(**PIXELS | changes)


def test_wrong_pictures_are_named():
    model = make()
    with pytest.raises(ValueError, match=rf"observations have shape \(3, 9, 16\).*observation_size={SIZE}"):
        model(observations=torch.zeros(3, 9, 16))
    with pytest.raises(ValueError, match=r"observation has shape \(2, 3, 8, 8\); it must be"):
        model.select_action(np.zeros((2, 3, 8, 8), dtype=np.uint8))
    tokens = make(head="ForSequenceClassification")
    with pytest.raises(ValueError, match="input_ids need input_type='tokens'; this model has input_type='pixels'"):
        tokens(torch.zeros(2, 3, dtype=torch.long))
    assert tokens(observations=pictures()).logits.shape == (3, 5)


def test_training_takes_encodings_around_their_mean():
    """Frames of a scene are nearly the same, and blocks would see little of what they differ in."""
    scene = torch.randint(0, 256, (1, SIZE), dtype=torch.uint8).repeat(40, 1)
    scene[:, 7] = torch.arange(40)
    model = make().train()
    [encoder] = [module for module in model.modules() if isinstance(module, PixelEncoder)]
    encoded = encoder(scene)
    assert (encoded.mean(0) - encoder.norm.bias).abs().max() < 1e-10
    for _ in range(300):
        encoder(scene)
    assert error(encoder.eval()(scene), encoded) < 0.05  # what was learned of them
    encoder.train()
    with torch.no_grad():
        before = encoder.norm.running_mean.clone()
        assert error(encoder(scene[:1]), encoder.eval()(scene[:1])) < 1e-10
        assert torch.equal(encoder.norm.running_mean, before)


def test_first_weights_of_the_norm_survive_an_empty_device(tmp_path):
    """Models are made on a device without memory, where values that a module sets itself are lost."""
    model = make()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    [encoder] = [module for module in loaded.modules() if isinstance(module, PixelEncoder)]
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty = empty.to_empty(device="cpu")
    empty.apply(empty._init_weights)
    for found in (encoder, *(module for module in empty.modules() if isinstance(module, PixelEncoder))):
        assert (found.norm.running_var == 1).all() and (found.norm.running_mean == 0).all()
