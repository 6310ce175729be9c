"""Whatever stands between softmax or sigmoid and its loss: the loss finds the logits, as in Keras.

The weights make probabilities that float32 has as 0 or 1, of which there is no gradient.
`losses.sure_probabilities` asks every strategy.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.helpers import assert_same_training, cpu_mesh_of, numbered
from tests.tensor_parallel.layouts import LayoutOfImages, cpu_mesh

pytestmark = pytest.mark.turns

CPUS = ["CPU:0", "CPU:1", "CPU:2"]
ROWS, CLASSES = 11, 3


def steep(units: int, activation=None, **options) -> layers.Dense:
    initializer = keras.initializers.RandomNormal(stddev=60.0, seed=3)
    return layers.Dense(units, activation, kernel_initializer=initializer, **options)


def hidden() -> tuple:
    inputs = keras.Input((4,))
    return inputs, layers.Dense(8, "tanh", name="hidden")(inputs)


def softmax_of_tensorflow():
    """Keras looks at the operation here."""
    inputs, x = hidden()
    return keras.Model(inputs, steep(CLASSES, tf.nn.softmax)(x))


def softmax_of_keras():
    inputs, x = hidden()
    return keras.Model(inputs, steep(CLASSES, "softmax")(x))


def softmax_on_another_stage():
    inputs, x = hidden()
    x = layers.Softmax(name="softmax")(steep(CLASSES, name="logits")(x))
    return keras.Model(inputs, layers.Dropout(0.0, name="dropout")(x))


def nested():
    inputs, x = hidden()
    inner = [keras.Input((8,)), layers.Dense(6, "tanh"), steep(CLASSES, "softmax")]
    return keras.Model(inputs, keras.Sequential(inner)(x))


def in_a_lambda():
    inputs, x = hidden()
    return keras.Model(inputs, layers.Lambda(lambda x: tf.nn.softmax(x))(steep(CLASSES)(x)))


def convolution():
    """A replica without rows computes one and cuts it off."""
    inputs = keras.Input((4,))
    x = layers.Conv2D(4, 2, padding="same")(layers.Reshape((2, 2, 1), name="image")(inputs))
    kernel = keras.initializers.RandomNormal(stddev=60.0, seed=3)
    x = layers.Conv2D(CLASSES, 2, activation="sigmoid", kernel_initializer=kernel)(x)
    return keras.Model(inputs, x)


def in_parts():
    inputs, x = hidden()
    return keras.Model(inputs, steep(CLASSES, "sigmoid", name="steep")(x))


def in_an_activation_in_parts():
    inputs, x = hidden()
    return keras.Model(inputs, layers.Activation("sigmoid")(steep(CLASSES, name="steep")(x)))


def image_in_parts():
    inputs = keras.Input((4,))
    x = layers.Reshape((4, 1, 1))(inputs)
    kernel = keras.initializers.RandomNormal(stddev=60.0, seed=3)
    options = {"activation": "sigmoid", "kernel_initializer": kernel}
    return keras.Model(inputs, layers.Conv2D(1, 3, padding="same", **options)(x))


class LossLayer(layers.Layer):
    def call(self, probabilities, y):
        self.add_loss(ops.mean(keras.losses.categorical_crossentropy(y, probabilities)))
        return probabilities


def loss_in_a_layer():
    (inputs, x), targets = hidden(), keras.Input((CLASSES,))
    outputs = LossLayer(name="loss")(steep(CLASSES, "softmax", name="softmax")(x), targets)
    return keras.Model([inputs, targets], outputs)


def loss_in_the_graph():
    (inputs, x), targets = hidden(), keras.Input((CLASSES,))
    values = ops.categorical_crossentropy(targets, steep(CLASSES, "softmax")(x))
    return keras.Model([inputs, targets], values)


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(keras.losses.categorical_crossentropy(y, self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own_loss": loss}


def in_an_own_step():
    inputs, x = hidden()
    return OwnStep(inputs, steep(CLASSES, tf.nn.softmax)(x))


def of_all_rows(y_true, y_pred):
    """Of a batch, and not of its rows: gathered from all replicas."""
    values = keras.losses.categorical_crossentropy(y_true, y_pred)
    return ops.sum(values) / (1.0 + ops.sum(y_true[:, 0]))


def by_columns():
    layout = keras.distribution.LayoutMap(cpu_mesh(1, 2))
    layout["steep/kernel"] = (None, "model")
    return layout


CROSS_ENTROPY = "categorical_crossentropy"
PIPELINE = "pipeline"
STRATEGIES = {
    "mirrored": lambda: tfparallel.MirroredStrategy(CPUS),
    "computed again": lambda: tfparallel.OneDeviceStrategy(
        "CPU:0", memory=tfparallel.MemoryPolicy("full")
    ),
    PIPELINE: lambda: tfparallel.PipelineStrategy(CPUS[:2], 3),
    "three stages": lambda: tfparallel.PipelineStrategy(CPUS, 2),
    "alone on a stage": lambda: tfparallel.PipelineStrategy(
        CPUS, 2, partition=[["hidden"], ["logits"], ["softmax", "dropout"]]
    ),
    "layer of its own": lambda: tfparallel.PipelineStrategy(
        CPUS, 2, partition=[["hidden"], ["softmax"], ["loss"]]
    ),
    "columns": lambda: tfparallel.TensorParallelStrategy(by_columns()),
    "rows of the image": lambda: tfparallel.TensorParallelStrategy(LayoutOfImages(cpu_mesh(1, 2))),
    "branches": lambda: tfparallel.TensorParallelStrategy(
        "branches", device_mesh=cpu_mesh_of(batch=1, model=2)
    ),
}


def trained(build, loss, strategy) -> dict[str, np.ndarray]:
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        model.compile(keras.optimizers.SGD(0.01), loss=loss)
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(ROWS, 4)).astype("float32")
    y = np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, ROWS)]
    if model.output_shape[-1] == 1:
        y = rng.integers(0, 2, (ROWS, 4)).astype("float32")
    y = y.reshape([ROWS, *model.output_shape[1:]]) if len(model.inputs) == 1 else y
    data = {"x": x, "y": y}
    if len(model.inputs) > 1:
        data = {"x": (x, y), "y": None if loss is None else np.zeros(ROWS, "float32")}
    options = {**data, "batch_size": 4, "verbose": 0}
    history = model.fit(**options, epochs=2, shuffle=False).history
    results = numbered("weights", model.get_weights())
    if loss is not None:
        results["evaluated"] = np.asarray(model.evaluate(**options))
    return results | {key: np.asarray(values) for key, values in history.items()}


@pytest.mark.parametrize(
    "strategy, build, loss",
    [
        (PIPELINE, softmax_of_tensorflow, CROSS_ENTROPY),
        (PIPELINE, softmax_of_tensorflow, "binary_crossentropy"),
        (PIPELINE, softmax_of_keras, "binary_crossentropy"),
        (PIPELINE, softmax_of_keras, of_all_rows),
        ("alone on a stage", softmax_on_another_stage, CROSS_ENTROPY),
        ("three stages", nested, CROSS_ENTROPY),
        ("three stages", in_a_lambda, CROSS_ENTROPY),
        ("layer of its own", loss_in_a_layer, None),
        ("three stages", loss_in_the_graph, lambda y_true, y_pred: y_pred),
        (PIPELINE, in_an_own_step, CROSS_ENTROPY),
        ("computed again", softmax_of_tensorflow, CROSS_ENTROPY),
        ("computed again", softmax_of_tensorflow, "binary_crossentropy"),
        ("computed again", nested, CROSS_ENTROPY),
        ("computed again", in_an_own_step, CROSS_ENTROPY),
        ("mirrored", softmax_of_keras, of_all_rows),
        ("mirrored", softmax_of_tensorflow, of_all_rows),
        ("mirrored", convolution, "binary_crossentropy"),
        ("branches", softmax_of_tensorflow, CROSS_ENTROPY),
        ("columns", in_parts, "binary_crossentropy"),
        ("columns", in_an_activation_in_parts, "binary_crossentropy"),
        ("rows of the image", image_in_parts, "binary_crossentropy"),
    ],
)
def test_losses_find_the_logits(strategy, build, loss):
    reference = trained(build, loss, None)
    assert_same_training(reference, trained(build, loss, STRATEGIES[strategy]()), 1e-4)
