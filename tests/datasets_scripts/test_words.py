"""Groups and words against explicit permutation matrices."""

from itertools import product

import numpy as np
import pytest

from mamba3_nplr.datasets_scripts.counter_random import CounterRandom, checksum
from mamba3_nplr.datasets_scripts.groups import make_group
from mamba3_nplr.datasets_scripts.tasks import make_task
from mamba3_nplr.datasets_scripts.words import GroupWords
from mamba3_nplr.training.evaluation import join

ORDERS = {"z5": 5, "z1": 1, "s3": 6, "s4": 24, "s5": 120, "a4": 12, "a5": 60, "z2xs3": 12, "z2xz3xa4": 72}


def matrix(permutation):
    """M with M[p[i], i] = 1: it takes the i-th unit vector to the p[i]-th."""
    M = np.zeros((len(permutation), len(permutation)), dtype=int)
    M[permutation, np.arange(len(permutation))] = 1
    return M


@pytest.mark.parametrize("name", ORDERS)
def test_the_table_is_the_product_of_matrices(name):
    group = make_group(name)
    assert group.order == ORDERS[name]
    assert len({tuple(p) for p in group.elements}) == group.order
    assert (group.elements[0] == np.arange(group.elements.shape[1])).all()
    matrices = [matrix(p) for p in group.elements]
    rng = np.random.default_rng(0)
    for g, s in rng.integers(group.order, size=(200, 2)):
        assert (matrices[g] @ matrices[s] == matrices[group.table[g, s]]).all()


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "z1"])
def test_generators_generate(name):
    group = make_group(name)
    reached, waiting = {0}, [0]
    while waiting:
        element = waiting.pop()
        for g in group.generators:
            new = int(group.table[g, element])
            if new not in reached:
                reached.add(new)
                waiting.append(new)
    assert len(reached) == group.order


def test_numbering():
    s5, a5, z5 = make_group("s5"), make_group("a5"), make_group("z5")
    for group in (s5, a5):
        assert [tuple(p) for p in group.elements] == sorted(tuple(p) for p in group.elements)
    assert [s5.element_name(g) for g in s5.generators] == ["1 0 2 3 4", "0 2 1 3 4", "0 1 3 2 4", "0 1 2 4 3"]
    for amount, point in product(range(5), range(5)):
        assert z5.elements[amount, point] == (amount + point) % 5
    assert all(np.linalg.det(matrix(p)) > 0 for p in a5.elements)


@pytest.mark.parametrize("name", ["z5", "s5_generators", "a5"])
def test_labels_are_the_products_of_the_prefixes(name):
    task = make_task(name, start_length=None, length=20)
    arrays = task.arrays(seed=3, step=7)
    for word, labels in zip(arrays["input_ids"], arrays["labels"], strict=True):
        state = np.eye(5, dtype=int)
        for token, label in zip(word, labels, strict=True):
            state = matrix(task.algebra.elements[task.letters[token]]) @ state
            assert (state == matrix([int(x) for x in task.label_names[label].split()])).all()


def test_the_tasks_of_the_paper():
    z5, s5 = make_task("z5"), make_task("s5_generators")
    assert z5.model_fields == {"vocab_size": 5, "num_labels": 5}
    assert s5.model_fields == {"vocab_size": 4, "num_labels": 120}
    assert (z5.batch_size, z5.length, z5.total_steps) == (64, 64, 20_000)
    assert (s5.batch_size, s5.length, s5.total_steps) == (64, 64, 60_000)
    assert z5.baseline == 1 / 5 and s5.baseline == 1 / 60
    assert s5.splits == {"validation": 512} | {f"test_{2**i}": 512 for i in range(6, 12)}


def test_words_are_tested_at_the_length_of_training_and_beyond():
    task = make_task("z5", length=10)
    assert task.test_sizes == {f"test_{10 * 2**i}": 10 * 2**i for i in range(6)}
    assert task.settings["test_lengths"] == (10, 20, 40, 80, 160, 320)
    assert task.rows("test_40", 0, 2)["labels"].shape == (2, 40)
    assert make_task("z5", length=10, test_lengths=(4, 8)).test_sizes == {"test_4": 4, "test_8": 8}


def test_the_length_curriculum():
    task = make_task("s5_generators")
    lengths = [task.training_length(step) for step in range(0, 60_000, 1_000)]
    assert lengths[0] == 8 and lengths == sorted(lengths)
    assert task.training_length(35_999) == 63 and set(lengths[36:]) == {64}
    assert task.batch(0, 0)["input_ids"].shape == (64, 8)


def test_letters_are_uniform_and_independent():
    words = make_task("s5_generators", batch_size=4096, start_length=None).arrays(0, 0)["input_ids"]
    pairs = 4 * words[:, :-1] + words[:, 1:]
    counts = np.bincount(pairs.ravel(), minlength=16)
    expected = pairs.size / 16
    # Chi-square with 15 degrees of freedom is below 44 but for one time in 10,000.
    assert ((counts - expected) ** 2 / expected).sum() < 44


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_batches_do_not_depend_on_the_number_of_processes(world_size):
    geometric = make_task("s5_generators", start_length=3, growth="geometric")
    for task in (make_task("s5_generators"), geometric, make_task("shell"), make_task("shell_jitter")):
        whole = task.arrays(seed=1, step=2)
        parts = [task.arrays(1, 2, rank, world_size) for rank in range(world_size)]
        for name, column in whole.items():
            assert np.array_equal(join([part[name] for part in parts]), column)


