"""Models that Keras never calls as `model(x)`: without `call`, or of data other than (x, y).

None of their layers knows its shapes before `fit`. What is random is part of the data.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import BATCH, ODD_BATCH, ODD_ROWS, Training, numbered

layers = keras.layers


def _dense(hidden: int, units: int) -> keras.Sequential:
    return keras.Sequential([layers.Dense(hidden, "tanh"), layers.Dense(units)])


def _rows(rows: int, *sizes: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(rows, size)).astype("float32") for size in sizes)


class _Trackers(keras.Model):
    """Means of named losses, as keras.io's models keep them."""

    names: tuple[str, ...] = ("loss",)

    def __init__(self):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=name) for name in self.names]

    @property
    def metrics(self):
        return self.trackers

    def tracked(self, *losses):
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class VAE(_Trackers):
    """An encoder and a decoder; the noise comes with the batch."""

    names = ("loss", "reconstruction", "kl")

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _dense(5, 6), _dense(5, 6)

    def _parts(self, data):
        x, noise, _ = keras.utils.unpack_x_y_sample_weight(data)
        mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=1)
        z = mean + keras.ops.exp(0.5 * log_variance) * noise
        squares = keras.ops.sum(keras.ops.square(x - self.decoder(z)), axis=1)
        kl = -0.5 * (1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
        reconstruction, kl = keras.ops.mean(squares), keras.ops.mean(keras.ops.sum(kl, axis=1))
        return reconstruction + kl, reconstruction, kl

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self._parts(data)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(losses[0], weights), weights, strict=True))
        return self.tracked(*losses)

    def test_step(self, data):
        return self.tracked(*self._parts(data))

    def predict_step(self, data):
        return self.decoder(keras.utils.unpack_x_y_sample_weight(data)[0])


