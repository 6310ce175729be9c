"""Losses that are a function of all rows of a batch: replicas see a part of them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.conformance.models import MODELS
from tests.helpers import ODD_BATCH, in_float64, numbered

ROWS = 2 * ODD_BATCH + 2  # the last batch has fewer rows than some strategies have replicas


def _trained(run: Run, model: str = "binary", **options) -> dict:
    """Weights and history of a `fit` that also validates on uneven batches."""
    data = options.pop("data", MODELS[model].data)
    x, y = data(9)
    validation = {"validation_data": (x, y), "validation_batch_size": 5}
    return run.train(model, data=data, **{"rows": ROWS, **validation, **options}).results()


def _weights() -> np.ndarray:
    return np.linspace(0, 2, ROWS, dtype="float32")


# ---- Keras's own -----------------------------------------------------------------------------


@case(core=True)
def dice(run: Run):
    """One number for each batch; as a metric too."""
    return _trained(
        run,
        compile_options=lambda: {"loss": keras.losses.Dice(), "metrics": [keras.losses.Dice()]},
    )


@case()
def dice_of_a_dataset_distributed_by_the_user(run: Run):
    """A replica does not know where its rows begin among those of all, and asks the others."""
    strategy = run.strategy or tf.distribute.get_strategy()
    rows = tf.data.Dataset.from_tensor_slices(MODELS["binary"].data(ROWS)).batch(ODD_BATCH)
    dataset = strategy.experimental_distribute_dataset(rows)
    options = {"compile_options": lambda: {"loss": keras.losses.Dice()}, "epochs": 1}
    training = run.train("binary", data=None, x=dataset, **options)
    return {**numbered("weights", training.model.get_weights()), **training.history}


@case(long=True)
def dice_with_sample_weight(run: Run):
    return _trained(
        run, compile_options=lambda: {"loss": keras.losses.Dice()}, sample_weight=_weights()
    )


@case(long=True)
def dice_of_each_row(run: Run):
    """Not coupled."""
    return _trained(run, compile_options=lambda: {"loss": keras.losses.Dice(axis=-1)})


@case(long=True)
def tversky(run: Run):
    loss = keras.losses.Tversky(alpha=0.3, beta=0.7)
    return _trained(run, compile_options=lambda: {"loss": loss, "metrics": [loss]})


def _embedder() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(4), layers.UnitNormalization()]
    )


@case()
def circle(run: Run):
    """A number for each row, of all rows; rows without any are masked."""
    loss = keras.losses.Circle(gamma=4.0)
    return _trained(
        run, "mlp", build=_embedder, compile_options=lambda: {"loss": loss, "metrics": [loss]}
    )


@case(long=True)
def circle_with_sample_weight(run: Run):
    return _trained(
        run,
        "mlp",
        build=_embedder,
        compile_options=lambda: {"loss": keras.losses.Circle(gamma=4.0)},
        sample_weight=_weights(),
    )


@case()
def ignored_class(run: Run):
    """Keras divides by the number of rows that are not ignored."""

    def options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        return {"loss": loss}

    return _trained(run, "mlp", compile_options=options)


# ---- functions ---------------------------------------------------------------------------------


def clip(y_true, y_pred):
    """CLIP: a cross entropy for each row, over the similarities to all rows."""
    del y_true
    images, texts = ops.split(y_pred, 2, axis=-1)
    logits = ops.matmul(images, ops.transpose(texts))
    labels = ops.arange(ops.shape(logits)[0])
    losses = [
        keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
        for each in (logits, ops.transpose(logits))
    ]
    return sum(losses) / 2


def nt_xent(y_true, y_pred):
    """SimCLR: one number, of two views of each row."""
    del y_true
    views = ops.concatenate(ops.split(y_pred, 2, axis=-1), axis=0)
    views = ops.normalize(views, axis=-1)
    rows = ops.shape(views)[0]
    logits = ops.matmul(views, ops.transpose(views)) / 0.5 - 1e9 * ops.eye(rows)
    labels = ops.mod(ops.arange(rows) + rows // 2, rows)
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return ops.mean(losses)


def two_towers() -> keras.Model:
    """Images and texts of two features each, side by side."""
    x = keras.Input((6,))
    images = layers.Dense(2)(layers.Dense(4, "tanh")(x[:, :3]))
    texts = layers.Dense(2)(layers.Dense(4, "tanh")(x[:, 3:]))
    return keras.Model(x, layers.Concatenate()([images, texts]))


@case()
def clip_function(run: Run):
    return _trained(run, "mlp", build=two_towers, compile_options=lambda: {"loss": clip})


@case(long=True)
def nt_xent_function(run: Run):
    return _trained(
        run, "mlp", build=two_towers, compile_options=lambda: {"loss": nt_xent, "metrics": [clip]}
    )


@case(long=True)
def two_outputs(run: Run):
    """One loss is coupled, the other a mean over rows."""

    def options():
        def root_mean_square(y_true, y_pred):
            return ops.sqrt(ops.mean(ops.square(y_pred - y_true)))

        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": {"class": entropy, "value": root_mean_square}}

    return _trained(run, "dict_inputs_and_outputs", compile_options=options)


def squares(y_true, y_pred):
    """A sum over rows."""
    return ops.sum(ops.square(y_pred - y_true))


@case()
def sum_function(run: Run):
    return _trained(
        run,
        "values",
        compile_options=lambda: {"loss": squares, "metrics": [squares]},
        optimizer=lambda: keras.optimizers.SGD(0.003),
    )


@case(long=True)
def sum_function_with_sample_weight(run: Run):
    """Keras takes it times the mean of the weights."""
    return _trained(
        run,
        "values",
        compile_options=lambda: {"loss": squares},
        optimizer=lambda: keras.optimizers.SGD(0.003),
        sample_weight=_weights(),
    )


@case()
def mean_function(run: Run):
    def mean_square(y_true, y_pred):
        return ops.mean(ops.square(y_pred - y_true))

    return _trained(
        run, "values", compile_options=lambda: {"loss": mean_square, "metrics": [mean_square]}
    )


class MeanOfLabelled(keras.Loss):
    """`ner_transformers`: a mean over the tokens that have a label."""

    def call(self, y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        mask = ops.cast(y_true > 0, losses.dtype)
        return ops.sum(losses * mask) / (ops.sum(mask) + 1e-6)


def divided_by_itself(y_true, y_pred):
    """1 for any rows: of all rows in its gradient alone."""
    loss = ops.mean(ops.square(y_true - y_pred))
    return loss / tf.stop_gradient(loss)


@case()
def function_divided_by_itself(run: Run):
    return _trained(run, compile_options=lambda: {"loss": divided_by_itself})


@case()
def mean_over_labelled_tokens(run: Run):
    def build():
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.Dense(5, "tanh"),
                layers.Dense(3),
            ]
        )

    def data(rows):
        tokens, _ = MODELS["embedding"].data(rows)
        return tokens, tokens % 3

    return _trained(run, build=build, data=data, compile_options=lambda: {"loss": MeanOfLabelled()})


# ---- losses that layers add --------------------------------------------------------------------


class Penalty(layers.Layer):
    """Adds sums, a mean and a constant, and one that is not a number but one for each row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = self.add_weight(shape=(), initializer="ones")
        self.dropout = layers.Dropout(0.5)

    def call(self, x):
        self.add_loss(0.01 * ops.sum(x * self.size))
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        self.add_loss(0.1 * self.size)
        self.add_loss(0.01 * ops.max(x, axis=-1))
        return self.dropout(x, training=False)


