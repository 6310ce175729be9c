"""A dataset read by numbers of epochs and batches gives what reading it in order gives."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.parameter_server.batch_arguments import Hosts
from tfparallel.parameter_server.dataset_graph import DatasetGraph
from tfparallel.parameter_server.dataset_reader import DatasetReader
from tfparallel.parameter_server.worker_data import DatasetOnWorkers

EPOCHS, BATCHES = 3, 4


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.range(8)


# Whether an epoch that is passed over need not be read.
DATASETS = {
    "in order": (lambda: rows().batch(2), True),
    "shuffled": (lambda: rows().shuffle(8, seed=1).map(lambda i: 2 * i).batch(2).prefetch(1), True),
    "in files": (
        lambda: (
            rows()
            .interleave(lambda i: rows().skip(i).take(1))
            .apply(tf.data.experimental.assert_cardinality(8))
            .shuffle(8, seed=1)
            .batch(2)
        ),
        True,
    ),
    "repeated": (lambda: rows().take(4).shuffle(4, seed=1).repeat(2).batch(2), False),
    "endless": (lambda: rows().shuffle(8, seed=1).batch(2).repeat(), False),
    "cached": (lambda: rows().shuffle(8, seed=1).cache().batch(2), False),
}


def in_order(dataset: tf.data.Dataset) -> list:
    """Epochs as lists of batches; every epoch of an endless dataset is like its first one."""
    is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    epochs = [dataset.take(BATCHES) for _ in range(1 if is_endless else EPOCHS)]
    batches = [[batch.numpy().tolist() for batch in epoch] for epoch in epochs]
    return batches * EPOCHS if is_endless else batches


@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_their_numbers_in_whatever_order_they_are_asked_for(name):
    make, is_left_unread = DATASETS[name]
    dataset = make()
    graph = DatasetGraph.of(dataset)
    assert graph.is_left_unread == is_left_unread
    expected = in_order(dataset)
    # Forwards, passing over batches and epochs; again, as after a loss; and back to the start.
    for asked in ([(0, 1), (0, 3), (1, 2), (2, 0)], [(2, 1), (2, 1), (1, 3)], [(1, 0), (0, 0)]):
        reader = DatasetReader(graph, dataset.element_spec, "CPU:0", [BATCHES] * EPOCHS)
        for epoch, number in asked:
            assert reader.read(epoch, number).numpy().tolist() == expected[epoch][number]
            again = DatasetReader(graph, dataset.element_spec, "CPU:0", [BATCHES] * EPOCHS)
            batch = next(again.iterator_at(epoch, number))
            assert batch.numpy().tolist() == expected[epoch][number]


ONE_HOST = Hosts.of_one(0, "/job:localhost/replica:0/task:0/device:CPU:0")


def test_shuffling_goes_on_where_the_dataset_is_used_again():
    dataset, same = (rows().shuffle(8, seed=1).batch(8) for _ in range(2))
    expected = [next(iter(same)).numpy().tolist() for _ in range(3)]
    received = []
    for _ in range(3):
        source = DatasetOnWorkers(dataset, DatasetGraph.of(dataset), lambda worker: 0)
        batch = next(iter(source)).tensors(ONE_HOST)
        received.append(batch.numpy().tolist())
    assert received == expected
    assert len(np.unique(expected, axis=0)) == 3


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: rows().shuffle(8).batch(2),
        lambda: rows().filter(lambda i: i > 0).batch(2),
        lambda: rows().map(lambda i: tf.py_function(lambda v: v, [i], tf.int64)).batch(2),
        lambda: rows().map(lambda i: tf.random.uniform([])).batch(2),
        lambda: (
            rows()
            .flat_map(lambda i: rows().shuffle(8, seed=1))
            .apply(tf.data.experimental.assert_cardinality(64))
        ),
        lambda: rows().batch(2).map(lambda b: (b, tf.experimental.Optional.from_value(b))),
    ],
)
def test_the_chief_reads_where_two_readers_could_differ(dataset):
    tf.random.set_seed(None)  # with one, a shuffle has a seed
    assert DatasetGraph.of(dataset()) is None
