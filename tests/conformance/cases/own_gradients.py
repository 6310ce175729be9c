"""Layers that say how a gradient is computed: exact where it is of rows, else refused."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.conformance.case import Run, case, claim
from tests.helpers import ODD_BATCH, ODD_ROWS, in_float64, tiny_data


@tf.custom_gradient
def _clipped_by_row(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 1e-2, axes=[1])


@tf.custom_gradient
def _clipped(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 1e-2)


def _model(function) -> keras.Model:
    """Of four layers, as many as any pipeline has stages."""
    hidden = [layers.Dense(5, "tanh"), layers.Dense(4, activation=function), layers.Dense(4)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, "softmax")])


@case(atol=1e-11)
def clipped_by_row(run: Run):
    """What comes back to a row is what does on one device, whatever the replica's share."""
    with in_float64():
        return run.train(
            build=lambda: _model(_clipped_by_row),
            compile_options=lambda: {"loss": "sparse_categorical_crossentropy"},
            rows=ODD_ROWS,
            batch_size=ODD_BATCH,
        ).results()


@claim()
def clipped_over_the_batch_is_refused(run: Run):
    """By name, before the first step."""
    with run.scope():
        model = _model(_clipped)
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    if run.row.num_replicas == 1:
        model.fit(*tiny_data(6), batch_size=6, verbose=0)
        return
    with pytest.raises(ValueError, match=r"model 'sequential.*tf\.custom_gradient.*mean_loss"):
        model.fit(*tiny_data(6), batch_size=6, verbose=0)
    assert model.optimizer.iterations.numpy() == 0


def _back(gradient):
    """An identity whose gradient is `gradient` of that of its output."""

    @tf.custom_gradient
    def function(x):
        return tf.identity(x), gradient

    return function


_at_most = _back(lambda upstream: tf.clip_by_value(upstream, -0.3, 0.3))
_of_norm_1 = _back(lambda upstream: upstream / (tf.norm(upstream) + 1e-9))


def _of_rows(y_true, y_pred):
    return _of_norm_1(tf.reduce_mean(tf.square(y_true - y_pred), axis=1))


def _mean(y_true, y_pred):
    return _at_most(tf.reduce_mean(tf.square(y_true - y_pred)))


def _root(y_true, y_pred):
    return _at_most(tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred))))


@case(atol=1e-11)
def losses_with_a_backward_pass_of_their_own(run: Run):
    """What comes back to them is what does on one device, whatever they make of it."""
    losses = {"rows": _of_rows, "mean": _mean, "root": _root}

    def build():
        x = keras.Input((6,))
        hidden = layers.Dense(4, "tanh")(layers.Dense(5, "tanh")(x))
        return keras.Model(x, {name: layers.Dense(2, name=name)(hidden) for name in losses})

    def data(rows):
        x, y = tiny_data(rows)
        return x, {name: x[:, i : i + 2] + y[:, None] for i, name in enumerate(losses)}

    with in_float64():
        return run.train(
            build=build,
            compile_options=lambda: {"loss": losses},
            data=data,
            rows=ODD_ROWS,
            batch_size=ODD_BATCH,
        ).results()
