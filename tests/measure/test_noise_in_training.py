"""The noise scale out of a training's own gradients, against gradients that are taken by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel.callbacks import Measure
from tfparallel.measure.noise_scale import estimate, local_square
from tfparallel.replicas import noise_probe

pytestmark = pytest.mark.turns

CPUS = ["CPU:0", "CPU:1", "CPU:2"]
STRATEGIES = {
    "mirrored": lambda: tfparallel.MirroredStrategy(CPUS),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(CPUS),
    "microbatches": lambda: tfparallel.PipelineStrategy(CPUS[:2], num_microbatches=3),
}


def compiled(strategy, **options):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = tiny_model()
        model.compile(
            **{"optimizer": keras.optimizers.SGD(0.0), **tiny_compile_options(), **options}
        )
    return model


def gradient(model, x, y):
    """Of the mean loss, in one vector of float64."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, [weight.value for weight in model.trainable_weights])
    return np.concatenate([np.ravel(g) for g in gradients]).astype("float64")


def by_hand(x, y, split):
    """What the definition gives for whole batches that are split so."""
    batch = sum(split)
    reference = compiled(tfparallel.OneDeviceStrategy("CPU:0"))
    found = []
    for start in range(0, len(x), batch):
        bounds = start + np.cumsum([0, *split])
        parts = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        squares = [float(np.sum(gradient(reference, x[p], y[p]) ** 2)) for p in parts]
        whole = slice(start, start + batch)
        together = float(np.sum(gradient(reference, x[whole], y[whole]) ** 2))
        found.append(estimate(batch, len(split), local_square(split, squares), together))
    return np.mean(found, 0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_and_microbatches_tell_the_same(name):
    """13 rows on three: 5, 4, 4."""
    measure = Measure(verbose=0, noise_every=1)
    model = compiled(STRATEGIES[name]())
    model.fit(*tiny_data(26), batch_size=13, shuffle=False, verbose=0, callbacks=[measure])
    noise = measure.records[0].details["noise"]
    squared, variance = by_hand(*tiny_data(26), (5, 4, 4))
    assert noise["squared_gradient"] == pytest.approx(squared, rel=1e-4)
    assert noise["variance"] == pytest.approx(variance, rel=1e-4)


def test_statistical_efficiency_is_on_the_screen(capsys):
    """By its definition, of squares that are taken by hand: (scale + 1) / (scale + batch)."""
    measure = Measure(noise_every=1)
    model = compiled(STRATEGIES["mirrored"]())
    data = tiny_data(26)
    model.fit(*data, batch_size=13, epochs=2, shuffle=False, verbose=0, callbacks=[measure])
    squared, variance = by_hand(*data, (5, 4, 4))
    scale = variance / squared
    assert scale > 1  # so that there is something to tell
    expected = (scale + 1) / (scale + 13)
    assert measure.total.details["noise"]["efficiency"] == pytest.approx(expected, rel=1e-4)
    told = capsys.readouterr().out
    assert told.count(f"statistical efficiency: {expected:.0%}, ") == 3  # two epochs, and all


def test_the_training_tells_the_noise_of_its_last_epoch():
    """Smoothed over all epochs until then; that of the first one is the least known."""
    measure = Measure(verbose=0, noise_every=1)
    model = compiled(STRATEGIES["mirrored"](), optimizer="sgd")
    model.fit(*tiny_data(26), batch_size=13, epochs=3, verbose=0, callbacks=[measure])
    variances = [each.details["noise"]["variance"] for each in measure.records]
    assert len(set(variances)) == 3
    assert measure.total.details["noise"]["variance"] == variances[-1]


def test_only_some_steps_are_looked_at():
    """Of 4 steps the first and the third."""
    measure = Measure(verbose=0, noise_every=2)
    model = compiled(STRATEGIES["mirrored"]())
    x, y = tiny_data(52)
    model.fit(x, y, batch_size=13, shuffle=False, verbose=0, callbacks=[measure])
    every = Measure(verbose=0, noise_every=1)
    chosen = np.r_[0:13, 26:39]
    model.fit(x[chosen], y[chosen], batch_size=13, shuffle=False, verbose=0, callbacks=[every])
    some, all_ = (each.records[0].details["noise"]["variance"] for each in (measure, every))
    assert some == pytest.approx(all_, rel=1e-6)


def test_fewer_rows_than_replicas():
    """R counts replicas that have rows; one row alone tells nothing."""
    measure = Measure(verbose=0, noise_every=1)
    model = compiled(STRATEGIES["mirrored"]())
    x, y = tiny_data(3)
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[measure])
    squared, variance = by_hand(x[:2], y[:2], (1, 1))
    noise = measure.records[0].details["noise"]
    assert noise["squared_gradient"] == pytest.approx(squared, rel=1e-4)
    assert noise["variance"] == pytest.approx(variance, rel=1e-4)


