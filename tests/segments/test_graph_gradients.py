"""Gradients of a graph are made of the operations that a tape makes them of, and no others."""

import collections

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tfparallel.segments.graph_gradients import GraphGradients


def feed_forward():
    x = keras.Input([5])
    y = layers.LayerNormalization()(layers.Dense(4)(x))
    return keras.Model(x, layers.Dense(2)(ops.gelu(y) * 0.5 + 1.0))


def images():
    x = keras.Input([8, 8, 2])
    y = layers.MaxPooling2D()(layers.Conv2D(3, 3, activation="silu")(x)) / 3.0 - x[:, ::3, ::3, :1]
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(y)))


def attention():
    x = keras.Input([4, 6])
    y = layers.RMSNormalization()(x)
    y = x + layers.MultiHeadAttention(2, 3)(y, y, use_causal_mask=True)
    return keras.Model(x, ops.mean(y, 1) ** 2.0)


def branches():
    x = keras.Input([4])
    y = layers.Dense(4)(x)
    return keras.Model(x, ops.maximum(y, 0.1) * ops.stop_gradient(ops.tanh(y)) + ops.abs(y - 1.0))


def kinds(operations):
    counts = collections.Counter(op.type for op in operations)
    # What they take, names of values, and gradients of outputs that nobody uses.
    for type_ in ("Placeholder", "Const", "Identity", "ZerosLike"):
        del counts[type_]
    return counts


@pytest.mark.parametrize("build", [feed_forward, images, attention, branches])
def test_gradients_are_made_of_what_a_tape_makes_them_of(build):
    model = build()
    x = tf.TensorSpec([3, *model.input_shape[1:]])
    forward = tf.function(lambda x: [model(x)], autograph=False).get_concrete_function(x)
    own = GraphGradients(forward.graph, forward.graph.outputs, forward.graph.inputs)
    of_tape = []

    @tf.function(autograph=False)
    def backward(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        weights = [weight.value for weight in model.trainable_weights]
        gradients = tape.gradient(y, [x, *weights], output_gradients=tf.ones_like(y))
        of_tape.extend(graph.get_operations()[before + 1 :])  # behind the ones
        return gradients

    backward.get_concrete_function(x)
    assert kinds(own.graph.get_operations()) == kinds(of_tape)
