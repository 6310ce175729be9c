"""Models in models: every strategy trains them as it would the same layers in one."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests import helpers
from tests.conformance.case import Run, case
from tests.helpers import BATCH, ODD_BATCH, UNEVEN_ROWS, Training, numbered, tiny_data


def tower(features: int, name: str) -> keras.Model:
    """Functional, with a connection that skips a layer."""
    x = keras.Input((features,))
    first = layers.Dense(5, "tanh", name="first")(x)
    second = layers.Dense(5, "tanh", name="second")(first)
    return keras.Model(x, layers.Dense(4, "tanh", name="third")(first + second), name=name)


def mlp(*units: int, features: int = 6, name: str) -> keras.Model:
    """Sequential."""
    dense = [layers.Dense(n, "tanh", name=f"d{n}") for n in units]
    return keras.Sequential([keras.Input((features,)), *dense], name=name)


@keras.saving.register_keras_serializable("tests")
class Blocks(keras.Model):
    """Python control flow, layers in a list, a weight and a loss of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [layers.Dense(6, "tanh", name=f"block_{i}") for i in range(3)]

    def build(self, shape):
        self.scale = self.add_weight(name="scale", initializer="ones")
        for block in self.blocks:
            block.build(shape)
        self.built = True

    def call(self, x, training=False):
        for i, block in enumerate(self.blocks):
            y = block(x) * self.scale if i % 2 else block(x)
            x = x + 0.5 * y if training else x + y
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@keras.saving.register_keras_serializable("tests")
class Trainer(keras.Model):
    """Calls a model."""

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model

    def call(self, x):
        return self.model(x)

    def get_config(self):
        return {**super().get_config(), "model": keras.saving.serialize_keras_object(self.model)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("model")), **config)


def deep_trainer() -> keras.Model:
    """Three models deep; a model called on its own result; one called on both sides."""
    x = keras.Input((6,))
    block = mlp(5, 6, name="block")
    middle = keras.Model(x, Blocks(name="blocks")(block(block(x) + x)) + x, name="middle")
    outer = keras.Sequential([keras.Input((6,)), middle, layers.Dense(5, "tanh")], name="outer")
    side = tower(3, name="side")
    joined = layers.Concatenate()([outer(x), side(x[:, :3]), side(x[:, 3:])])
    return Trainer(keras.Model(x, layers.Dense(3, name="head")(joined), name="model"))


@case(core=True)
def trainer(run: Run):
    """A subclassed model around functional, sequential and subclassed ones."""
    training = run.train(build=deep_trainer, rows=UNEVEN_ROWS, batch_size=BATCH)
    x, _ = tiny_data(ODD_BATCH)
    predicted = training.model.predict(x, ODD_BATCH, verbose=0)
    return {**training.results(), **numbered("predict", [predicted])}


class Gan(keras.Model):
    """No `call`; the generator learns from the discriminator that has just been trained."""

    def __init__(self):
        super().__init__()
        self.generator = mlp(5, 7, 6, features=2, name="generator")
        self.discriminator = tower(6, name="discriminator")
        self.d_loss, self.g_loss = (keras.metrics.Mean(name=f"{name}_loss") for name in "dg")
        self.d_optimizer, self.g_optimizer = (keras.optimizers.SGD(0.3) for _ in "dg")
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, real):
        noise, generator, discriminator = real[:, :2], self.generator, self.discriminator
        both = tf.concat([generator(noise), real], axis=0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_function(labels, discriminator(both)[:, :1])
        self.learn(self.d_optimizer, tape, d_loss, discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            judged = discriminator(generator(noise))[:, :1]
            g_loss = self.loss_function(tf.zeros_like(judged), judged)
        self.learn(self.g_optimizer, tape, g_loss, generator.trainable_weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def learn(self, optimizer, tape, loss, weights):
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Vae(keras.Model):
    """No `call`; an encoder of three outputs, a loss in `train_step`."""

    def __init__(self):
        super().__init__()
        x = keras.Input((6,))
        hidden = layers.Dense(5, "tanh", name="hidden")(x)
        mean, log_variance = layers.Dense(2, name="mean")(hidden), layers.Dense(2)(hidden)
        # A sample that is the same whatever the batch is cut into.
        z = layers.Lambda(lambda v: v[0] + keras.ops.exp(0.5 * v[1]) * keras.ops.sin(v[0]))
        outputs = [mean, log_variance, z([mean, log_variance])]
        self.encoder = keras.Model(x, outputs, name="encoder")
        self.decoder = mlp(5, 6, features=2, name="decoder")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(x)
            error = tf.reduce_mean(tf.square(x - self.decoder(z)))
            divergence = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            loss = error - 0.05 * tf.reduce_mean(tf.reduce_sum(divergence, axis=1))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


@case()
def gan(run: Run):
    training = _of_features(run, Gan)
    model = training.model
    slots = [v.numpy() for each in (model.d_optimizer, model.g_optimizer) for v in each.variables]
    # Keras builds the unused compiled optimizer under a strategy, and not without one.
    results = {k: v for k, v in training.results().items() if not k.startswith("optimizer")}
    return {**results, **numbered("own_optimizer", slots)}


@case()
def vae(run: Run):
    return _of_features(run, Vae).results()


def _of_features(run: Run, build: type) -> Training:
    data = tf.data.Dataset.from_tensor_slices(tiny_data(UNEVEN_ROWS)[0]).batch(BATCH)
    return run.train(build=build, compile_options=dict, data=None, x=data)


@case(long=True)
def transfer_learning(run: Run):
    """A frozen base under a head, then all of it: two `fit`s."""
    rows = helpers.EVEN_ROWS // 2
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 32, 32, 3)).astype("float32"), rng.integers(0, 3, rows)

    def build():
        shape = (32, 32, 3)
        base = keras.applications.MobileNetV2(shape, 0.35, include_top=False, weights=None)
        base.trainable = False
        inputs = keras.Input(shape)
        features = layers.GlobalAveragePooling2D()(base(inputs, training=False))
        return keras.Model(inputs, layers.Dense(3, name="head")(features))

    first = run.train(build=build, data=lambda _: (x, y), batch_size=rows)
    model = first.model
    base = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    with run.scope():
        base.trainable = True
        for layer in base.layers:
            layer.trainable = not isinstance(layer, layers.BatchNormalization)
        model.compile(keras.optimizers.SGD(1e-3), **helpers.tiny_compile_options())
    history = model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
    own = {f"first/{name}": values for name, values in first.history.items()}
    return Training(model, {**history, **own}).results()
