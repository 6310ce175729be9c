"""Programs as keras.io writes them, tiny: losses and layers around an ordinary model.

The guides' loops, with `strategy.run` and without, are in `custom_training.py`.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.conformance.cases.keras_io import batches, dense, fit, normal, update
from tests.conformance.models import MODELS
from tests.helpers import (
    ODD_BATCH,
    ODD_ROWS,
    SEED,
    Training,
    assert_replicas_agree,
    momentum_sgd,
    numbered,
    tiny_compile_options,
    tiny_data,
)

WORDS, LENGTH, TAGS = 20, 5, 4


class TransformerBlock(layers.Layer):
    def __init__(self, size: int):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=size)
        self.feed_forward = keras.Sequential([layers.Dense(5, "relu"), layers.Dense(size)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.feed_forward(x))


class TokenAndPosition(layers.Layer):
    def __init__(self, size: int):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(WORDS, size), layers.Embedding(LENGTH, size)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(LENGTH))


class Tagger(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = TokenAndPosition(4), TransformerBlock(4)
        self.hidden, self.scores = layers.Dense(5, "relu"), layers.Dense(TAGS)

    def call(self, x):
        return self.scores(self.hidden(self.block(self.embedding(x))))


class MeanOfWords(keras.losses.Loss):
    """One number for the batch: the sum of what is not padding, over how much that is."""

    def call(self, y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        is_word = ops.cast(y_true > 0, losses.dtype)
        return ops.sum(losses * is_word) / ops.sum(is_word)


@case()
def ner(run: Run):
    tokens, _ = MODELS["masking"].data(ODD_ROWS)
    return run.train(
        build=Tagger,
        data=lambda rows: (tokens, np.where(tokens > 0, tokens % (TAGS - 1) + 1, 0)),
        compile_options=lambda: {"loss": MeanOfWords()},
        optimizer=lambda: keras.optimizers.SGD(0.1),
    ).results()


class Trainer(keras.Model):
    """A training step that is written once, around any model."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.model = model

    def call(self, x):
        return self.model(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.model(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        update(self.optimizer, tape, loss, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, y_pred]))
        return {metric.name: metric.result() for metric in self.metrics}


@case(core=True)
def trainer_pattern(run: Run):
    return run.train(build=lambda: Trainer(dense(8, 5, 4, 3))).results()


@case(long=True)
def trainer_pattern_of_a_functional_model(run: Run):
    return run.train("nested", build=lambda: Trainer(_branches())).results()


def _branches() -> keras.Model:
    x = keras.Input((6,))
    left, right = layers.Dense(4, "tanh")(x), layers.Dense(4, "relu")(x)
    return keras.Model(x, layers.Dense(3)(layers.Concatenate()([left, right])))


class LogisticEndpoint(layers.Layer):
    """Loss and metric are the layer's own, which gets the targets as an input."""

    def __init__(self):
        super().__init__()
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)

    def call(self, scores, targets, weights):
        self.add_loss(self.loss_function(targets, scores, weights))
        self.accuracy.update_state(targets, scores, weights)
        return ops.sigmoid(scores)


def _endpoint_data(rows: int = ODD_ROWS) -> dict:
    x, labels = tiny_data(rows)
    weights = np.linspace(0.5, 2, rows, dtype="float32")[:, None]
    return {"x": x, "targets": (labels > 0).astype("float32")[:, None], "weights": weights}


@case(core=True)
def endpoint_layer(run: Run):
    def build():
        shapes = {"x": 6, "targets": 1, "weights": 1}
        inputs = {name: keras.Input((size,), name=name) for name, size in shapes.items()}
        scores = layers.Dense(1)(layers.Dense(5, "tanh")(layers.Dense(5, "tanh")(inputs["x"])))
        outputs = LogisticEndpoint()(scores, inputs["targets"], inputs["weights"])
        model = keras.Model(inputs, outputs)
        model.compile(optimizer=momentum_sgd())
        return model

    return fit(run, build, batches(_endpoint_data()))


