"""Compares training of real architectures under PipelineStrategy with training on one device.

    python benchmarks/pipeline_architectures.py
    python benchmarks/pipeline_architectures.py --models ResNet50 --stages 4 --microbatches 4

Models of `keras.applications` and a U-Net, random weights, images of 32 x 32, three batches.
BatchNorm is in inference mode, as microbatches would be normalised otherwise, by the statistics of
the first batch, so that gradients reach all layers. Dropout is off, as its masks differ by
microbatch. Prints the largest differences of losses and of weights (numbers above 1: relative to
them), how far training has moved a weight at most, and the seconds until the end of the first step.
In single precision rounding decides on which side of a ReLU's kink a number is, and the gradient
with it; `--float64` tells that from mistakes. A rate at which training diverges shows differences
that are its own.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfparallel import PipelineStrategy

MODELS = ("MobileNetV2", "ResNet50", "EfficientNetB0", "DenseNet121", "UNet")
SIDE, CLASSES, STEPS = 32, 10, 3


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--float64", action="store_true", help="in double precision")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rows", type=int, default=7, help="of a batch (default 7, uneven)")
    options = parser.parse_args()
    if options.float64:
        keras.config.set_floatx("float64")
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * options.stages
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{i}" for i in range(options.stages)]
    for name in options.models:
        start = normalised(name, options.rows)
        rate = options.learning_rate
        alone, _ = train(name, start, tf.distribute.get_strategy(), options.rows, rate)
        strategy = PipelineStrategy(devices, options.microbatches, options.schedule)
        piped, first_s = train(name, start, strategy, options.rows, rate)
        losses, weights = (differences(a, b) for a, b in zip(alone, piped, strict=True))
        moved = max(float(np.max(np.abs(a - b))) for a, b in zip(start, alone[1], strict=True))
        print(
            f"{name:16} losses {losses:.1e}  weights {weights:.1e} of {moved:.1e} that they moved  "
            f"first step {first_s:.0f} s",
            flush=True,
        )


def normalised(name: str, rows: int) -> list[np.ndarray]:
    """Weights whose BatchNorm layers have the statistics of the first batch."""
    keras.utils.set_random_seed(1)
    model = build(name)
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
    model(data(model, rows)[0], training=True)
    return model.get_weights()


def train(
    name: str, start: list, strategy: tf.distribute.Strategy, rows: int, learning_rate: float
) -> tuple[tuple, float]:
    """Losses and weights after a few steps, and the time until the end of the first one."""
    with strategy.scope():
        model = build(name)
        model.set_weights(start)
        for layer in model.layers:
            if isinstance(layer, layers.BatchNormalization):
                layer.trainable = False
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(learning_rate, momentum=0.9), loss=loss)
    x, y = data(model, rows)
    started = time.perf_counter()
    losses = [model.train_on_batch(x, y)]
    first_s = time.perf_counter() - started
    losses += [model.train_on_batch(x, y) for _ in range(STEPS - 1)]
    return ([np.asarray(losses)], model.get_weights()), first_s


def build(name: str) -> keras.Model:
    """A model without Dropout that gives scores."""
    model = u_net() if name == "UNet" else application(name)
    for layer in model.layers:
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return model


def data(model: keras.Model, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and classes of images or of pixels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, SIDE, SIDE, 3)).astype(keras.config.floatx())
    return x, rng.integers(0, CLASSES, (rows, *model.output_shape[1:-1]))


def application(name: str) -> keras.Model:
    """A model of `keras.applications` that gives scores."""
    make = getattr(keras.applications, name)
    options = {"weights": None, "input_shape": (SIDE, SIDE, 3), "classes": CLASSES}
    return make(**options, classifier_activation=None)


def u_net() -> keras.Model:
    """Scores of every pixel: four halvings and back, what was before each skipping to behind it.

    Source: Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597.
    """

    def convolutions(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    x = inputs = keras.Input((SIDE, SIDE, 3))
    skipped = []
    for i in range(4):
        x = convolutions(x, 16 << i)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolutions(x, 256)
    for i in reversed(range(4)):
        x = layers.Conv2DTranspose(16 << i, 2, strides=2)(x)
        x = convolutions(layers.Concatenate()([x, skipped[i]]), 16 << i)
    return keras.Model(inputs, layers.Conv2D(CLASSES, 1)(x))


def differences(expected: list, received: list) -> float:
    """The largest difference of two lists of arrays, relative to numbers above 1."""
    return max(
        float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(a))))
        for a, b in zip(expected, received, strict=True)
    )


if __name__ == "__main__":
    main()
