"""Shows whether a difference between a strategy and one device is rounding: it is gone in float64.

    python benchmarks/rounding.py
    horovodrun -np 2 python benchmarks/rounding.py --horovod
    python benchmarks/rounding.py --demo

Trains small models for six steps of 13 rows, which no number of replicas divides, in float32 and in
float64, and prints the largest difference of any weight from one device's. Columns:

- the strategies: two replicas, two stages, or two ranks of Horovod; "2, then 3": three steps under
  two replicas, and three more of what they have reached under three, as after a restart;
- "1 ulp": one device, started from weights of which each is moved by one unit in its last digit.
  It is what rounding alone makes of training; a difference below it says nothing about a strategy.

The ViT has KerasHub's structure. Attention's key biases have no effect on a loss: softmax takes
away what all scores of a query share. Their gradient is zero but for rounding, and Adam divides a
gradient by its own size. The last column is the largest difference of all other weights.

`--demo` trains the demo's CNN as it does (examples/demo.py), and with ReLU and max pooling.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfparallel import HorovodStrategy, MirroredStrategy, PipelineStrategy

SIDE, CLASSES, ROWS, STEPS = 16, 10, 13, 6
Phases = Sequence[tuple[tf.distribute.Strategy | None, int]]  # who trains for how many steps


class ClassToken(layers.Layer):
    """A learnt token before the patches, and a learnt position for each."""

    def build(self, shape: tuple) -> None:
        """Make the weights for patches `[rows, patches, size]`."""
        self.token = self.add_weight(shape=(1, 1, shape[2]), initializer="zeros")
        positions = (1, shape[1] + 1, shape[2])
        self.positions = self.add_weight(shape=positions, initializer="random_normal")

    def call(self, patches: tf.Tensor) -> tf.Tensor:
        """`[rows, 1 + patches, size]`."""
        token = keras.ops.repeat(self.token, keras.ops.shape(patches)[0], axis=0)
        return keras.ops.concatenate([token, patches], axis=1) + self.positions


def vit(patch: int = 4, size: int = 16, blocks: int = 2) -> keras.Model:
    """A vision transformer that normalises before attention and before its dense layers.

    Source: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929.
    """
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(size, patch, strides=patch)(inputs)
    x = ClassToken()(layers.Reshape((-1, size))(x))
    for _ in range(blocks):
        normal = layers.LayerNormalization(epsilon=1e-6)(x)
        attended = layers.MultiHeadAttention(num_heads=2, key_dim=size // 2)(normal, normal)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * size, "gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = layers.Add()([x, layers.Dense(size)(hidden)])
    token = layers.LayerNormalization(epsilon=1e-6)(x)[:, 0]
    return keras.Model(inputs, layers.Dense(CLASSES)(token))


def cnn(activation: str, pooling: type[layers.Layer]) -> keras.Model:
    """Two convolutions and a dense layer, as in the demo."""
    parts = [layers.Conv2D(8, 3, activation=activation), pooling(2), layers.Conv2D(16, 3)]
    parts += [layers.Activation(activation), layers.Flatten(), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((SIDE, SIDE, 3)), *parts])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "ViT": vit,
    "CNN, tanh, average pooling": lambda: cnn("tanh", layers.AveragePooling2D),
    "CNN, ReLU, max pooling": lambda: cnn("relu", layers.MaxPooling2D),
}
OPTIMIZERS = {"Adam": lambda: keras.optimizers.Adam(1e-3), "SGD": lambda: keras.optimizers.SGD(0.1)}


def main() -> None:
    """Prints a line for each model, optimizer and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--horovod", action="store_true", help="ranks of horovodrun, not replicas")
    parser.add_argument("--demo", action="store_true", help="the demo's CNN, some 190 steps of it")
    options = parser.parse_args()
    if options.demo:
        demo()
        return
    candidates = horovod() if options.horovod else local()
    names = [*candidates, "1 ulp", "without key biases"]
    print(f"{'':26} {'':4} {'':7} " + " ".join(f"{name:>10}" for name in names))
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            for precision in ("float32", "float64"):
                found = differences(model, optimizer, precision, candidates)
                figures = " ".join(f"{x:{max(10, len(n))}.1e}" for x, n in zip(found, names))
                print(f"{model:26} {optimizer:4} {precision:7} {figures}", flush=True)


