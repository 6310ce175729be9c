"""PipelineStrategy: models in models, whose layers are divided as if they stood alone."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import Training, assert_same_training, numbered, tiny_data, train
from tfparallel import PipelineStrategy

CPUS = [f"CPU:{i}" for i in range(4)]


def mlp(*units, features=6, name):
    return keras.Sequential(
        [keras.Input((features,)), *(layers.Dense(n, "tanh", name=f"d{n}") for n in units)],
        name=name,
    )


def functional(features=6, name="base"):
    x = keras.Input((features,))
    first = layers.Dense(5, "tanh", name="first")(x)
    second = layers.Dense(5, "tanh", name="second")(first)
    return keras.Model(x, layers.Dense(4, "tanh", name="third")(first + second), name=name)


@keras.saving.register_keras_serializable("tests")
class Blocks(keras.Model):
    """Python control flow, layers in a list, a number of its own, a loss of its own."""

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
            y = block(x)
            if i % 2:
                y = y * self.scale
            x = x + 0.5 * y if training else x + y
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@keras.saving.register_keras_serializable("tests")
class Wrapper(keras.Model):
    """A trainer around a model."""

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model

    def call(self, x):
        return self.model(x)

    def get_config(self):
        return {**super().get_config(), "model": keras.saving.serialize_keras_object(self.model)}

    @classmethod
    def from_config(cls, config):
        config["model"] = keras.saving.deserialize_keras_object(config["model"])
        return cls(**config)


def functional_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(functional()(x)))


def sequential_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(mlp(5, 7, 4, name="base")(x)))


def subclassed_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(Blocks(name="base")(x)))


def subclassed_in_sequential():
    return keras.Sequential([keras.Input((6,)), Blocks(name="base"), layers.Dense(3)])


def functional_in_trainer():
    return Wrapper(functional_in_functional())


def subclassed_in_trainer():
    return Wrapper(subclassed_in_functional())


def depth_three():
    x = keras.Input((6,))
    inner = mlp(5, 6, name="inner")
    middle = keras.Model(x, Blocks(name="blocks")(inner(x)) + x, name="middle")
    outer = keras.Sequential([keras.Input((6,)), middle, layers.Dense(5, "tanh")], name="outer")
    return keras.Model(x, layers.Dense(3, name="head")(outer(x)))


def called_on_its_own_result():
    x = keras.Input((6,))
    shared = mlp(5, 6, name="shared")
    return keras.Model(x, layers.Dense(3, name="head")(shared(shared(x) + x)))


def siamese():
    """Both sides see the same layers, without waiting for each other."""
    x = keras.Input((6,))
    tower = functional(3, name="tower")
    left, right = tower(x[:, :3]), tower(x[:, 3:])
    return keras.Model(x, layers.Dense(3, name="head")(layers.Concatenate()([left, right])))


class Siamese(keras.Model):
    def __init__(self):
        super().__init__()
        self.tower, self.head = functional(3, name="tower"), layers.Dense(3)

    def call(self, x):
        left, right = self.tower(x[:, :3]), self.tower(x[:, 3:])
        return self.head(keras.ops.concatenate([left, right], axis=-1))


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.query, self.item = mlp(5, 4, features=3, name="query"), Blocks(name="item")
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(keras.ops.concatenate([self.query(x[:, :3]), self.item(x)], axis=-1))


def dicts_and_masks():
    """A nested model of dictionaries; a mask that comes out of one and goes into another."""
    tokens = keras.Input((6,))
    ids = keras.ops.cast(keras.ops.floor(keras.ops.abs(tokens) * 3), "int32")
    inner = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(20, 4, mask_zero=True)(inner)
    embedder = keras.Model(inner, embedded, name="embedder")
    sequence = keras.Input((None, 4), name="sequence")
    extra = keras.Input((6,), name="extra")
    read = {"read": layers.LSTM(4)(sequence), "extra": layers.Dense(4)(extra)}
    reader = keras.Model({"sequence": sequence, "extra": extra}, read, name="reader")
    result = reader({"sequence": embedder(ids), "extra": tokens})
    return keras.Model(tokens, layers.Dense(3)(result["read"] + result["extra"]))


def wrappers():
    """Layers that hold models are one part."""
    x = keras.Input((6,))
    steps = layers.Reshape((3, 2))(x)
    distributed = layers.TimeDistributed(mlp(4, features=2, name="step"))(steps)
    both = layers.Bidirectional(layers.LSTM(3))(distributed)
    return keras.Model(x, layers.Dense(3)(both))


MODELS = [
    functional_in_functional,
    sequential_in_functional,
    subclassed_in_functional,
    subclassed_in_sequential,
    functional_in_trainer,
    subclassed_in_trainer,
    depth_three,
    called_on_its_own_result,
    siamese,
    Siamese,
    TwoTowers,
    dicts_and_masks,
    wrappers,
]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_nested_models_train_as_on_one_device(build):
    strategy = PipelineStrategy(CPUS[:3], 3)
    candidate = train(strategy, build)
    assert_same_training(train(None, build), candidate)
    assert set(strategy.stages(candidate.model).stage_of) == {0, 1, 2}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "rematerialize": "full"},
        {"schedule": "interleaved_1f1b", "offload": True},
        {"schedule": "zero_bubble", "rematerialize": {"inner/tower", "*/block_[01]"}},
        {"schedule": "1f1b", "offload": True, "rematerialize": "except_last"},
    ],
    ids=["gpipe", "interleaved", "zero_bubble", "1f1b"],
)
def test_under_every_schedule(options):
    def build():
        x = keras.Input((6,))
        base = depth_three()
        tower = functional(3, name="tower")
        sides = layers.Concatenate()([tower(x[:, :3]), tower(x[:, 3:])])
        item = Blocks(name="item")(x)
        joined = layers.Concatenate()([base(x), item, sides])
        inner = keras.Model(x, layers.Dense(3)(joined), name="inner")
        return Wrapper(inner)

    strategy = PipelineStrategy(CPUS[:2], 3, **options)
    assert_same_training(train(None, build), train(strategy, build))


class Gan(keras.Model):
    """As in keras.io's DCGAN: no `call`; the generator learns from the discriminator just trained."""

    def __init__(self):
        super().__init__()
        self.generator = mlp(5, 7, 6, features=2, name="generator")
        self.discriminator = functional(name="discriminator")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, real):
        noise = real[:, :2]
        fake = self.generator(noise)
        both = tf.concat([fake, real], axis=0)
        labels = tf.concat([tf.ones_like(fake[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both)[:, :1])
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(judged[:, :1]), judged[:, :1])
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def trained_gan(strategy, optimizer=lambda: keras.optimizers.SGD(0.3)):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Gan()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer(), optimizer(), loss)
    data = tf.data.Dataset.from_tensor_slices(tiny_data(26)[0]).batch(13)
    history = model.fit(data, epochs=3, verbose=0).history
    slots = [v for own in (model.d_optimizer, model.g_optimizer) for v in own.variables]
    model.optimizer = keras.optimizers.SGD()  # Keras builds the compiled one under a strategy only
    return Training(model, history, numbered("slots", [v.numpy() for v in slots]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"])
def test_a_gan_without_a_call(schedule):
    strategy = PipelineStrategy(CPUS[:2], 3, schedule)
    trained = trained_gan(strategy)
    assert_same_training(trained_gan(None), trained)
