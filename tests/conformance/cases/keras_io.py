"""Programs as keras.io writes them, tiny: models of models that train with a step of their own.

What an example draws at random comes with its data here, so that one device draws the same.
"""

from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.helpers import (
    ODD_BATCH,
    ODD_ROWS,
    SEED,
    assert_replicas_agree,
    momentum_sgd,
    numbered,
    tiny_data,
)

LATENT = 2


def fit(run: Run, build: Callable[[], keras.Model], data: tf.data.Dataset, **options) -> dict:
    """Two epochs of the model that `build` makes and compiles: its weights and what it logged."""
    keras.utils.set_random_seed(SEED)
    with run.scope():
        model = build()
    history = model.fit(data, epochs=2, verbose=0, **options)
    assert_replicas_agree(model)
    return {
        **numbered("weights", model.get_weights()),
        **{f"history/{name}": np.asarray(values) for name, values in history.history.items()},
    }


def batches(data) -> tf.data.Dataset:
    """Two batches that no number of replicas divides."""
    return tf.data.Dataset.from_tensor_slices(data).batch(ODD_BATCH)


def dense(*units: int, features: int = 6, name: str | None = None) -> keras.Model:
    """Dense layers, the last one linear."""
    hidden = [layers.Dense(n, "tanh") for n in units[:-1]]
    return keras.Sequential([keras.Input((features,)), *hidden, layers.Dense(units[-1])], name=name)


def normal(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def features(seed: int = 0) -> np.ndarray:
    return tiny_data(ODD_ROWS, seed)[0]


def update(optimizer: keras.Optimizer, tape: tf.GradientTape, loss, weights: Iterable) -> None:
    weights = list(weights)
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


# ---- generative ----------------------------------------------------------------------------------


class Sampling(layers.Layer):
    def call(self, inputs):
        mean, log_variance, noise = inputs
        return mean + ops.exp(0.5 * log_variance) * noise


class Vae(keras.Model):
    """No `call`; sums over features, means over rows; three trackers."""

    def __init__(self, encoder: keras.Model, decoder: keras.Model):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        names = ["loss", "reconstruction", "divergence"]
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder([data["x"], data["noise"]])
            errors = ops.sum(ops.square(data["x"] - self.decoder(latent)), axis=1)
            gain = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            reconstruction = ops.mean(errors)
            divergence = ops.mean(ops.sum(-0.5 * gain, axis=1))
            loss = reconstruction + divergence
        update(self.optimizer, tape, loss, self.trainable_weights)
        for tracker, value in zip(self.trackers, (loss, reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


@case(core=True)
def vae(run: Run):
    def build():
        x, noise = keras.Input((6,)), keras.Input((LATENT,))
        hidden = layers.Dense(5, "tanh")(x)
        mean, log_variance = layers.Dense(LATENT)(hidden), layers.Dense(LATENT)(hidden)
        latent = Sampling()([mean, log_variance, noise])
        encoder = keras.Model([x, noise], [mean, log_variance, latent], name="encoder")
        model = Vae(encoder, dense(5, 6, features=LATENT, name="decoder"))
        model.compile(optimizer=keras.optimizers.SGD(0.05))
        return model

    return fit(run, build, batches({"x": features(), "noise": normal(ODD_ROWS, LATENT)}))


class Gan(keras.Model):
    """Two optimizers in one step, no `call`, no compiled optimizer or loss."""

    def __init__(self):
        super().__init__()
        self.discriminator = dense(5, 1, name="discriminator")
        self.generator = dense(5, 6, features=LATENT, name="generator")

    def compile(self, d_optimizer, g_optimizer, loss_function):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_function = loss_function
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data):
        real, noise, label_noise = data
        fake = self.generator(noise[:, 0])
        both = ops.concatenate([fake, real], axis=0)
        rows = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * ops.concatenate([label_noise[:, :1], label_noise[:, 1:]], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_function(labels, self.discriminator(both))
        update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise[:, 1]))
            g_loss = self.loss_function(ops.zeros((rows, 1)), judged)
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


@case()
def dcgan(run: Run):
    def build():
        model = Gan()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.optimizers.SGD(0.1),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    noise = normal(ODD_ROWS, 2, LATENT), normal(ODD_ROWS, 2, seed=4)
    return fit(run, build, batches((features(), *noise)))


class WassersteinGan(Gan):
    """Several updates of one part in a step, and a gradient of a gradient."""

    critic_steps = 2
    penalty_weight = 10.0

    def penalty(self, real, fake, alpha):
        between = real + alpha[:, None] * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between, training=True)
        norms = ops.sqrt(ops.sum(ops.square(tape.gradient(scores, between)), axis=1))
        return ops.mean(ops.square(norms - 1.0))

    def train_step(self, data):
        real, noise, alpha = data
        for i in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise[:, i], training=True)
                judged = self.discriminator(fake, training=True)
                cost = ops.mean(judged) - ops.mean(self.discriminator(real, training=True))
                d_loss = cost + self.penalty_weight * self.penalty(real, fake, alpha[:, i])
            update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            fake = self.generator(noise[:, -1], training=True)
            g_loss = -ops.mean(self.discriminator(fake, training=True))
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


