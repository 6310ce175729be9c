"""Models of the size that users have, whose steps are timed."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import layers

_IMAGE = (224, 224, 3)
_CLASSES = 1000
_TOKENS = 32768
_LENGTH = 512
_BLOCKS, _HEADS, _WIDTH = 12, 12, 768  # GPT-2's smallest: with this vocabulary 136 M weights


class Workload(NamedTuple):
    """What is timed.

    Attributes:
        build: makes the model, of the dtype policy that is set; its outputs are logits.
        data: given a number of rows, inputs and class numbers.
        rows_a_gpu: of a batch.
    """

    build: Callable[[], keras.Model]
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]
    rows_a_gpu: int


def _resnet50() -> keras.Model:
    return keras.applications.ResNet50(
        weights=None, input_shape=_IMAGE, classes=_CLASSES, classifier_activation=None
    )


def _images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, *_IMAGE), "float32")
    return x, rng.integers(0, _CLASSES, rows).astype("int32")


def _gpt() -> keras.Model:
    tokens = keras.Input((_LENGTH,), dtype="int32")
    positions = layers.Embedding(_LENGTH, _WIDTH)(keras.ops.arange(_LENGTH))
    x = layers.Embedding(_TOKENS, _WIDTH)(tokens) + positions
    for _ in range(_BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * _WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(_WIDTH)(y)
    return keras.Model(tokens, layers.Dense(_TOKENS)(layers.LayerNormalization()(x)))


def _texts(rows: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, _TOKENS, (rows, _LENGTH + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


WORKLOADS = {
    "resnet50": Workload(_resnet50, _images, 64),
    "gpt": Workload(_gpt, _texts, 8),
}


def timed_model(workload: Workload) -> keras.Model:
    """The model, compiled; called within the strategy's scope."""
    model = workload.build()
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model