class GAN(_Trackers):
    """Two networks, each with its optimizer; `wasserstein` ones train the critic twice a step."""

    names = ("d_loss", "g_loss")

    def __init__(self, wasserstein: bool = False):
        super().__init__()
        self.generator, self.discriminator = _dense(5, 6), _dense(5, 1)
        self.wasserstein = wasserstein

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        real, noise = data
        for _ in range(2 if self.wasserstein else 1):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                d_loss = self._d_loss(real, fake)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self._is_real(self.discriminator(self.generator(noise, training=True)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return self.tracked(d_loss, g_loss)

    def _is_real(self, scores):
        if self.wasserstein:
            return -keras.ops.mean(scores)
        return keras.losses.BinaryCrossentropy(from_logits=True)(tf.ones_like(scores), scores)

    def _d_loss(self, real, fake):
        if not self.wasserstein:
            scores = self.discriminator(tf.concat([fake, real], 0))
            labels = tf.concat([tf.zeros_like(fake[:, :1]), tf.ones_like(real[:, :1])], 0)
            return keras.losses.BinaryCrossentropy(from_logits=True)(labels, scores)
        between = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between)
        norm = tf.norm(tape.gradient(scores, between), axis=1)
        penalty = tf.reduce_mean(tf.square(norm - 1.0))
        fake_score, real_score = self.discriminator(fake), self.discriminator(real)
        return tf.reduce_mean(fake_score) - tf.reduce_mean(real_score) + penalty


class Distances(layers.Layer):
    """To the anchor; knows no shapes and has no weights."""

    def call(self, anchor, positive, negative):
        between = [keras.ops.sum(keras.ops.square(anchor - x), -1) for x in (positive, negative)]
        return tuple(between)


class Siamese(_Trackers):
    """`call` takes three inputs; Keras would read a batch of them as (x, y, sample_weight)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.distances = _dense(5, 3), Distances()

    def call(self, inputs):
        return self.distances(*(self.embedding(x) for x in inputs))

    def _loss(self, data):
        positive, negative = self(data)
        return keras.ops.mean(keras.ops.maximum(positive - negative + 0.5, 0.0))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.embedding.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.tracked(loss)

    def test_step(self, data):
        return self.tracked(self._loss(data))


def _images(rows: int) -> tuple[np.ndarray, ...]:
    return _rows(rows, 6, 3)


def _triplets(rows: int = ODD_ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(_rows(rows, 4, 4, 4)).batch(ODD_BATCH)


def _two_optimizers() -> dict:
    return {
        "optimizer": "rmsprop",  # Keras's default, which nothing uses and so nothing builds
        "d_optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "g_optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
    }


def _gan(run: Run, build) -> dict:
    training = run.train(build=build, compile_options=_two_optimizers, data=_images)
    return _with_both_optimizers(training)


def _with_both_optimizers(training: Training) -> dict:
    model = training.model
    slots = [v.numpy() for o in (model.d_optimizer, model.g_optimizer) for v in o.variables]
    return {**training.results(), **numbered("both_optimizers", slots)}


@case(core=True)
def gan(run: Run):
    return _gan(run, GAN)


@case(long=True)
def wgan_gp(run: Run):
    return _gan(run, lambda: GAN(wasserstein=True))


@case(long=True)
def vae(run: Run):
    training = run.train(build=VAE, compile_options=dict, data=_images, validation_split=0.3)
    (z,) = _rows(BATCH + 1, 3)
    return {**training.results(), "decoded": training.model.predict(z, verbose=0)}


@case(core=True)
def triplets(run: Run):
    training = run.train(
        build=Siamese,
        compile_options=dict,
        data=None,
        x=_triplets(),
        batch_size=None,
        validation_data=_triplets(BATCH),
    )
    return training.results()


@case()
def evaluated_before_it_is_trained(run: Run):
    keras.utils.set_random_seed(1)
    with run.scope():
        model = Siamese()
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    before = model.evaluate(_triplets(), verbose=0)
    history = model.fit(_triplets(), verbose=0).history
    return Training(model, history, {"before": before}).results()


@case(long=True)
def on_batch(run: Run):
    """`train_on_batch` and `test_on_batch`, and nothing before them."""
    keras.utils.set_random_seed(1)
    with run.scope():
        model, other = VAE(), VAE()
        model.compile(optimizer=keras.optimizers.Adam(0.01))
        other.compile(optimizer=keras.optimizers.Adam(0.01))
    x, noise = _images(ODD_BATCH)
    trained = [model.train_on_batch(x, noise) for _ in range(2)]
    tested = [m.test_on_batch(x, noise) for m in (model, other)]
    return Training(model, {}, {"trained": trained, "tested": tested}).results()


@case(long=True)
def compiled_again(run: Run):
    """The second compile brings optimizers of its own, which are built when they are needed."""
    training = run.train(build=GAN, compile_options=_two_optimizers, data=_images)
    with run.scope():
        training.model.compile(**_two_optimizers())
    x, noise = _images(ODD_BATCH)
    history = training.model.fit(x, noise, batch_size=ODD_BATCH, verbose=0).history
    return _with_both_optimizers(Training(training.model, history))


@case(long=True)
def run_eagerly(run: Run):
    """A step that only Python can run: no graph is made of it."""

    class Eager(VAE):
        def train_step(self, data):
            assert np.isfinite(data[0].numpy()).all()
            return super().train_step(data)

    options = {"compile_options": lambda: {"run_eagerly": True}, "data": _images}
    return run.train(build=Eager, **options).results()


@case()
def predicts_sparse_rows(run: Run):
    """Nothing has built the model, whose first layer needs the number of columns."""
    keras.utils.set_random_seed(1)
    with run.scope():
        model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    rows = tf.data.Dataset.from_tensor_slices(_rows(ODD_BATCH, 4)[0]).batch(ODD_BATCH)
    return {"predicted": model.predict(rows.map(tf.sparse.from_dense), verbose=0)}


@claim(long=True)
def draws_of_its_own(run: Run):
    """Noise that differs by replica: all replicas end with the same finite weights."""

    class Draws(VAE):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def train_step(self, data):
            x, noise = data
            drawn = keras.random.normal(keras.ops.shape(noise), seed=self.seeds)
            return super().train_step((x, drawn + keras.random.uniform(keras.ops.shape(noise))))

    training = run.train(build=Draws, compile_options=dict, data=_images)
    assert all(np.isfinite(array).all() for array in training.model.get_weights())
    assert np.isfinite(training.history["loss"]).all()


@claim()
def a_wrong_model_is_told_by_keras(run: Run):
    """What is wrong in the step is raised as it is, before a step runs."""

    class Wrong(VAE):
        def __init__(self):
            super().__init__()
            self.decoder = keras.Sequential([keras.Input((4,)), layers.Dense(6)])

    with pytest.raises(ValueError, match=r"expected axis -1 of input shape to have value 4"):
        run.train(build=Wrong, compile_options=dict, data=_images)


@claim()
def counts_are_exact(run: Run):
    """Also where workers wait for nobody: of an optimizer's updates, and of a metric's batches."""
    options = {"compile_options": _two_optimizers, "data": _images, "epochs": 3}
    model = run.train(build=lambda: GAN(wasserstein=True), **options).model
    assert [o.iterations.numpy() for o in (model.d_optimizer, model.g_optimizer)] == [12, 6]
    assert [tracker.count.numpy() for tracker in model.trackers] == [2, 2]
    assert all(np.isfinite(array).all() for array in model.get_weights())
    assert model.optimizer.iterations.numpy() == 0


@claim()
def an_optimizer_from_outside_of_the_scope_is_refused(run: Run):
    def build():
        model = GAN()
        model.others = [outside]
        return model

    outside = keras.optimizers.SGD(0.1, name="from_outside")
    with pytest.raises(ValueError, match="'from_outside' created outside"):
        run.train(build=build, compile_options=_two_optimizers, data=_images)
