"""What of a pipeline is not the same each time it is read, and how its iterators go."""

import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiny_model
from tfparallel import MirroredStrategy
from tfparallel.internals import datasets, keras_epochs
from tfparallel.internals.datasets import (
    let_go_beside,
    unrepeatable_functions,
    unrepeatable_parts,
)

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


def test_another_thread_lets_go_of_an_iterator():
    iterator = iter(NUMBERS)
    let_go_beside(iterator)
    threads = []
    resource = weakref.ref(
        iterator._iterator_resource, lambda _: threads.append(threading.current_thread())
    )
    del iterator
    deadline = time.monotonic() + 20
    while resource() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert not thread.daemon  # a process that ends waits for it


def test_what_is_no_iterator_of_tensorflow_goes_as_it_does():
    batches = iter([1])
    let_go_beside(batches)
    assert next(batches) == 1


def test_each_epoch_of_a_fit_has_its_iterator_let_go_beside_it(monkeypatch):
    seen = []
    monkeypatch.setattr(keras_epochs, "let_go_beside", seen.append)
    with MirroredStrategy(2).scope():
        model = tiny_model()
        model.compile("sgd", "mse")
    x = np.zeros((8, *model.input_shape[1:]), "float32")
    y = np.zeros((8, *model.output_shape[1:]), "float32")
    data = (x[:4], y[:4])
    model.fit(x, y, batch_size=4, epochs=2, validation_data=data, verbose=0)
    assert len(set(map(id, seen))) == 4
    assert all(isinstance(each, tf.data.Iterator) for each in seen)
