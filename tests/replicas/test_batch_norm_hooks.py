"""Synchronised BatchNorm: what it costs to trace, and its derivatives."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from benchmarks.tracing import noted_operations
from tests.helpers import in_float64
from tfparallel import MirroredStrategy

CPUS = ["CPU:0", "CPU:1"]
LAYERS = 8


def operations_of_a_first_step(strategy) -> int:
    """Of a model whose layers are normalised."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        parts = []
        for _ in range(LAYERS):
            parts += [layers.Dense(4, "relu"), layers.BatchNormalization(synchronized=True)]
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile("sgd", "mse", jit_compile=False)
    with noted_operations() as times_s:
        model.fit(np.zeros((4, 4), "float32"), np.zeros((4, 4), "float32"), verbose=0)
    return len(times_s)


@pytest.mark.turns
def test_two_replicas_make_at_most_twice_the_operations_of_one_device():
    assert operations_of_a_first_step(MirroredStrategy(CPUS)) <= 2 * operations_of_a_first_step(
        None
    )


def penalised(layer: layers.Layer, persistent: bool, rows: tf.Tensor) -> list[tf.Tensor]:
    """Gradients, of the layer's weights and a factor of `rows`, of a penalty on a gradient."""
    factor = tf.constant(1.5, rows.dtype)
    weights = [layer.gamma.value, layer.beta.value]
    with tf.GradientTape() as outer:
        outer.watch([factor, *weights])
        with tf.GradientTape(persistent=persistent) as inner:
            x = rows * factor
            inner.watch(x)
            score = tf.reduce_sum(layer(x, training=True) ** 3)
        penalty = tf.reduce_sum(inner.gradient(score, x) ** 2)
    return outer.gradient(penalty, [factor, *weights])


@pytest.mark.parametrize("persistent", [False, True])
def test_second_derivatives_are_those_of_all_rows(persistent):
    with in_float64():
        rows = np.random.default_rng(0).normal(size=(4, 3))
        plain = layers.BatchNormalization()
        plain.build((None, 3))
        expected = tf.function(penalised)(plain, persistent, tf.constant(rows))
        strategy = MirroredStrategy(CPUS)
        with strategy.scope():
            layer = layers.BatchNormalization(synchronized=True)
            layer.build((None, 3))

        @tf.function
        def step():
            def own() -> list[tf.Tensor]:
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                start = tf.cast(2 * number, tf.int32)
                return penalised(layer, persistent, tf.constant(rows)[start : start + 2])

            found = strategy.run(own)
            return [strategy.reduce("SUM", each, axis=None) for each in found]

        for ours, theirs in zip(step(), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