def test_rows_do_not_depend_on_how_they_are_read():
    sets = (("s5_generators", "test_128"), ("z5", "train"), ("shell", "test_standard"), ("shell_jitter", "train"))
    for task_name, split in sets:
        task = make_task(task_name)
        whole = task.rows(split, 0, 12)
        parts = [task.rows(split, 0, 5), task.rows(split, 5, 12)]
        for name, column in whole.items():
            assert np.array_equal(join([part[name] for part in parts]), column)


def test_batches_are_the_same_everywhere():
    """A change of any of these is a change of every published figure."""
    found = {
        "words": checksum([*make_task("s5_generators").arrays(0, 50_000).values()]),
        "test": checksum([*make_task("z5").rows("test_256", 0, 64).values()]),
        "shell": checksum([*make_task("shell").arrays(5, 17).values()]),
        "jitter": checksum([*make_task("shell_jitter").arrays(5, 17).values()]),
    }
    assert {name: digest[:16] for name, digest in found.items()} == {
        "words": "e1c707395d424a62",
        "test": "86ccdeca74593fd9",
        "shell": "03f8f6e32260f703",
        "jitter": "e916c611216483a9",
    }


def test_lengths_that_grow_by_factors_fill_their_batches():
    task = make_task("a5", start_length=4, growth="geometric", total_steps=1000, curriculum_part=0.5)
    sizes = [task.arrays(0, step)["input_ids"].shape for step in (0, 125, 250, 375, 500, 999)]
    assert sizes == [(1024, 4), (512, 8), (256, 16), (128, 32), (64, 64), (64, 64)]
    lengths = [task.training_length(step) for step in range(1000)]
    assert lengths == sorted(lengths) and set(range(4, 65)) == set(lengths)
    letters = [task.arrays(0, step)["input_ids"].size for step in range(0, 500, 7)]
    assert min(letters) > 2048 and max(letters) == 4096


def test_a_curriculum_may_wait():
    settings = {"start_length": 4, "total_steps": 1000, "curriculum_start": 0.2, "curriculum_part": 0.6}
    lengths = [make_task("a5", **settings).training_length(step) for step in range(1000)]
    assert set(lengths[:201]) == {4} and lengths[400] == 34 and set(lengths[600:]) == {64}
    assert lengths == sorted(lengths)


def test_streams_do_not_overlap():
    streams = [
        CounterRandom(*key, first_row=0, rows=64, numbers=64).words.ravel()
        for key in [("train", 0, 0), ("train", 0, 1), ("train", 1, 0), ("test", 0, 0)]
    ]
    everything = np.concatenate(streams)
    assert len(np.unique(everything)) == len(everything)
    assert np.corrcoef(streams[0].astype(float), streams[3].astype(float))[0, 1] < 0.05


def test_random_numbers():
    random = CounterRandom("test", 0, 0, first_row=0, rows=1000, numbers=12)
    integers, uniform = random.integers(5, 6), random.uniform(6)
    assert set(integers.ravel()) == set(range(5)) and uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02 and abs(integers.mean() - 2) < 0.1
    with pytest.raises(ValueError, match="13 random numbers were drawn"):
        random.uniform(1)


def test_metrics():
    task = make_task("z5", length=4, start_length=None)
    rows = task.rows("train", 0, 2)
    predictions = rows["labels"].copy()
    predictions[0, 3] += 1
    found = task.metrics(predictions, rows)
    assert found == {"accuracy": 7 / 8, "final_accuracy": 0.5, "accuracy_by_position": [1, 1, 1, 0.5]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": "q8"}, "group='q8' is not allowed.*z5, s5"),
        ({"group": "s9"}, "362880 elements; at most 5040"),
        ({"length": -1}, "length=-1 is not allowed.*at least 1"),
        ({"inputs": "letters"}, "inputs='letters' is not allowed.*elements, generators"),
        ({"growth": "fast"}, "growth='fast' is not allowed.*linear, geometric"),
        ({"growth": "geometric"}, "growth='geometric' is not allowed without a start_length"),
        ({"start_length": 65}, "length=64 is not allowed.*at least 65"),
        ({"test_lengths": (64, 0)}, "test_lengths=0"),
        ({"test_lengths": ()}, r"test_lengths=\(\) is not allowed.*one or more"),
        ({"test_lengths": (64, 64)}, r"test_lengths=\(64, 64\) is not allowed.*different"),
        ({"group": "a2", "inputs": "generators"}, "no generators"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"curriculum_part": 0.0}, "curriculum_part=0.0"),
        ({"curriculum_start": -0.1}, "curriculum_start=-0.1 is not allowed.*below curriculum_part=0.6"),
        ({"curriculum_start": 0.6}, "curriculum_start=0.6 is not allowed.*below curriculum_part=0.6"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GroupWords(**settings)


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="task='s6' is unknown. The tasks are: z5, s5_generators"):
        make_task("s6")
    with pytest.raises(ValueError, match="no setting `lenght` .given: 3.. Did you mean `length`"):
        make_task("z5", lenght=3)
    with pytest.raises(ValueError, match="split='test_63' is unknown. The splits are: train, validation, test_64"):
        make_task("z5").rows("test_63", 0, 1)
    with pytest.raises(ValueError, match="rows 500 to 600 are not in test_64, which has 512"):
        make_task("z5").rows("test_64", 500, 600)
    with pytest.raises(ValueError, match="rank=2 is not allowed"):
        make_task("z5").batch(0, 0, rank=2, world_size=2)
    with pytest.raises(ValueError, match="batch_size=64 is not allowed.*multiple of world_size=3"):
        make_task("z5").batch(0, 0, rank=0, world_size=3)
    with pytest.raises(ValueError, match="step=-1"):
        make_task("z5").batch(0, -1)
