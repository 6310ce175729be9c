"""Programs as keras.io writes them, tiny: parts that share weights, a teacher, a graph."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.helpers import ODD_ROWS

WORDS, LENGTH, NODES = 11, 5, 20


def _trained(run: Run, build, loss, data: dict) -> dict:
    options = {"compile_options": lambda: {"loss": loss()}, "data": None, "batch_size": 5}
    return run.train(build=build, **options, **data).results()


def _scores() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class MomentumTeacher(keras.Model):
    """A copy of the student, moved by hand after each step (BYOL, MoCo, DINO)."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = self._tower(), self._tower()
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False

    def _tower(self) -> keras.Model:
        return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        target = self.teacher(x)
        with tf.GradientTape() as tape:
            scores = self.student(x, training=True)
            distance = ops.mean(keras.losses.cosine_similarity(target, scores))
            loss = distance + self.compute_loss(x, y, scores)
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for own, other in zip(self.teacher.weights, self.student.weights, strict=True):
            own.assign(0.9 * own + 0.1 * other)
        return {"loss": loss, "distance": distance}


@case(long=True)
def momentum_teacher(run: Run):
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(ODD_ROWS, n)).astype("float32") for n in (5, 3))
    return _trained(run, MomentumTeacher, keras.losses.MeanSquaredError, {"x": x, "y": y})


def _sharp(run: Run) -> keras.Model:
    """Gradients where the loss is highest nearby (SAM), by the gradient of all rows."""
    all_rows = run.strategy.all_rows if run.strategy else lambda tensors: tensors

    class Sharp(keras.Model):
        def _gradients(self, x, y):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data):
            x, y = all_rows(data)
            _, gradients = self._gradients(x, y)
            moves = [0.5 * each / tf.linalg.global_norm(gradients) for each in gradients]
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_add(move)
            loss, gradients = self._gradients(x, y)
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_sub(move)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input((5,))
    return Sharp(inputs, layers.Dense(3)(layers.Dense(6, "tanh")(inputs)))


@case(long=True)
def sharpness_aware(run: Run):
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(ODD_ROWS, n)).astype("float32") for n in (5, 3))
    return _trained(run, lambda: _sharp(run), lambda: None, {"x": x, "y": y})


class NodesOfGraph(keras.Model):
    """A batch is numbers of nodes; the graph that they are of is a constant of the model."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(7)
        self.nodes = tf.constant(rng.normal(size=(NODES, 4)), tf.float32)
        self.edges = tf.constant(rng.integers(0, NODES, (2, 50)), tf.int32)
        self.hops, self.last = [layers.Dense(5, "tanh"), layers.Dense(5, "tanh")], layers.Dense(3)

    def call(self, numbers):
        x = self.nodes
        for hop in self.hops:
            sent = hop(ops.take(x, self.edges[0], axis=0))
            x = tf.math.unsorted_segment_mean(sent, self.edges[1], NODES)
        return self.last(ops.take(x, ops.reshape(numbers, (-1,)), axis=0))


@case(long=True)
def nodes_of_a_graph(run: Run):
    rng = np.random.default_rng(1)
    x = rng.integers(0, NODES, (ODD_ROWS, 1)).astype("int32")
    return _trained(run, NodesOfGraph, _scores, {"x": x, "y": rng.integers(0, 3, ODD_ROWS)})


class Words(layers.Layer):
    """Embeds words, and scores them by the same table."""

    def __init__(self):
        super().__init__(name="words")
        self.words, self.places = layers.Embedding(WORDS, 6), layers.Embedding(LENGTH, 6)

    def call(self, x, reverse=False):
        if reverse:
            return ops.matmul(x, ops.transpose(self.words.embeddings))
        return self.words(x) + self.places(ops.arange(LENGTH))


def _language_model() -> keras.Model:
    inputs, words = keras.Input((LENGTH,), dtype="int32"), Words()
    x = words(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(6)(layers.Dense(8, "gelu")(x)))
    return keras.Model(inputs, words(x, reverse=True))


@case(long=True)
def tied_language_model(run: Run):
    """Some of the words count only."""
    rng = np.random.default_rng(1)
    x, y = (rng.integers(0, WORDS, (ODD_ROWS, LENGTH)).astype("int32") for _ in range(2))
    counted = (rng.uniform(size=(ODD_ROWS, LENGTH)) < 0.4).astype("float32")
    return _trained(run, _language_model, _scores, {"x": x, "y": y, "sample_weight": counted})