@case()
def wgan_gp(run: Run):
    def build():
        model = WassersteinGan()
        model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01), None)
        return model

    steps = WassersteinGan.critic_steps
    noise = normal(ODD_ROWS, steps + 1, LATENT), normal(ODD_ROWS, steps, seed=4)
    return fit(run, build, batches((features(), *noise)))


class MaskedAutoencoder(keras.Model):
    """Encodes some patches, decodes all, and judges those it did not see; its own token weight."""

    def __init__(self, encoder: keras.Model, decoder: keras.Model):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.token = self.add_weight(shape=(4,), initializer="random_normal", name="token")

    def train_step(self, data):
        patches, seen, hidden = data["patches"], data["seen"], data["hidden"]
        with tf.GradientTape() as tape:
            encoded = self.encoder(tf.gather(patches, seen, axis=1, batch_dims=1))
            tokens = self.token + 0.1 * ops.cast(hidden[..., None], "float32")
            decoded = self.decoder(ops.concatenate([encoded, tokens], axis=1))
            predicted = decoded[:, -hidden.shape[1] :]
            target = tf.gather(patches, hidden, axis=1, batch_dims=1)
            loss = self.compute_loss(y=target, y_pred=predicted)
        parts = self.encoder.trainable_weights + self.decoder.trainable_weights + [self.token]
        update(self.optimizer, tape, loss, parts)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [target, predicted]))
        return self.get_metrics_result()


@case(long=True)
def masked_autoencoder(run: Run):
    def build():
        x = keras.Input((2, 3))
        hidden = layers.Dense(4)(x)
        attended = layers.MultiHeadAttention(num_heads=1, key_dim=2)(hidden, hidden)
        encoder = keras.Model(x, layers.LayerNormalization()(layers.Add()([hidden, attended])))
        decoder = keras.Sequential(
            [keras.Input((4, 4)), layers.Dense(5, "gelu"), layers.Dense(3)], name="decoder"
        )
        model = MaskedAutoencoder(encoder, decoder)
        model.compile(optimizer=momentum_sgd(), loss="mse", metrics=["mae"])
        return model

    order = np.random.default_rng(1).permuted(np.tile(np.arange(4), (ODD_ROWS, 1)), axis=1)
    data = {"patches": normal(ODD_ROWS, 4, 3), "seen": order[:, :2], "hidden": order[:, 2:]}
    return fit(run, build, batches(data))


# ---- similarity ----------------------------------------------------------------------------------


class Distances(layers.Layer):
    def call(self, anchor, positive, negative):
        return (
            ops.sum(ops.square(anchor - positive), axis=-1),
            ops.sum(ops.square(anchor - negative), axis=-1),
        )


class Siamese(keras.Model):
    """Batches are triplets, and not (x, y, weight); the tape adds up a loss by row."""

    def __init__(self, distances: keras.Model, margin: float = 0.5):
        super().__init__()
        self.distances, self.margin = distances, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs):
        return self.distances(inputs)

    def triplet_loss(self, data):
        to_positive, to_negative = self.distances(data)
        return ops.maximum(to_positive - to_negative + self.margin, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data)
        update(self.optimizer, tape, loss, self.distances.trainable_weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.triplet_loss(data))
        return {"loss": self.loss_tracker.result()}


@case()
def siamese(run: Run):
    def build():
        inputs = [keras.Input((6,), name=name) for name in ("anchor", "positive", "negative")]
        embedding = dense(5, 4, 3, name="embedding")
        model = Siamese(keras.Model(inputs, Distances()(*[embedding(x) for x in inputs])))
        model.compile(optimizer=keras.optimizers.SGD(0.003))
        return model

    triplets = batches(tuple(features(seed) for seed in (0, 1, 2)))
    return fit(run, build, triplets, validation_data=triplets)


class Pairs(keras.Model):
    """Each anchor is to be nearest to its own positive, of those of all rows."""

    def __init__(self, embedding: keras.Model, all_rows: Callable):
        super().__init__()
        self.embedding, self.all_rows = embedding, all_rows

    def train_step(self, data):
        with tf.GradientTape() as tape:
            anchors = self.embedding(data["anchor"], training=True)
            positives = self.all_rows(self.embedding(data["positive"], training=True))
            similarities = ops.matmul(anchors, ops.transpose(positives)) / 0.2
            loss = self.compute_loss(y=data["row"], y_pred=similarities)
        update(self.optimizer, tape, loss, self.trainable_variables)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


@case()
def metric_learning(run: Run):
    all_rows = run.strategy.all_rows if run.strategy else lambda rows: rows

    def build():
        x = keras.Input((6,))
        embedded = layers.UnitNormalization()(layers.Dense(4)(layers.Dense(5, "tanh")(x)))
        model = Pairs(keras.Model(x, embedded), all_rows)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=momentum_sgd(), loss=loss)
        return model

    row = np.tile(np.arange(ODD_BATCH), 2)
    pairs = {"anchor": features(0), "positive": features(0) + 0.3 * features(1), "row": row}
    return fit(run, build, batches(pairs))
