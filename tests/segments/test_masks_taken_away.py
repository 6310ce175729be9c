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


class Block(layers.Layer):
    """Holds the attention that takes the mask of what it is given."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def around(attend):
    """A residual around what `attend` makes, which Keras calls behind it."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(3, 6, mask_zero=True, name="embedding")(inputs)
    attended = layers.Dense(6, name="dense")(attend(embedded))
    joined = layers.Average(name="join")([embedded, embedded])
    heads = [layers.Dense(2, name=f"head_{i}")(x) for i, x in enumerate([joined, attended])]
    return keras.Model(inputs, heads)


def of_a_nested_model():
    def attend(x):
        inner = keras.Input((5, 6))
        attended = layers.MultiHeadAttention(2, 3, name="attention")(inner, inner)
        return keras.Model(inner, layers.Dense(6, name="inner")(attended), name="nested")(x)

    return around(attend)


def of_a_layer_that_holds_one():
    return around(lambda x: layers.Dense(6, name="inner")(Block(name="block")(x)))


def of_what_is_returned_as_it_came():
    """`linear` gives the tensor that it got, also while training."""

    def attend(x):
        same = layers.Activation("linear", name="same")(x)
        attended = layers.MultiHeadAttention(2, 3, name="attention")(same, same)
        return layers.Dense(6, name="inner")(attended)

    return around(attend)


def of_what_was_there_before():
    """Keras calls `join` before the attention, on the same tensor."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(3, 6, mask_zero=True, name="embedding")(inputs)
    joined = layers.Average(name="join")([embedded, embedded])
    for i in range(3):
        joined = layers.Activation("tanh", name=f"tanh_{i}")(joined)
    attended = layers.MultiHeadAttention(2, 3, name="attention")(embedded, embedded)
    heads = [layers.Dense(2, name=f"head_{i}")(x) for i, x in enumerate([joined, attended])]
    return keras.Model(inputs, heads)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(3, 6, mask_zero=True, name="embedding")
        self.same = layers.Activation("linear", name="same")
        self.attention = layers.MultiHeadAttention(2, 3, name="attention")
        self.join = layers.Average(name="join")
        self.head = layers.Dense(2, name="head")
        self.output_names = ["head"]

    def call(self, x):
        embedded = self.embedding(x)
        same = self.same(embedded)
        return self.head(self.join([embedded, self.attention(same, same)]))


class Residual(layers.Layer):
    """An attention to its second input beside its first one, which Keras calls behind it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, 3)
        self.join = layers.Average()

    def build(self, shapes):
        self.attention.build(shapes[1], shapes[1])

    def call(self, inputs):
        x, same = inputs
        return self.join([x, self.attention(same, same)])


def of_one_tensor_given_twice():
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(3, 6, mask_zero=True, name="embedding")(inputs)
    same = layers.Activation("linear", name="same")(embedded)
    joined = Residual(name="residual")([embedded, same])
    return keras.Model(inputs, layers.Dense(2, name="head")(joined))


class SubclassedTwice(keras.Model):
    """A layer of it is given one tensor twice, and `linear` lies between."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(3, 6, mask_zero=True, name="embedding")
        self.same = layers.Activation("linear", name="same")
        self.residual = Residual(name="residual")
        self.head = layers.Dense(2, name="head")
        self.output_names = ["head"]

    def call(self, x):
        embedded = self.embedding(x)
        return self.head(self.residual([embedded, self.same(embedded)]))


def pipeline(**stage_of):
    partition = [[name for name in stage_of if stage_of[name] == stage] for stage in range(3)]
    return PipelineStrategy(["CPU:0", "CPU:1", "CPU:2"], 3, partition=partition)


def computed_again():
    return OneDeviceStrategy("CPU:0", memory=MemoryPolicy("full"))


TOOK = {"embedding": 0, "norm": 0, "attention": 1, "hidden": 1, "dense": 2, "join": 2, "head_*": 2}
NESTED = {"embedding": 0, "not_equal*": 0, "nested/*": 1, "dense": 2, "join": 2, "head_*": 2}
HELD = {"embedding": 0, "block": 1, "inner": 1, "dense": 2, "join": 2, "head_*": 2}
SAME = {"embedding": 0, "same": 1, "attention": 1, "inner": 1, "dense": 2, "join": 2, "head_*": 2}
BEFORE = {"embedding": 0, "attention": 1, "join": 2, "tanh_*": 2, "head_*": 2}
OWN = {"embedding": 0, "same": 1, "attention": 1, "join": 2, "head": 2}
TWICE = {"embedding": 0, "same": 1, "residual": 2, "head": 2}
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
        (of_a_nested_model, lambda: pipeline(**NESTED)),
        (of_a_nested_model, lambda: pipeline(**{**NESTED, "join": 0})),
        (of_a_layer_that_holds_one, lambda: pipeline(**HELD)),
        (of_what_is_returned_as_it_came, lambda: pipeline(**SAME)),
        (of_what_is_returned_as_it_came, lambda: pipeline(**{**SAME, "same": 0})),
        (of_what_is_returned_as_it_came, lambda: pipeline(**{**SAME, "attention": 2})),
        (of_what_is_returned_as_it_came, computed_again),
        (of_what_was_there_before, lambda: pipeline(**BEFORE)),
        (Subclassed, lambda: pipeline(**OWN)),
        (Subclassed, lambda: pipeline(**{**OWN, "same": 0})),
        (SubclassedTwice, lambda: pipeline(**TWICE)),
        (SubclassedTwice, lambda: pipeline(**{**TWICE, "same": 0, "residual": 1})),
        (of_one_tensor_given_twice, lambda: pipeline(**TWICE)),
        (of_one_tensor_given_twice, lambda: pipeline(**{**TWICE, "same": 0, "residual": 1})),
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


@pytest.mark.parametrize(
    "build, stage_of, taker",
    [
        (of_a_layer_that_holds_one, HELD, "block"),
        (of_what_is_returned_as_it_came, SAME, "attention"),
    ],
)
def test_a_layer_that_runs_before_who_takes_its_mask_is_refused(build, stage_of, taker):
    """Nobody knows before the other one runs that it takes the mask."""
    with pytest.raises(ValueError, match=f"'join' must not run before layer '{taker}'"):
        train(
            pipeline(**{**stage_of, "join": 0}),
            build,
            lambda: {"loss": ["mse"] * 2},
            lambda rows: (tokens(rows)[0], [tokens(rows)[1]] * 2),
            rows=ROWS,
            batch_size=4,
        )
