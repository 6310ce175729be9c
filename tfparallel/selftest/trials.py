"""Trainings that end in numbers to compare: small models, sizes of batches, and types."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfparallel.selftest.verdicts import MOST_DIFFERENCE

_CLASSES = 3
_TOKENS = 20
_LENGTH = 6
# Rows and batch: whole batches; a last one that is smaller; fewer rows than replicas; five batches.
SIZES = {"static": (32, 16), "uneven": (29, 12), "tiny": (2, 1), "many": (45, 10)}
# What users may add to `compile`, by name: its keywords, of how a step runs, and the optimizer's.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "steps_per_execution": ({"steps_per_execution": 4}, {}),
    "run_eagerly": ({"run_eagerly": True}, {}),
    "jit_compile": ({"jit_compile": True}, {}),
    "clipping": ({}, {"global_clipnorm": 0.1}),
    "accumulation": ({}, {"gradient_accumulation_steps": 2}),
}
MOST_DIFFERENCE_OF_HALF = 1e-2


class Trial(NamedTuple):
    """One training: a model of `MODELS`, a size of `SIZES`, a dtype policy of Keras, an option."""

    model: str
    size: str
    dtype: str = "float32"
    option: str = ""  # of `OPTIONS`

    def __str__(self) -> str:
        return "-".join(filter(None, self))


@dataclass(frozen=True)
class TrialEnding:
    """What a training left: `weights`, and `predictions` and `evaluation` from its middle."""

    weights: list[np.ndarray]
    evaluation: np.ndarray
    predictions: np.ndarray


def _mlp(num_hidden: int = 3) -> keras.Model:
    hidden = [layers.Dense(16, activation="tanh") for _ in range(num_hidden)]
    return keras.Sequential([keras.Input((8,)), *hidden, _scores()])


def _cnn() -> keras.Model:
    norm = layers.BatchNormalization(synchronized=True)
    block = [layers.Conv2D(4, 3), norm, layers.Activation("tanh")]
    return keras.Sequential([keras.Input((8, 8, 3)), *block, layers.Flatten(), _scores()])


def _convolutions() -> keras.Model:
    block = [layers.Conv2D(4, 3, activation="tanh"), layers.AveragePooling2D(2)]
    return keras.Sequential([keras.Input((8, 8, 3)), *block, layers.Flatten(), _scores()])


def _gpt(blocks: int = 2) -> keras.Model:
    tokens = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_TOKENS, 8)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        x = layers.Add()([x, layers.Dense(8, activation="gelu")(x)])
    return keras.Model(tokens, layers.Dense(_TOKENS, dtype="float32")(x))


def _scores() -> keras.layers.Layer:
    return layers.Dense(_CLASSES, dtype="float32")


# BatchNorm in a pipeline normalises by microbatch: it is asked the model without. To trace the
# large ones takes long where there are few cores and no GPU.
MODELS: dict[str, Callable[[], keras.Model]] = {
    "mlp": _mlp,
    "mlp_layer": lambda: _mlp(num_hidden=1),
    "cnn": _cnn,
    "convolutions": _convolutions,
    "gpt": _gpt,
    "gpt_block": lambda: _gpt(blocks=1),
}


def data_of(trial: Trial) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows, labels and the size of a batch."""
    rows, batch = SIZES[trial.size]
    rng = np.random.default_rng(0)
    if trial.model.startswith("gpt"):
        tokens = rng.integers(0, _TOKENS, (rows, _LENGTH + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:], batch
    shape = (8,) if trial.model.startswith("mlp") else (8, 8, 3)
    labels = rng.integers(0, _CLASSES, rows).astype("int32")
    return rng.normal(size=(rows, *shape)).astype("float32"), labels, batch


def compiled_model(trial: Trial) -> keras.Model:
    """The model, from the same weights each time; called within the strategy's scope."""
    model = MODELS[trial.model]()
    of_compile, of_optimizer = OPTIONS[trial.option]
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, **of_optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **of_compile,
    )
    return model


def train(trial: Trial, strategy: tf.distribute.Strategy | None = None) -> TrialEnding:
    """`fit`, `evaluate`, `predict` and `fit` again, under a strategy or plainly on one device."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(trial.dtype)
    x, y, batch = data_of(trial)
    options = {"batch_size": batch, "verbose": 0}
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = compiled_model(trial)
        model.fit(x, y, epochs=2, shuffle=False, **options)
        evaluation = np.asarray(model.evaluate(x, y, **options))
        predictions = np.asarray(model.predict(x, **options))
        model.fit(x, y, epochs=1, shuffle=False, **options)
        return TrialEnding(model.get_weights(), evaluation, predictions)
    finally:
        keras.config.set_dtype_policy("float32")


def reference_of(trial: Trial) -> Trial:
    """What one device trains to compare with: how a step runs makes no difference there."""
    _, of_optimizer = OPTIONS[trial.option]
    return trial if of_optimizer else trial._replace(option="")


def difference(trial: Trial, one: TrialEnding, other: TrialEnding) -> float:
    """The largest difference of two endings; NaN where one has it.

    In float32 over weights, predictions and loss, relative to numbers above 1. With half types,
    in which roundings differ by a thousandth each, of the loss alone.
    """
    if trial.dtype != "float32":
        return float(np.abs(one.evaluation - other.evaluation)[0])
    pairs = [
        *zip(one.weights, other.weights, strict=True),
        (one.evaluation, other.evaluation),
        (one.predictions, other.predictions),
    ]
    return float(np.max([np.max(np.abs(a - b) / np.maximum(np.abs(b), 1.0)) for a, b in pairs]))


def most_difference(trial: Trial) -> float:
    """How far two endings of a trial may be apart."""
    return MOST_DIFFERENCE if trial.dtype == "float32" else MOST_DIFFERENCE_OF_HALF
