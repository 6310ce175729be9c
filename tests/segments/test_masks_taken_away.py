"""A layer that takes a mask away: those that see the same tensor later see none, wherever they are.

Keras's MultiHeadAttention does so to its query, value and key.
"""

import keras
import numpy as np
import pytest
from keras import layers

from tests.helpers import assert_same_training, train
from tfparallel import MemoryPolicy, OneDeviceStrategy, PipelineStrategy

pytestmark = pytest.mark.turns

ROWS = 7


def tokens(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, 3, (rows, 5)), rng.normal(size=(rows, 5, 2)).astype("float32")


def of_what_the_attention_took():
    """Keras calls `join` after the attention, on the same tensor."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(3, 6, mask_zero=True, name="embedding")(inputs)
    normed = layers.LayerNormalization(name="norm")(embedded)
    attended = layers.MultiHeadAttention(2, 3, name="attention")(normed, normed)
    attended = layers.Dense(6, name="dense")(layers.Dense(6, name="hidden")(attended))
    joined = layers.Average(name="join")([normed, embedded])
    heads = [layers.Dense(2, name=f"head_{i}")(x) for i, x in enumerate([joined, attended])]
    return keras.Model(inputs, heads)


def of_what_dropout_gave():
    """In `evaluate` Dropout gives the tensor that it got, which is the attention's and `join`'s."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(3, 6, mask_zero=True, name="embedding")(inputs)
    dropped = layers.Dropout(1e-9, name="drop")(embedded)
    attended = layers.MultiHeadAttention(2, 3, name="attention")(dropped, dropped)
    joined = layers.Add(name="join")([embedded, attended])
    return keras.Model(inputs, layers.Dense(2, name="head_0")(joined))


def pipeline(**stage_of):
    partition = [[name for name in stage_of if stage_of[name] == stage] for stage in range(3)]
    return PipelineStrategy(["CPU:0", "CPU:1", "CPU:2"], 3, partition=partition)


def computed_again():
    return OneDeviceStrategy("CPU:0", memory=MemoryPolicy("full"))


TOOK = {"embedding": 0, "norm": 0, "attention": 1, "hidden": 1, "dense": 2, "join": 2, "head_*": 2}
GAVE = {"embedding": 0, "drop": 0, "attention": 1, "join": 2, "head_0": 2}


@pytest.mark.parametrize(
    "build, make",
    [
        (of_what_the_attention_took, lambda: pipeline(**TOOK)),
        (of_what_the_attention_took, lambda: pipeline(**{**TOOK, "norm": 1, "hidden": 2})),
        (of_what_the_attention_took, lambda: pipeline(**{**TOOK, "join": 0})),  # runs before it
        (of_what_the_attention_took, computed_again),
        (of_what_dropout_gave, lambda: pipeline(**GAVE)),
        (of_what_dropout_gave, lambda: pipeline(**{**GAVE, "drop": 1})),
        (of_what_dropout_gave, lambda: pipeline(**{**GAVE, "drop": 1, "attention": 2})),
        (of_what_dropout_gave, computed_again),
    ],
)
def test_masks_are_those_of_one_device(build, make):
    outputs = sum("head" in name for name in build().output_names)
    x, y = tokens(ROWS)
    data = x, [y] * outputs
    options = {"loss": ["mse"] * outputs, "metrics": [["mae"]] * outputs}
    evaluated = []

    def trained(strategy):
        training = train(
            strategy, build, lambda: options, lambda rows: data, rows=ROWS, batch_size=4
        )
        evaluated.append(training.model.evaluate(*data, verbose=0))
        return training

    reference = trained(None)
    assert_same_training(reference, trained(make()))
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
