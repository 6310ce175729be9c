"""What of a pipeline is not the same each time it is read."""

import pytest
import tensorflow as tf

from tfparallel.internals import datasets
from tfparallel.internals.datasets import unrepeatable_functions, unrepeatable_parts

Dataset = tf.data.Dataset
NUMBERS = Dataset.range(8)


def generated() -> Dataset:
    return Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec((), tf.int32))


def inside(function) -> Dataset:
    """A pipeline whose functions make pipelines."""
    return NUMBERS.interleave(lambda x: function(Dataset.range(x)), num_parallel_calls=2).batch(2)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (generated, "a generator or another function of Python"),
        (lambda: NUMBERS.map(lambda x: tf.numpy_function(abs, [x], x.dtype)).batch(2), "Python"),
        (lambda: NUMBERS.filter(lambda x: tf.random.uniform(()) < 0.5), "RandomUniform"),
        (
            lambda: NUMBERS.map(
                lambda x: tf.cond(x > 1, lambda: tf.random.normal(()), lambda: 0.0)
            ),
            "RandomStand",
        ),
        (lambda: inside(lambda each: each.shuffle(3)), "ShuffleDatasetV3 without a seed"),
        (lambda: inside(lambda each: each.map(abs, 2, deterministic=False)), "deterministic=False"),
    ],
)
def test_functions_that_may_do_otherwise_are_named(make, name):
    tf.random.set_seed(None)
    (received,) = unrepeatable_functions(make())
    assert name in received


@pytest.mark.parametrize(
    "make",
    [
        lambda: NUMBERS.filter(lambda x: tf.random.uniform((), seed=3) < 0.5).shuffle(3),
        lambda: NUMBERS.map(lambda x: tf.random.stateless_uniform((), [1, 2]), 2).repeat(2),
        lambda: inside(lambda each: each.shuffle(3, seed=1).map(abs, 2)),
    ],
)
def test_what_has_seeds_is_repeatable(make):
    tf.random.set_seed(None)
    assert unrepeatable_functions(make()) == []


def test_a_seed_of_all_is_one_of_each():
    tf.random.set_seed(1)
    assert unrepeatable_functions(NUMBERS.filter(lambda x: tf.random.uniform(()) < 0.5)) == []


def read_in_turn(deterministic: bool | None, numbers: Dataset = NUMBERS) -> Dataset:
    return numbers.interleave(Dataset.range, num_parallel_calls=2, deterministic=deterministic)


@pytest.mark.parametrize(
    "make",
    [
        lambda: read_in_turn(False).batch(2),
        lambda: read_in_turn(True, read_in_turn(False)),  # the one before, and not its follower
        lambda: read_in_turn(False, read_in_turn(True)),
        lambda: read_in_turn(False, generated().map(lambda x: tf.cast(x, tf.int64))),
        lambda: NUMBERS.map(abs, num_parallel_calls=2, deterministic=False).prefetch(1),
        lambda: NUMBERS.batch(2, num_parallel_calls=2, deterministic=False),
    ],
)
def test_parts_without_an_order_are_named(make):
    assert unrepeatable_parts(make()) == ["deterministic=False"]


@pytest.mark.parametrize("deterministic", [None, True])
def test_an_interleave_in_order_is_repeatable(deterministic):
    assert unrepeatable_parts(read_in_turn(deterministic).batch(2)) == []


def test_an_interleave_is_not_asked_for_its_order_at_the_cost_of_large_arrays(monkeypatch):
    monkeypatch.setattr(datasets, "_LARGEST_GRAPH_BYTES", 100)
    small = Dataset.from_tensor_slices(tf.zeros([12], tf.int64))
    assert unrepeatable_parts(read_in_turn(False, small)) == ["deterministic=False"]
    large = Dataset.from_tensor_slices(tf.zeros([13], tf.int64))
    assert unrepeatable_parts(read_in_turn(False, large)) == []
    table = tf.zeros([13], tf.int64)
    captured = NUMBERS.map(lambda x: tf.gather(table, x))
    assert unrepeatable_parts(read_in_turn(False, captured)) == []
