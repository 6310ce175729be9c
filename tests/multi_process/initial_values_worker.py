"""The program of two workers that make variables, over the ring or Horovod."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from benchmarks.network import sent_by_this_process
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests

_strategies: list = []


def answer(what: str, **options: Any) -> dict:
    """What the function for it says."""
    functions = {
        "weight": make,
        "graph of a session": make_in_graph_of_session,
        "exchanges": exchange,
        "meeting": meet_in_a_graph,
    }
    return functions[what](**options)


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


def exchange(count: int) -> dict:
    """What workers announce so many times, what that asks of the store, and what is left there."""
    agreement = opened().extended._agreement.sequence("test")
    asked: dict[str, list[str]] = {"put": [], "get": [], "delete": []}

    def noting(name: str) -> Callable:
        original = getattr(agreement.store, name)

        def call(key: str, *args: Any) -> Any:
            asked[name].append(key)
            return original(key, *args)

        return call

    with contextlib.ExitStack() as stack:
        for name in asked:
            patch = mock.patch.object(agreement.store, name, noting(name))
            stack.enter_context(patch)
        told = [agreement.exchange("count", [i, agreement.rank]) for i in range(count)]
    left = []
    for key in asked["put"][:15]:
        with contextlib.suppress(TimeoutError):
            agreement.store.get(key, 0.05)
            left.append(key)
    agreement.store.get(asked["put"][15], 30.0)  # it is there
    agreement.exchange("end", None)
    return {
        "is_right": told == [[[i, 0], [i, 1]] for i in range(count)],
        "requests": {name: len(keys) for name, keys in asked.items()},
        "first_left": left,
    }


def meet_in_a_graph(count: int) -> dict:
    """Whether so many operations of a step can wait for one another."""
    opened()
    barrier = threading.Barrier(count)

    def wait(number: np.ndarray) -> np.ndarray:
        del number
        return np.int64(barrier.wait(60.0))

    @tf.function
    def step(first: tf.Tensor) -> list[tf.Tensor]:  # in no order: they have no state
        numbers = [first + i for i in range(count)]
        return [tf.numpy_function(wait, [i], tf.int64, stateful=False) for i in numbers]

    places = step(tf.constant(0))
    return {"places": sorted(int(place) for place in places)}


if __name__ == "__main__":
    answer_requests(answer, lambda: open_logical_cpus(1))
