"""BatchNorm keeps one set of statistics, whatever the replicas saw."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import BATCH, EVEN_ROWS, ODD_BATCH, tiny_data

MOMENTUM, EPSILON = 0.9, 1e-3


def _build(synchronized: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.BatchNormalization(
                momentum=MOMENTUM, epsilon=EPSILON, synchronized=synchronized
            ),
            keras.layers.Dense(3),
        ]
    )


@case()
def synchronized_with_few_rows(run: Run):
    """A last batch of one row: most replicas have nothing to say about its mean."""
    return run.train(build=lambda: _build(True), rows=BATCH + 1, batch_size=BATCH).results()


@case()
def synchronized_after_an_activity_regularizer(run: Run):
    """Replicas wait for one another in BatchNorm, with losses added that are not read yet."""

    def build():
        regularizer = keras.regularizers.L2(0.1)
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, "tanh", activity_regularizer=regularizer),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )

    return run.train(build=build).results()


@case(core=True)
def synchronized_without_a_stock_step(run: Run):
    """In a `train_step` of the user's, gradients are weighted late: what crosses replicas, too."""

    def build():
        inner = _build(True)
        return OwnStep(inner.inputs, inner.outputs)

    return run.train(build=build, compile_options=_logits_loss).results()


@case()
def synchronized_in_a_model_that_its_step_builds(run: Run):
    """Where a model makes its weights there is one replica, and nobody to reduce with."""
    return run.train(build=BuiltByItsStep, compile_options=_logits_loss).results()


def _logits_loss() -> dict:
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


class ATrainStep:
    """Keras makes `Functional` a base of a class of models whose instance is made of tensors."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.outputs_of(x))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}

    def outputs_of(self, x):
        return self(x, training=True)


class OwnStep(ATrainStep, keras.Model):
    """As a functional model."""


class BuiltByItsStep(ATrainStep, keras.Model):
    def __init__(self):
        super().__init__()
        normalization = keras.layers.BatchNormalization(synchronized=True)
        before, after = keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)
        self.inner = keras.Sequential([before, normalization, after])

    def outputs_of(self, x):
        return self.inner(x, training=True)


def _rows_of_lengths(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`[rows, 5, 6]`, zeros behind each row's end, and classes."""
    rng = np.random.default_rng(0)
    present = np.arange(5) < rng.integers(0, 6, rows)[:, None]
    x = rng.normal(1, 2, size=(rows, 5, 6)) * present[..., None]
    return x.astype("float32"), rng.integers(0, 3, rows)


def _masked(normalization: Callable[[], keras.Layer]) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5, 6)),
            keras.layers.Masking(),
            normalization(),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3),
        ]
    )


def _synchronized() -> keras.Layer:
    return keras.layers.BatchNormalization(momentum=MOMENTUM, synchronized=True)


@case()
def synchronized_and_masked(run: Run):
    """Rows of different lengths: what is masked counts on no replica."""
    return run.train(build=lambda: _masked(_synchronized), data=_rows_of_lengths).results()


