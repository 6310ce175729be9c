"""Layers that change weights of theirs in a forward pass do so once per batch, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case, claim
from tests.helpers import (
    BATCH,
    ODD_BATCH,
    Training,
    in_float64,
    tiny_compile_options,
    tiny_data,
)


class Counting(layers.Layer):
    """Counts its calls, in all kinds of variables, and computes with what it has counted."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)
        self.steps = self.add_weight(
            name="steps", initializer="zeros", trainable=False, dtype="int32"
        )
        self.pair = self.add_weight(name="pair", shape=(2,), initializer="ones", trainable=False)
        self.own = tf.Variable(0.0, trainable=False)

    def call(self, x, training=False):
        self.calls.assign_add(1)
        self.pair.assign(ops.stack([self.pair[1], self.pair[0] + self.pair[1]]))
        self.own.assign_add(2.0)
        if training:
            self.steps.assign_add(1)
        return x * (1 + 0.01 * self.calls) + 0.01 * self.own

    def compute_output_shape(self, shape):
        return shape


class Codebook(layers.Layer):
    """Adds the moving average of its inputs' mean, as it was before the batch."""

    def build(self, shape):
        self.average = self.add_weight(
            name="average", shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        before = ops.convert_to_tensor(self.average) + 0.0
        if training:
            self.average.assign(0.9 * self.average + 0.1 * ops.mean(ops.stop_gradient(x), axis=0))
        return x + before


class VectorQuantizer(layers.Layer):
    """Codes that move to the mean of the rows which chose them: a ratio of two moving sums.

    Source: van den Oord et al. 2017, appendix A, https://arxiv.org/abs/1711.00937
    """

    def __init__(
        self, num_codes: int = 4, trainable_codes: bool = False, first: bool = False, loss=ops.mean
    ):
        super().__init__()
        self.num_codes, self._trainable_codes, self._first = num_codes, trainable_codes, first
        self._loss = loss
        self.usage = keras.metrics.Sum(name="usage")

    def build(self, shape):
        size = (shape[-1], self.num_codes)
        start = np.random.default_rng(0).normal(size=size).astype("float32")
        options = {"shape": size, "initializer": lambda *_, **__: start}
        self.codes = self.add_weight(name="codes", trainable=self._trainable_codes, **options)
        self.sums = self.add_weight(name="sums", trainable=False, **options)
        self.sizes = self.add_weight(
            name="sizes", shape=(self.num_codes,), trainable=False, initializer="ones"
        )
        self.seen = self.add_weight(
            name="seen", initializer="zeros", trainable=False, dtype="int32"
        )

    def call(self, x, training=False):
        flat = ops.reshape(x, (-1, x.shape[-1]))  # positions of all rows
        distances = ops.sum(self.codes**2, 0) - 2 * ops.matmul(flat, self.codes)
        chosen = ops.one_hot(ops.argmin(distances, 1), self.num_codes)
        if training and self._first:
            self._update(flat, chosen)
        quantised = ops.reshape(ops.matmul(chosen, ops.transpose(self.codes)), ops.shape(x))
        if training and not self._first:
            self._update(flat, chosen)
        self.usage.update_state(ops.sum(chosen, 1))
        self.add_loss(0.25 * self._loss((x - ops.stop_gradient(quantised)) ** 2))
        return x + ops.stop_gradient(quantised - x) + 0.01 * quantised

    def _update(self, flat, chosen):
        flat = ops.stop_gradient(flat)
        self.seen.assign_add(ops.shape(flat)[0])
        self.sizes.assign(0.9 * self.sizes + 0.1 * ops.sum(chosen, 0))
        self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(flat), chosen))
        self.codes.assign(self.sums / (self.sizes + 1e-3))


def _vq_model(**options):
    x = keras.Input((6,))
    positions = layers.Reshape((3, 2))(layers.Dense(6, activation="tanh")(x))
    quantised = VectorQuantizer(**options)(positions)
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(quantised)))


def _extra(training: Training) -> dict:
    counters = [x.own for x in training.model.layers if isinstance(x, Counting)]
    training.extra["own"] = np.array([float(tf.convert_to_tensor(own)) for own in counters])
    return training.results()


@case(core=True)
def layers_that_update_themselves(run: Run):
    """Counters, SpectralNormalization and a codebook, in training and validation."""

    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                Counting(),
                layers.SpectralNormalization(layers.Dense(5, activation="tanh")),
                Codebook(),
                layers.SpectralNormalization(layers.Dense(3), power_iterations=2),
                Counting(),
            ]
        )

    return _extra(run.train(build=build, validation_data=tiny_data(ODD_BATCH)))


@case(core=True)
def codebook_of_sums(run: Run):
    """A ratio of sums over rows, whole numbers of rows, a loss and a metric of the layer."""
    return run.train(build=_vq_model, validation_data=tiny_data(ODD_BATCH)).results()


