"""Which metrics get the rows of all replicas; conformance cases compare them with one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel
from tests.conformance.cases.metric_states import (
    Batches,
    Counted,
    Largest,
    Last,
    MeanOfRows,
    OfNumbers,
    OfOneState,
    Smallest,
    SpreadOfBatch,
)
from tfparallel.replicas.metric_states import has_own_update, is_adding, update_arguments

LABELS, SCORES = tf.constant([0, 1, 2, 1]), tf.ones((4, 3))


class Masked(OfOneState):
    """A sum without a mask; with one, the mean of what it leaves."""

    def update_state(self, y_true, y_pred):
        mask = getattr(y_pred, "_keras_mask", None)
        if mask is None:
            self.state.assign_add(ops.sum(y_pred))
        else:
            mask = ops.cast(mask, y_pred.dtype)
            self.state.assign_add(ops.sum(y_pred[:, 0] * mask) / ops.sum(mask))


class WithAVariableOfTensorFlow(OfOneState):
    def __init__(self, name="own"):
        super().__init__(name)
        self.own = tf.Variable(0.0)

    def update_state(self, y_true, y_pred):
        self.own.assign_add(1.0)
        self.state.assign_add(ops.sum(y_pred))


class OfWholeNumbers(OfOneState):
    def update_state(self, number):
        self.state.assign(ops.maximum(self.state, ops.cast(number, self.state.dtype)))


class Raises(OfOneState):
    def update_state(self, y_true, y_pred):
        raise TypeError("not for these")


def added(metric, *args, **kwargs) -> bool:
    return is_adding(metric, update_arguments(args, kwargs, 4))


@pytest.mark.parametrize(
    ("metric", "arguments"),
    [
        (MeanOfRows(), (LABELS, SCORES)),
        (Counted("counted"), (tf.constant(3.0), tf.constant(4))),
        (keras.metrics.AUC(), (tf.ones(4), tf.ones(4))),
        (Masked("masked"), (LABELS, SCORES)),
    ],
    ids=["mean_of_rows", "counted", "of_keras", "without_a_mask"],
)
def test_sums_are_added_up(metric, arguments):
    assert added(metric, *arguments)


def masked_scores() -> tf.Tensor:
    scores = tf.identity(SCORES)
    scores._keras_mask = tf.constant([True, False, True, True])
    return scores


@pytest.mark.parametrize(
    ("metric", "arguments"),
    [
        (Largest("largest"), (LABELS, SCORES)),
        (Last("last"), (LABELS, SCORES)),
        (Batches(), (LABELS, SCORES)),
        (SpreadOfBatch(), (LABELS, SCORES)),
        (Smallest("smallest"), (SCORES,)),
        (OfNumbers("of_numbers"), (tf.constant(1.0),)),
        (Masked("masked"), (LABELS, masked_scores())),
        (WithAVariableOfTensorFlow(), (LABELS, SCORES)),
        (Raises("raises"), (LABELS, SCORES)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_no_sum_is_found_and_left_as_it_was(metric, arguments):
    before = [np.asarray(v) for v in metric.variables]
    assert not added(metric, *arguments)
    for value, variable in zip(before, metric.variables, strict=True):
        np.testing.assert_array_equal(value, variable)


def test_metrics_of_keras_are_not_tried():
    every = [each for each in vars(keras.metrics).values() if isinstance(each, type)]
    of_keras = [each for each in every if hasattr(each, "update_state")]
    assert len(of_keras) > 40
    assert not any(has_own_update(object.__new__(each)) for each in of_keras)


class Counts(keras.Sequential):
    def __init__(self, given):
        super().__init__(given)
        self.most = OfWholeNumbers("most")

    def train_step(self, data):
        logs = super().train_step(data)
        self.most.update_state(ops.shape(data[0])[0])
        return logs


def test_a_whole_number_of_each_replica_is_refused():
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Counts([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"'most' \(OfWholeNumbers\) must add up"):
        model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
