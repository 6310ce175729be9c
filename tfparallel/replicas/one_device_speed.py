"""How fast a model trains on one device alone: steps of a second model like it, beside it."""

import statistics
import time

import keras
import tensorflow as tf

from tfparallel.replicas.checking.rebuild import rebuild
from tfparallel.replicas.checking.step import TracedStep, values_of
from tfparallel.replicas.checking.traces import no_trace

_AT_LEAST_S, _FEWEST, _MOST = 0.5, 3, 100


def one_device_rows_per_s(
    model: keras.Model, strategy: tf.distribute.Strategy, spec: object, rows: int
) -> float:
    """Rows a second of steps on zeros; what they compute is thrown away.

    Nothing of `model`, or of what it draws at random, is changed. A second model must fit beside
    it.

    Args:
        model: built and compiled.
        strategy: that it was created under.
        spec: of a batch, a nest of `tf.TensorSpec`; whole shapes.
        rows: of it.

    Raises:
        ValueError: for models that cannot be made of their configuration.
    """
    batch = keras.tree.map_structure(lambda each: tf.zeros(each.shape, each.dtype), spec)
    with no_trace(model, strategy):
        alone = rebuild(model, None, batch, None)
        step, state = TracedStep(alone), values_of(alone)
        step.run(state, batch)  # traces
        return rows / _step_s(step, batch)


def _step_s(step: TracedStep, batch: object) -> float:
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < _FEWEST or (
        len(times_s) < _MOST and time.perf_counter() - began_s < _AT_LEAST_S
    ):
        started_s = time.perf_counter()
        step.repeat(batch)
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)