@case(long=True)
def endpoint_layer_of_a_subclassed_model(run: Run):
    class Logistic(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.scores = layers.Dense(5, "tanh"), layers.Dense(1)
            self.endpoint = LogisticEndpoint()

        def call(self, data):
            scores = self.scores(self.hidden(data["x"]))
            return self.endpoint(scores, data["targets"], data["weights"])

    def build():
        model = Logistic()
        model.compile(optimizer=momentum_sgd())
        return model

    return fit(run, build, batches(_endpoint_data()))


class Distiller(keras.Model):
    """`compute_loss` asks a second model, which is trained already."""

    def __init__(self, student: keras.Model, teacher: keras.Model):
        super().__init__()
        self.student, self.teacher = student, teacher

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = ops.softmax(self.teacher(x, training=False) / 3.0)
        of_labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        of_teacher = keras.losses.KLDivergence()(taught, ops.softmax(y_pred / 3.0))
        return 0.1 * of_labels + 0.9 * of_teacher * 3.0**2


@case(long=True)
def knowledge_distillation(run: Run):
    teacher = run.train(build=lambda: dense(8, 6, 3)).model
    teacher.trainable = False
    training = run.train(
        build=lambda: Distiller(dense(4, 3), teacher),
        compile_options=lambda: {"metrics": ["accuracy"]},
        validation_data=tiny_data(5, seed=1),
    )
    return training.results()


class TwoTowers(keras.Model):
    """A vector for each user and each item: how well they match is their product."""

    def __init__(self):
        super().__init__()
        self.users = keras.Sequential([layers.Embedding(7, 4), layers.Dense(3)], name="users")
        self.items = keras.Sequential([layers.Embedding(9, 4), layers.Dense(3)], name="items")

    def call(self, inputs):
        return ops.stack([self.users(inputs["user"]), self.items(inputs["item"])], axis=1)


class Ratings(TwoTowers):
    def call(self, inputs):
        return ops.sum(ops.prod(super().call(inputs), axis=1), axis=-1, keepdims=True)


def in_batch_softmax(y_true, towers):
    """Every other row's item is what the user did not choose."""
    scores = ops.matmul(towers[:, 0], ops.transpose(towers[:, 1]))
    chosen = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(chosen, scores, from_logits=True)


def _choices(rows: int) -> tuple:
    rng = np.random.default_rng(0)
    pairs = {"user": rng.integers(0, 7, rows), "item": rng.integers(0, 9, rows)}
    return pairs, rng.normal(size=(rows, 1)).astype("float32")


@case()
def two_towers(run: Run):
    options = lambda: {"loss": "mse", "metrics": ["mae"]}  # noqa: E731
    return run.train(build=Ratings, data=_choices, compile_options=options).results()


@case()
def two_towers_with_in_batch_softmax(run: Run):
    """Retrieval: each row's loss is of all rows."""
    options = lambda: {"loss": in_batch_softmax}  # noqa: E731
    return run.train(build=TwoTowers, data=_choices, compile_options=options).results()


@case()
def transfer_learning(run: Run):
    """A frozen base first; then all but its BatchNorm, with a lower learning rate."""

    def build():
        base = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.ReLU()],
            name="base",
        )
        base.trainable = False
        x = keras.Input((6,))
        return keras.Model(x, layers.Dense(3)(base(x)))

    frozen = run.train(build=build)
    model = frozen.model
    with run.scope():
        base = model.get_layer("base")
        base.trainable = True
        base.layers[1].trainable = False
        model.compile(optimizer=keras.optimizers.Adam(1e-3), **tiny_compile_options())
    tuned = model.fit(*tiny_data(ODD_ROWS), ODD_BATCH, epochs=1, shuffle=False, verbose=0)
    assert_replicas_agree(model)
    first = {f"frozen/{name}": np.asarray(values) for name, values in frozen.history.items()}
    return {**first, **Training(model, tuned.history).results()}


@case()
def deep_q_learning(run: Run):
    """`train_on_batch` of what a second network predicts, which follows the first one's weights."""
    keras.utils.set_random_seed(SEED)
    with run.scope():
        online, target = (dense(8, 5, 3, name=name) for name in ("online", "target"))
        online.compile(optimizer=keras.optimizers.Adam(0.01), loss="huber")
    target.set_weights(online.get_weights())
    losses = []
    for step in range(3):
        states, actions = tiny_data(ODD_BATCH, seed=step)
        rewards = normal(ODD_BATCH, seed=step)
        values = np.asarray(online.predict_on_batch(states))
        future = np.asarray(target.predict_on_batch(states[::-1])).max(axis=1)
        values[np.arange(ODD_BATCH), actions] = rewards + 0.9 * future
        losses.append(online.train_on_batch(states, values))
        blended = zip(target.get_weights(), online.get_weights(), strict=True)
        target.set_weights([0.5 * old + 0.5 * new for old, new in blended])
    extra = numbered("target", target.get_weights())
    return Training(online, {"loss": losses}, extra).results()


@case()
def adversarial_by_freezing(run: Run):
    """A discriminator that is frozen in the model that trains the generator, as older GANs are."""
    keras.utils.set_random_seed(SEED)
    with run.scope():
        generator = dense(5, 4, 4, 3, features=3)
        discriminator = dense(4, 4, 4, 1, features=3)
        discriminator.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        discriminator.trainable = False
        inputs = keras.Input((3,))
        both = keras.Model(inputs, discriminator(generator(inputs)))
        both.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    losses = []
    for step in range(3):
        fake = generator.predict(normal(5, 3, seed=step), verbose=0)
        rows = np.concatenate([normal(5, 3, seed=20 + step), fake])
        losses.append(discriminator.test_on_batch(rows, np.repeat([[1.0], [0.0]], 5, axis=0)))
        losses.append(both.train_on_batch(normal(7, 3, seed=9 + step), np.ones((7, 1))))
    return Training(both, {"loss": losses}).results()
