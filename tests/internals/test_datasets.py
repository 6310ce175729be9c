"""What of a pipeline is not the same each time it is read."""

import pytest
import tensorflow as tf

from tfparallel.internals.datasets import unrepeatable_functions

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
