"""Compares training of the models of `keras.applications` with one device, in double precision.

    python benchmarks/applications.py
    python benchmarks/applications.py --models MobileNetV2 --strategies mirrored pipeline --nested

Random weights, images of the smallest size that a model takes, two steps of SGD with momentum on
five rows, which no number of replicas divides. Dropout and stochastic depth are off, as replicas
and microbatches draw masks of their own. BatchNorm is synchronised under Mirrored and
CentralStorage, and compared with one device that trains on all rows. A pipeline never has all rows
at once: there, and on the one device it is compared with, BatchNorm is frozen with the statistics
of the first batch. `--nested` puts the model as one layer under a head.

Prints the largest difference of a loss or a weight from one device (of numbers above 1: relative
to them), and the noise floor: the same between two trainings on one device of which one starts
with all weights moved by one unit in the last place.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfparallel import CentralStorageStrategy, MirroredStrategy, PipelineStrategy

SIDES = {
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "ResNet50V2": 32,
    "DenseNet121": 32,
    "ConvNeXtTiny": 32,
    "Xception": 71,
    "InceptionV3": 75,
    "NASNetMobile": 32,
}
DEVICES = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable] = {
    "mirrored": lambda: MirroredStrategy(DEVICES),
    "central_storage": lambda: CentralStorageStrategy(DEVICES),
    "pipeline": lambda: PipelineStrategy(DEVICES, num_microbatches=2),
}
ROWS, CLASSES, STEPS = 5, 3, 2
Numbers = list[np.ndarray]


def main() -> None:
    """Prints a line for each model and strategy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--nested", action="store_true", help="as a layer under a head")
    options = parser.parse_args()
    keras.config.set_floatx("float64")
    logical = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, logical)
    for name in options.models:
        x, y = data(SIDES[name])
        start = normalised(name, options.nested, x)
        alone: dict[bool, tuple[Numbers, float]] = {}  # by whether BatchNorm is frozen
        for strategy_name in options.strategies:
            frozen = strategy_name == "pipeline"
            if frozen not in alone:
                training = Training(name, options.nested, frozen, tf.distribute.get_strategy())
                reference = training.run(start, x, y)
                moved = training.run([np.nextafter(w, np.inf) for w in start], x, y)
                alone[frozen] = reference, largest_difference(reference, moved)
            reference, floor = alone[frozen]
            training = Training(name, options.nested, frozen, STRATEGIES[strategy_name]())
            difference = largest_difference(reference, training.run(start, x, y))
            norm = "frozen" if frozen else "synchronised"
            print(
                f"{name:17} {strategy_name:16} BatchNorm {norm:13} difference {difference:.1e}  "
                f"noise floor {floor:.1e}",
                flush=True,
            )
        keras.backend.clear_session()


class Training:
    """A compiled model, on one device or under a strategy."""

    def __init__(self, name: str, nested: bool, frozen: bool, strategy: tf.distribute.Strategy):
        with strategy.scope():
            self._model = model = build(name, nested, synchronized=not frozen)
            for layer in model._flatten_layers():
                if frozen and isinstance(layer, layers.BatchNormalization):
                    layer.trainable = False
            optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
            optimizer.build(model.trainable_variables)
        self._optimizer_start = [v.numpy() for v in optimizer.variables]

    def run(self, start: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        """Losses and weights after a few steps that begin with weights `start`."""
        model = self._model
        model.set_weights(start)
        for variable, value in zip(model.optimizer.variables, self._optimizer_start, strict=True):
            variable.assign(value)
        model.reset_metrics()
        losses = [model.train_on_batch(x, y) for _ in range(STEPS)]
        return [np.asarray(losses), *model.get_weights()]


def build(name: str, nested: bool, synchronized: bool) -> keras.Model:
    """A model that draws no masks and gives scores."""
    make = getattr(keras.applications, name)
    options = {"weights": None, "input_shape": (SIDES[name], SIDES[name], 3)}
    if not nested:
        model = make(**options, classes=CLASSES, classifier_activation=None)
        return without_masks(model, synchronized)
    base = without_masks(make(**options, include_top=False, pooling="avg"), synchronized)
    inputs = keras.Input(options["input_shape"])
    return keras.Model(inputs, layers.Dense(CLASSES)(base(inputs)))


def without_masks(model: keras.Model, synchronized: bool) -> keras.Model:
    """A copy of a model without Dropout and stochastic depth."""

    def copy(layer: layers.Layer) -> layers.Layer:
        config = layer.get_config()
        if isinstance(layer, layers.BatchNormalization):
            config["synchronized"] = synchronized
        config.update({key: 0.0 for key in ("rate", "drop_path_rate") if key in config})
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=copy)


def normalised(name: str, nested: bool, x: np.ndarray) -> Numbers:
    """Random weights, BatchNorm layers with the statistics of `x`."""
    keras.utils.set_random_seed(1)
    model = build(name, nested, synchronized=False)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
    model(x, training=True)
    return model.get_weights()


def data(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, side, side, 3)), rng.integers(0, CLASSES, ROWS)


def largest_difference(expected: Numbers, received: Numbers) -> float:
    """Of numbers above 1, relative to them."""
    pairs = zip(expected, received, strict=True)
    return max(float(np.max(np.abs(a - b) / np.maximum(1, np.abs(a)))) for a, b in pairs)


if __name__ == "__main__":
    main()