def test_weights_are_the_same_with_it():
    weights = []
    for callbacks in ([], [Measure(verbose=0, noise_every=2)]):
        model = compiled(STRATEGIES["mirrored"](), optimizer="adam")
        model.fit(*tiny_data(39), batch_size=13, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    for without, measured in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, measured)


def test_one_device_has_none(capsys):
    measure = Measure(noise_every=1)
    model = compiled(tfparallel.OneDeviceStrategy("CPU:0"))
    model.fit(*tiny_data(12), batch_size=4, verbose=0, callbacks=[measure])
    assert "noise" not in measure.records[0].details
    assert "noise" not in capsys.readouterr().out


def test_squares_of_halves_do_not_overflow():
    """300 squared is more than a float16 holds; two gradients, one of which has rows only."""
    dense = tf.constant([300.0, -400.0], tf.float16)
    sparse = tf.IndexedSlices(tf.constant([[2.0, 1.0]]), tf.constant([1]), tf.constant([3, 2]))
    assert float(noise_probe._squared_norm([dense, sparse])) == 250_005.0


def test_bad_numbers_of_steps():
    with pytest.raises(ValueError, match="noise_every"):
        Measure(noise_every=0)


class Distance(keras.layers.Layer):
    """`w - x`, whose half square has the gradient `w - x` in each row."""

    def build(self, shape):
        self.w = self.add_weight(shape=shape[-1:], initializer=keras.initializers.Constant(0.5))

    def call(self, x):
        return self.w - x


@pytest.mark.parametrize("name", ["mirrored", "microbatches"])
def test_a_quadratic_with_known_covariance(name):
    """Rows from a normal distribution: G is w - mean, S the covariance's trace.

    24,000 rows in batches of 24. With R groups the estimate of S from a batch has the variance
    2 tr(C^2) / (R - 1), that of |G|^2 (2 tr(C^2) / (R - 1) + 4 G' C G R) / N / R at most.
    """
    rng, size, rows, batch, groups = np.random.default_rng(3), 6, 24_000, 24, 3
    root = rng.normal(size=(size, size))
    covariance, mean = root @ root.T, rng.normal(size=size)
    x = (rng.normal(size=(rows, size)) @ root.T + mean).astype("float32")
    strategy = STRATEGIES[name]()
    with strategy.scope():
        layers = [Distance(), keras.layers.Activation("linear")]
        model = keras.Sequential([keras.Input((size,)), *layers])
        half_square = lambda y, d: keras.ops.sum(d**2, -1) / 2  # noqa: E731
        model.compile(keras.optimizers.SGD(0.0), half_square)
    measure = Measure(verbose=0, noise_every=1)
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(batch)
    model.fit(data, verbose=0, callbacks=[measure])
    noise = measure.records[0].details["noise"]
    gradient = 0.5 - mean
    squares, batches = np.trace(covariance @ covariance), rows / batch
    error = np.sqrt(2 * squares / (groups - 1) / batches)
    assert abs(noise["variance"] - np.trace(covariance)) < 4 * error
    assert error < 0.1 * np.trace(covariance)  # so the claim above is one
    along = 4 * gradient @ covariance @ gradient / batch
    error = np.sqrt((along + 2 * squares / (groups - 1) / batch**2 * groups) / batches)
    assert abs(noise["squared_gradient"] - gradient @ gradient) < 4 * error
    assert error < 0.1 * gradient @ gradient


def traces_of(model, noise_every, steps, **options):
    """Which steps of a training have a function of their own, and how often one was traced."""
    noting = []

    class Watch(keras.callbacks.Callback):
        """After `Measure`, which has chosen the function."""

        def on_train_batch_begin(self, batch, logs=None):
            noting.append(self.model.train_function is not self.usual)

        def on_train_begin(self, logs=None):
            self.usual = self.model.train_function

    measure = Measure(verbose=0, noise_every=noise_every)
    data = tiny_data(13 * steps)
    callbacks = [measure, Watch()]
    model.fit(*data, batch_size=13, verbose=0, callbacks=callbacks, **options)
    traced = sum(record.details["traces"] for record in measure.records)
    return noting, traced


@pytest.mark.parametrize("name", ["mirrored", "microbatches"])
def test_other_steps_are_those_of_a_training_without(name):
    """Their function is the one that Keras has made; it is traced once, and so is the other."""
    model = compiled(STRATEGIES[name]())
    noting, traced = traces_of(model, noise_every=3, steps=7)
    assert noting == [True, False, False, True, False, False, True]
    assert traced == 2
    usual = model.train_function
    model.fit(*tiny_data(13), batch_size=13, verbose=0)
    assert model.train_function is usual
    assert traces_of(model, noise_every=10, steps=2) == ([True, False], 1)
