"""The program of two workers that make variables, over the ring or Horovod."""

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from benchmarks.network import sent_by_this_process
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests

_strategies: list = []


def answer(what: str, **options: Any) -> dict:
    """What `make` or `make_in_graph_of_session` says."""
    return {"weight": make, "graph of a session": make_in_graph_of_session}[what](**options)


def opened() -> tf.distribute.Strategy:
    """The strategy of this process."""
    if not _strategies:
        is_horovod = "HOROVOD_RANK" in os.environ
        kind = "HorovodStrategy" if is_horovod else "MultiWorkerMirroredStrategy"
        _strategies.append(getattr(tfparallel, kind)())
    return _strategies[0]


def make_in_graph_of_session() -> dict:
    """The types of the operations that a variable and a metric make in a graph of TensorFlow 1."""
    strategy = opened()
    with tf.Graph().as_default() as graph, strategy.scope():
        tf.Variable(lambda: tf.random.normal([3]))
        options = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        metric = tf.Variable(0.0, synchronization=options[0], aggregation=options[1])
        metric.read_value()
    return {"types": [operation.type for operation in graph.get_operations()]}


def make(seeds: list[int], shape: list[int], dtype: str) -> dict:
    """The weight of `shape` that each worker draws with its own seed, and what making it sent."""
    strategy = opened()
    rank = strategy.extended._id_in_cluster
    keras.utils.set_random_seed(seeds[rank])
    before = sent_by_this_process()
    with strategy.scope():
        weight = keras.Variable("random_normal", tuple(shape), dtype)
    # Of what is still on its way, an exchange of all workers waits for the end.
    strategy.extended._agreement.exchange("count bytes", None)
    value = weight.numpy().astype("float64")
    sent = sent_by_this_process() - before
    keras.utils.set_random_seed(seeds[0])
    expected = np.asarray(keras.Variable("random_normal", tuple(shape), dtype)).astype("float64")
    return {"is_that_of_rank_zero": bool((value == expected).all()), "bytes": sent}


if __name__ == "__main__":
    answer_requests(answer, lambda: open_logical_cpus(1))