class Inside(keras.layers.Layer):
    """Has no `build`, so that Keras creates the weights of the layer in it by running it."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.inner = _synchronized()

    def call(self, inputs, training=False, mask=None):
        return self.inner(inputs, training=training, mask=mask)


@case()
def synchronized_and_masked_inside_of_a_layer(run: Run):
    return run.train(build=lambda: _masked(Inside), data=_rows_of_lengths).results()


@claim()
def synchronized_far_from_zero(run: Run):
    """A mean a thousand times the deviation: in float32, `mean(x**2) - mean(x)**2` is noise."""
    x, y = tiny_data(EVEN_ROWS)
    training = run.train(build=lambda: _build(True), data=lambda _: (x + 1000, y), epochs=1)
    expected = 1.0
    for start in range(0, len(x), ODD_BATCH):
        batch = (x[start : start + ODD_BATCH] + 1000).astype("float64")
        expected = MOMENTUM * expected + (1 - MOMENTUM) * batch.var(axis=0)
    moving_variance = training.model.layers[0].get_weights()[3]
    np.testing.assert_allclose(moving_variance, expected, atol=1e-4)


@claim(core=True)
def statistics_are_the_average_over_replicas(run: Run):
    """Not synchronized: `synchronized=False` averages what each replica measured on its rows."""
    training = run.train(build=lambda: _build(False), rows=EVEN_ROWS, batch_size=BATCH, epochs=1)
    mean, variance = _expected_statistics(tiny_data(EVEN_ROWS)[0], run.row.num_replicas)
    *_, moving_mean, moving_variance = training.model.layers[0].get_weights()
    np.testing.assert_allclose(moving_mean, mean, atol=1e-6)
    np.testing.assert_allclose(moving_variance, variance, atol=1e-6)


@claim(core=True)
def statistics_are_averaged_in_a_model_without_input(run: Run):
    """Keras creates its variables late, from the first batch."""

    def build():
        return keras.Sequential(
            [keras.layers.BatchNormalization(momentum=MOMENTUM), keras.layers.Dense(3)]
        )

    training = run.train(build=build, rows=EVEN_ROWS, batch_size=BATCH, epochs=1)
    mean, variance = _expected_statistics(tiny_data(EVEN_ROWS)[0], run.row.num_replicas)
    *_, moving_mean, moving_variance = training.model.layers[0].get_weights()
    np.testing.assert_allclose(moving_mean, mean, atol=1e-6)
    np.testing.assert_allclose(moving_variance, variance, atol=1e-6)


@claim(core=True)
def a_replica_without_rows_has_no_say(run: Run):
    """The mean of no rows is not a number; the gradient of no rows is zero."""
    training = run.train(build=lambda: _build(False), rows=BATCH + 1, batch_size=BATCH)
    for weight in training.model.get_weights():
        assert np.isfinite(weight).all()
    assert np.isfinite(training.history["loss"]).all()


@claim()
def every_replica_reads_the_same_statistics(run: Run):
    """Inference gives one answer per row, whichever replica the row lands on."""
    training = run.train(build=lambda: _build(False), rows=EVEN_ROWS, batch_size=BATCH)
    same_row = np.repeat(tiny_data(1)[0], BATCH, axis=0)
    predicted = training.model.predict(same_row, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, predicted[:1].repeat(BATCH, axis=0), atol=1e-6)


@claim()
def the_average_is_what_is_saved(run: Run):
    training = run.train(build=lambda: _build(False), rows=EVEN_ROWS, batch_size=BATCH, epochs=1)
    path = run.own_folder / "model.keras"
    training.model.save(path)
    mean, variance = _expected_statistics(tiny_data(EVEN_ROWS)[0], run.row.num_replicas)
    *_, moving_mean, moving_variance = keras.models.load_model(path).layers[0].get_weights()
    np.testing.assert_allclose(moving_mean, mean, atol=1e-6)
    np.testing.assert_allclose(moving_variance, variance, atol=1e-6)


@claim()
def set_weights_reaches_the_statistics_of_every_replica(run: Run):
    """Set, and then moved on by one more batch, they start from what was set."""
    training = run.train(build=lambda: _build(False), rows=EVEN_ROWS, batch_size=BATCH, epochs=1)
    model = training.model
    model.set_weights([np.full_like(weight, 5.0) for weight in model.get_weights()])
    x, y = tiny_data(BATCH, seed=1)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    parts = np.split(x, run.row.num_replicas)
    seen = np.mean([part.mean(axis=0) for part in parts], axis=0)
    expected = 5 * MOMENTUM + (1 - MOMENTUM) * seen
    np.testing.assert_allclose(model.layers[0].get_weights()[2], expected, atol=1e-5)


def _expected_statistics(x: np.ndarray, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Moving mean and variance after one pass over `x`, each batch cut into equal parts."""
    mean, variance = np.zeros(x.shape[1]), np.ones(x.shape[1])
    for start in range(0, len(x), BATCH):
        parts = np.split(x[start : start + BATCH].astype("float64"), num_replicas)
        seen_mean = np.mean([part.mean(axis=0) for part in parts], axis=0)
        seen_variance = np.mean([part.var(axis=0) for part in parts], axis=0)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * seen_mean
        variance = MOMENTUM * variance + (1 - MOMENTUM) * seen_variance
    return mean, variance