@case()
def codebook_whose_loss_is_a_sum(run: Run):
    """Of all rows already: it is not weighed as sums of a replica's own rows are."""
    return run.train(build=lambda: _vq_model(loss=ops.sum)).results()


@case()
def codebook_that_is_trained_too(run: Run):
    return run.train(build=lambda: _vq_model(trainable_codes=True)).results()


@case()
def codebook_that_moves_first(run: Run):
    """A row's output depends on all rows of its batch."""
    return run.train(build=lambda: _vq_model(first=True)).results()


@case()
def a_layer_called_twice(run: Run):
    """Its second call finds what the first has left."""

    def build():
        x = keras.Input((6,))
        shared, hidden = Counting(), layers.SpectralNormalization(layers.Dense(6, "tanh"))
        y = shared(hidden(shared(hidden(x))))
        return keras.Model(x, layers.Dense(3)(y))

    return _extra(run.train(build=build))


class CountedModel(keras.Model):
    """Counts its own calls, and those of a layer that it calls twice."""

    def __init__(self):
        super().__init__()
        self.hidden, self.counting, self.scores = layers.Dense(5), Counting(), layers.Dense(3)

    def build(self, shape):
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)
        super().build(shape)

    def call(self, x, training=False):
        self.calls.assign_add(1)
        y = self.counting(self.hidden(x), training=training)
        return self.scores(self.counting(y, training=training)) * (1 + 0.01 * self.calls)


@case()
def a_model_that_counts(run: Run):
    return _extra(run.train(build=CountedModel))


@case()
def eagerly(run: Run):
    """Without a traced step."""

    def build():
        hidden = layers.SpectralNormalization(layers.Dense(5, activation="tanh"))
        return keras.Sequential([keras.Input((6,)), Counting(), hidden, layers.Dense(3)])

    def options():
        return {**tiny_compile_options(), "run_eagerly": True}

    return _extra(run.train(build=build, compile_options=options, epochs=1))


class _Endpoint(layers.Layer):
    """The loss and a metric of a model without compiled ones (keras.io, *endpoint layer*)."""

    def __init__(self):
        super().__init__()
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seen = keras.metrics.Sum(name="seen")
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets, weights=None):
        self.add_loss(self.loss_function(targets, logits, weights))
        self.seen.update_state(ops.ones_like(targets))
        self.accuracy.update_state(targets, ops.sigmoid(logits), weights)
        return ops.sigmoid(logits)


@case(core=True)
def endpoint_layer(run: Run):
    """Targets are inputs; loss and metrics are a layer's."""

    def build():
        x, targets = keras.Input((6,), name="x"), keras.Input((1,), name="targets")
        logits = layers.Dense(1)(layers.Dense(5, activation="tanh")(x))
        return keras.Model({"x": x, "targets": targets}, _Endpoint()(logits, targets))

    def data(rows):
        x, y = tiny_data(rows)
        return {"x": x, "targets": (y > 0).astype("float32")[:, None]}, None

    return run.train(build=build, compile_options=dict, data=data).results()


@claim(core=True)
def states_of_rows_are_refused(run: Run):
    """`stateful=True` keeps a state for each row, from batch to batch."""

    def build():
        inputs = keras.Input(batch_shape=(BATCH, 4, 3))
        hidden = layers.Bidirectional(layers.LSTM(4, stateful=True, name="memory"))
        return keras.Model(inputs, layers.Dense(3)(hidden(inputs)))

    x, y = np.ones([BATCH, 4, 3], "float32"), np.zeros(BATCH, int)
    if run.row.name in ("one_device", "reference"):
        run.train(build=build, data=lambda rows: (x, y), batch_size=BATCH)
        return
    with _refused():
        run.train(build=build, data=lambda rows: (x, y), batch_size=BATCH)
    with run.scope():
        model = build()
        model.compile(optimizer="sgd", **tiny_compile_options())
    with _refused():
        model.train_on_batch(x, y)
    with _refused():
        model.predict(x, batch_size=BATCH, verbose=0)


def _refused():
    return pytest.raises(ValueError, match=r"stateful=True.*forward_memory.*initial_state")


class Centred(keras.Model):
    """A step that keeps a mean of its outputs (DINO), as Keras's variable and TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.tower = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
        self.centre = keras.Variable(np.zeros(3), trainable=False, name="centre")
        self.mean = tf.Variable(tf.zeros((), keras.config.floatx()), trainable=False)

    def call(self, x):
        return self.tower(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            scores = self(x, training=True)
            loss = self.compute_loss(x, y, scores - self.centre)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.centre.assign(0.9 * self.centre + 0.1 * ops.mean(scores, axis=0))
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(scores))
        return {"loss": loss}


@case(atol=1e-12)
def means_that_a_step_keeps(run: Run):
    with in_float64():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        training = run.train(build=Centred, compile_options=lambda: {"loss": loss})
        training.extra["mean"] = np.asarray(training.model.mean)
        return training.results()