class Accounting(keras.Sequential):
    """A model that adds a loss itself, and reads all of them."""

    def call(self, x, training=False):
        y = super().call(x, training=training)
        self.add_loss(0.01 * ops.sum(ops.square(y)))
        return y

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred)) + sum(ops.sum(loss) for loss in self.losses)


@case(core=True)
def sums_that_layers_add(run: Run):
    def build():
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, "tanh"), Penalty(), layers.Dense(3)]
        )

    return _trained(run, "mlp", build=build)


@case()
def sums_that_a_model_adds(run: Run):
    def build():
        return Accounting([keras.Input((6,)), layers.Dense(5, "tanh"), Penalty(), layers.Dense(3)])

    return _trained(run, "mlp", build=build, compile_options=_options)


# ---- all_rows ------------------------------------------------------------------------------------


def _all_rows(run: Run):
    return run.strategy.all_rows if run.strategy else lambda tensor: tensor


def _options() -> dict:
    return {"loss": None}


@case()
def all_rows_in_train_step(run: Run):
    """All replicas compute the whole loss."""
    all_rows = _all_rows(run)

    class Contrastive(keras.Model):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = nt_xent(None, all_rows(self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def build():
        model = two_towers()
        return Contrastive(model.inputs, model.outputs)

    return run.train("mlp", build=build, compile_options=_options, rows=ROWS).results()


def _of_own_rows_against_all(run: Run, **options) -> dict:
    all_rows = _all_rows(run)

    class Contrastive(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            own, every = ops.split(y_pred, 2, axis=-1)[0], all_rows(y_pred)
            others = ops.split(every, 2, axis=-1)[1]
            scores = ops.matmul(own, ops.transpose(others))
            same = ops.equal(y[:, None], all_rows(y)[None])
            likelihood = ops.sum(ops.where(same, ops.softmax(scores), 0.0), axis=1)
            return -ops.mean(ops.log(likelihood))

    def build():
        model = two_towers()
        return Contrastive(model.inputs, model.outputs)

    return _trained(run, "mlp", build=build, compile_options=_options, **options)


@case(core=True)
def all_rows_in_compute_loss(run: Run):
    """Each replica computes its own rows' losses against all rows, half of the matrix each."""
    return _of_own_rows_against_all(run)


@case(atol=1e-12)
def all_rows_of_few(run: Run):
    """Parts that are uneven, and fewer rows than replicas, in float64."""
    with in_float64():
        return _of_own_rows_against_all(run, rows=5, batch_size=3)


@case()
def over_sequences(run: Run):
    """The rows of all replicas, whose number no trace knows, go through a layer of sequences."""

    def ratio(y_true, y_pred):
        weights = ops.sigmoid(y_pred[..., :1])
        return ops.sum(weights * ops.square(y_pred[..., 1:])) / ops.sum(weights)

    def build():
        parts = [layers.RepeatVector(3), layers.Dense(4, "tanh"), layers.Dense(2)]
        return keras.Sequential([keras.Input((6,)), *parts])

    return _trained(run, "mlp", build=build, compile_options=lambda: {"loss": ratio})


@case()
def all_rows_in_layer(run: Run):
    all_rows = _all_rows(run)

    class Centered(layers.Layer):
        def call(self, x):
            return x - ops.mean(all_rows(x), axis=0)

    def build():
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, "tanh"), Centered(), layers.Dense(3)]
        )

    return _trained(run, "mlp", build=build)
