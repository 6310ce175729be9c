"""Metrics of a user's own, whose state may be anything: a maximum, a last value, an average."""

import keras
import numpy as np
from keras import ops

from tests.conformance.case import Run, case
from tests.helpers import ODD_ROWS, in_float64, lengthened, tiny_data, tiny_model

ATOL = 1e-12


class OfOneState(keras.Metric):
    """A metric that keeps one number, from `START` on."""

    START = 0.0

    def __init__(self, name: str):
        super().__init__(name=name)
        start = keras.initializers.Constant(self.START)
        self.state = self.add_weight(name="state", initializer=start)

    def result(self):
        return self.state.value

    def reset_state(self):
        self.state.assign(self.START)


class Largest(OfOneState):
    START = -3.0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.maximum(self.state, ops.max(y_pred)))


class Smallest(OfOneState):
    START = float("inf")

    def update_state(self, values):
        self.state.assign(ops.minimum(self.state, ops.min(values)))


class Last(OfOneState):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(ops.mean(y_pred[-1]))


class MovingAverage(OfOneState):
    START = 1.0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(0.9 * self.state + 0.1 * ops.mean(y_pred))


class Batches(keras.Metric):
    """Counts the batches, in whole numbers, from 1 on."""

    def __init__(self, name: str = "batches"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="ones", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1)

    def result(self):
        return ops.cast(self.count, "float64")

    def reset_state(self):
        self.count.assign(1)


class SpreadOfBatch(keras.metrics.Mean):
    """The mean over batches of a number of each."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        weights = ops.ones_like(y_pred[:, 0]) if sample_weight is None else sample_weight
        return super().update_state(ops.std(y_pred * ops.expand_dims(weights, 1)))


class MeanOfRows(keras.Metric):
    """What replicas add up: a sum over rows, and their number."""

    def __init__(self, name: str = "mean_of_rows"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.add(ops.sum(ops.max(y_pred, axis=-1)), ops.shape(y_pred)[0])

    def add(self, total, count):
        self.total.assign_add(total)
        self.count.assign_add(ops.cast(count, "int64"))

    def result(self):
        return self.total / ops.cast(self.count, self.total.dtype)


def _trained(run: Run, metrics, build=tiny_model) -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = tiny_data(ODD_ROWS)
    weights = np.linspace(0.1, 2, ODD_ROWS)
    return run.train(
        build=build,
        compile_options=lambda: {"loss": loss, **metrics()},
        sample_weight=weights,
        batch_size=11,
        validation_data=(x, y, weights),
        validation_batch_size=7,
    ).results()


@case(core=True, atol=ATOL)
def of_any_order(run: Run):
    """Also weighted, and with a last batch of a few rows."""
    with in_float64():
        return _trained(
            run,
            lambda: {
                "metrics": [Largest("largest"), Batches(), MeanOfRows()],
                "weighted_metrics": [SpreadOfBatch(name="spread"), Largest("largest_weighted")],
            },
        )


@case(atol=ATOL)
def of_batches_in_their_order(run: Run):
    with in_float64():
        return _trained(run, lambda: {"metrics": [Last("last"), MovingAverage("average")]})


class OfNumbers(MeanOfRows):
    """A mean of numbers of batches, each counted once."""

    def update_state(self, number):
        self.add(number, 1)


class Counted(MeanOfRows):
    """What is added is of a replica's rows."""

    def update_state(self, total, count):
        self.add(total, count)


class WithMetricsOfItsStep(keras.Sequential):
    """Metrics that its train_step updates, with rows and with numbers of a batch."""

    def __init__(self, given):
        super().__init__(given)
        self.smallest, self.of_numbers = Smallest("smallest"), OfNumbers("of_numbers")
        self.counted = Counted("counted")

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        scores = self(x)
        logs = super().train_step((x, y))
        loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True))
        right = ops.equal(ops.argmax(scores, axis=-1), ops.cast(y, "int64"))
        self.smallest.update_state(values=scores)
        self.of_numbers.update_state(loss)
        self.counted.update_state(ops.sum(ops.cast(right, scores.dtype)), ops.size(y))
        own = self.smallest, self.of_numbers, self.counted
        return {**logs, **{metric.name: metric.result() for metric in own}}


@case(atol=ATOL)
def in_a_train_step(run: Run):
    with in_float64():
        return _trained(run, dict, lambda: WithMetricsOfItsStep(lengthened(tiny_model()).layers))


class Watched(keras.layers.Layer):
    """A metric that is updated in the call of a layer."""

    def __init__(self):
        super().__init__()
        self.smallest = Smallest("smallest")

    def call(self, x):
        self.smallest.update_state(x)
        return x


def _watched_model() -> keras.Model:
    inputs, *hidden, last = keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)
    return keras.Sequential([inputs, *hidden, Watched(), last])


@case(atol=ATOL)
def in_a_layer(run: Run):
    with in_float64():
        return _trained(run, dict, _watched_model)