def demo() -> None:
    """Prints how far the demo's weights are from one device's, in both precisions."""
    from examples import demo

    kinds = {
        "tanh, average pooling": {},
        "ReLU, max pooling": {"activation": "relu", "pooling": "max"},
    }
    runs = [run for run in demo.RUNS if run.strategy in ("one_device", "mirrored", "pipeline")]
    for kind, settings in kinds.items():
        demo.SETTINGS |= {f"model.{name}": value for name, value in settings.items()}
        for precision in ("float32", "float64"):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "keras.json").write_text(json.dumps({"floatx": precision}))
                demo.ENVIRONMENT["KERAS_HOME"] = folder
                results = {
                    run.strategy: demo.train(run, Path(folder), lambda epoch: None) for run in runs
                }
            print(f"{kind:22} {precision}", demo.weight_differences(results), flush=True)


def local() -> dict[str, Phases]:
    """What one process has: replicas and stages on logical CPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * 3
    tf.config.set_logical_device_configuration(cpu, logical)
    mirrored = [MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (2, 3)]
    pipeline = PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=3)
    return {
        "Mirrored": [(mirrored[0], STEPS)],
        "Pipeline": [(pipeline, STEPS)],
        "2, then 3": [(strategy, STEPS // 2) for strategy in mirrored],
    }


def horovod() -> dict[str, Phases]:
    """The ranks that `horovodrun` has started."""
    return {"Horovod": [(HorovodStrategy(), STEPS)]}


def differences(
    model: str, optimizer: str, precision: str, candidates: dict[str, Phases]
) -> list[float]:
    """Largest differences from one device: each candidate's, 1 ulp's, and without key biases."""
    keras.config.set_floatx(precision)
    keras.config.set_dtype_policy(precision)

    def weights(phases: Phases, moved: bool = False) -> dict[str, np.ndarray]:
        return train(MODELS[model], OPTIMIZERS[optimizer], phases, moved)

    alone = weights([(None, STEPS)])
    trained = [weights(phases) for phases in candidates.values()]
    found = [largest(alone, each) for each in [*trained, weights([(None, STEPS)], moved=True)]]
    others = [name for name in alone if "key/bias" not in name]
    return [*found, max(largest(alone, each, others) for each in trained)]


def train(
    build: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.Optimizer],
    phases: Phases,
    moved: bool,
) -> dict[str, np.ndarray]:
    """The weights after all `phases`, each of which begins with what the one before has reached.

    Args:
        build, make_optimizer: called in each phase's scope.
        phases: strategies, None for one device, with a number of steps.
        moved: the first phase starts from weights moved by one unit in the last digit.
    """
    rng, reached = np.random.default_rng(0), None
    for strategy, steps in phases:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model, optimizer = build(), make_optimizer()
            optimizer.build(model.trainable_variables)
            variables = [*model.weights, *optimizer.variables]
            if moved:
                reached = [np.nextafter(w, w + 1) for w in model.get_weights()]
            for variable, value in zip(variables, reached or [], strict=False):
                variable.assign(value)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer=optimizer, loss=loss)
        for _ in range(steps):
            x = rng.normal(size=(ROWS, SIDE, SIDE, 3)).astype(keras.config.floatx())
            model.train_on_batch(x, rng.integers(0, CLASSES, ROWS))
        reached = [np.asarray(variable) for variable in variables]
    names = [f"{i} {weight.path}" for i, weight in enumerate(model.weights)]
    return dict(zip(names, reached, strict=False))


def largest(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: list | None = None) -> float:
    """The largest difference of any weight, of those whose place and name are `names`."""
    chosen = [i for i, name in enumerate(a) if names is None or name in names]
    pairs = list(zip(a.values(), b.values(), strict=True))
    return max(float(np.max(np.abs(pairs[i][0] - pairs[i][1]))) for i in chosen)


if __name__ == "__main__":
    main()
