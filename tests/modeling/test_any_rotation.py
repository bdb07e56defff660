"""
One block holds any rotation of space, with weights made by hand: all 60 even permutations of five elements as letters,
which are the rotations of the icosahedron.

In four dimensions a rotation of space with -1 beside it is one reflection and a turn of each of two fixed planes. With
quaternions: it takes x to -q x* q*, a reflection takes x to -k x* k, and the planes of (1, i) and (j, k) turn by
x -> e^(ia) x e^(ib). So k = e^(-ia) q and q e^(-ia) q = e^(-ib) are asked for, and the latter has a solution for every
q: what it has of j and k is 2 (q_0 cos a + q_1 sin a) times that of q.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

from mamba3_nplr import Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.modeling.mixers.mamba3_numbers import NUMBERS

CONJUGATE = np.array([1, -1, -1, -1])
STEP_SIZE = 1.5  # so that angles up to pi are within reach of dt * omega


def times(p, q):
    a, b = p[0], p[1:]
    return np.concatenate([[a * q[0] - b @ q[1:]], a * q[1:] + q[0] * b + np.cross(b, q[1:])])


def rotation(q):
    """The matrix of x -> q x q* in space."""
    return np.stack([times(times(q, unit), q * CONJUGATE)[1:] for unit in np.eye(4)[1:]], axis=1)


def reflection_and_angles(q):
    """A direction k and the angles of two planes: first the planes turn, then k is reflected."""
    inverse = q * CONJUGATE  # what turns after a reflection turns back before it
    a = math.atan2(-inverse[0], inverse[1])
    turn = np.array([math.cos(a), -math.sin(a), 0, 0])
    turned = times(times(inverse, turn), inverse)
    b = -math.atan2(turned[1], turned[0])
    return times(turn, inverse), np.array([-(a + b), b - a])


def quaternions_of_a5(group):
    """A quaternion for each element: turns of order 2 and 3 whose product has order 5 generate both groups."""

    def order(g):
        power, count = g, 1
        while power:
            power, count = group.table[g, power], count + 1
        return count

    orders = [order(g) for g in range(group.order)]
    pairs = product(range(group.order), repeat=2)
    s, t = next((s, t) for s, t in pairs if (orders[s], orders[t], orders[group.table[s, t]]) == (2, 3, 5))
    between = -math.cos(math.pi / 5) / math.sin(math.pi / 3)  # cosine of the angle between their axes
    axis = np.array([between, math.sqrt(1 - between**2), 0])
    turns = {s: np.array([0, 1, 0, 0]), t: np.concatenate([[0.5], math.sin(math.pi / 3) * axis])}
    found, open_elements = {0: np.array([1.0, 0, 0, 0])}, [0]
    while open_elements:
        g = open_elements.pop()
        for letter, turn in turns.items():
            following = int(group.table[letter, g])
            if following not in found:
                found[following] = times(turn, found[g])
                open_elements.append(following)
    return np.stack([found[g] for g in range(group.order)])


@torch.no_grad()
def model_by_hand(quaternions):
    """It keeps the rotation as a matrix in the state, each of three heads reads one row, and the head compares."""
    letters, hidden = len(quaternions), 64
    config = Mamba3NPLRConfig(
        vocab_size=letters, num_labels=letters, hidden_size=hidden, expand=1, state_size=4, head_dim=16,
        num_rope_pairs=2, reflection_form="contractive", gate_form="exact", injection="delta", initial_state="learned",
    )  # fmt: skip
    model = Mamba3NPLRForSequenceClassification(config)
    block = model.model.layers[0]
    mixer = block.mixer
    for parameter in mixer.parameters():
        parameter.zero_()
    mixer.dt_bias.fill_(math.log(math.expm1(STEP_SIZE)))
    mixer.A_bias.fill_(-10.0)
    mixer.beta_proj.bias.fill_(10.0)
    model.get_input_embeddings().weight.copy_(0.1 * torch.eye(letters, hidden))
    parts = [reflection_and_angles(q) for q in quaternions]
    # The state turns against its frame, which is what Theta says.
    speeds = np.stack([(math.pi - angles) % (2 * math.pi) - math.pi for _, angles in parts]) / (STEP_SIZE * math.pi)
    shift = NUMBERS.angle_shift
    angles = np.arctanh(np.sign(speeds) * (np.abs(speeds) * (1 - shift) + shift))
    # Letters are linearly independent after the norm: projections can make anything of them.
    letter = block.mixer_norm(model.get_input_embeddings().weight).double()
    z_rows, angle_rows = slice(0, hidden), slice(-2, None)
    mixer.in_proj.weight[angle_rows] = weights_for(letter, torch.from_numpy(angles))
    mixer.in_proj.weight[z_rows] = weights_for(letter, torch.full((letters, hidden), 2.0))
    k = torch.tensor(np.stack([k for k, _ in parts]))
    mixer.k_proj.weight.copy_(weights_for(letter, k.repeat(1, config.num_heads)))
    read_matrix(model, torch.tensor(np.stack([rotation(q) for q in quaternions]), dtype=torch.float32))
    return model.eval()


def weights_for(letter, wanted):
    """The map, (outputs, hidden), that makes `wanted` (letters, outputs) of the letters."""
    return (torch.linalg.pinv(letter) @ wanted.double()).T.float()


def read_matrix(model, matrices):
    mixer, head = model.model.layers[0].mixer, model.score.weight
    head.zero_()
    for row in range(3):
        mixer.h0[row, 1:, :3] = torch.eye(3)
        mixer.C_bias[row, 0, 1 + row] = 1.0
        for column in range(3):
            # Twice, with both signs, so that the last norm takes no mean off; far above the letter's own embedding.
            entry = 3 * row + column
            for sign, place in ((1, entry), (-1, 9 + entry)):
                mixer.out_proj.weight[place, row * 16 + column] = sign * 100.0
                head[:, place] = sign * matrices[:, row, column]


@pytest.fixture(scope="module")
def task():
    return make_task("a5", test_lengths=(2048,))


@pytest.fixture(scope="module")
def quaternions(task):
    return quaternions_of_a5(task.algebra)


def test_the_rotations_are_those_of_the_group(task, quaternions):
    matrices = np.stack([rotation(q) for q in quaternions])
    products = np.einsum("gij,hjk->ghik", matrices, matrices)
    assert np.abs(products - matrices[task.algebra.table]).max() < 1e-12


def test_any_rotation_is_a_reflection_and_turns_of_two_planes():
    for q in np.random.default_rng(0).normal(size=(100, 4)):
        q = q / np.linalg.norm(q)
        k, angles = reflection_and_angles(q)
        planes = np.zeros((4, 4))
        for i, angle in enumerate(angles):
            cosine, sine = math.cos(angle), math.sin(angle)
            planes[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cosine, -sine], [sine, cosine]]
        wanted = np.zeros((4, 4))
        wanted[0, 0], wanted[1:, 1:] = -1, rotation(q)
        assert np.abs((np.eye(4) - 2 * np.outer(k, k)) @ planes - wanted).max() < 1e-12


def test_one_block_follows_all_even_permutations_of_five(task, quaternions):
    rows = task.rows("test_2048", 0, 8)
    with torch.no_grad():
        output = model_by_hand(quaternions)(torch.from_numpy(rows["input_ids"]), **task.forward_options)
    assert torch.equal(task.predictions(output), torch.from_numpy(rows["labels"]))
