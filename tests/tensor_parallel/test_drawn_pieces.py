"""Pieces of an initial value along one dim are drawn alone, with the bits of one device's whole."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh
from tfparallel.replicas import drawn_values
from tfparallel.tensor_parallel import drawn_pieces
from tfparallel.tensor_parallel.known_parts import cut_apart
from tfparallel.tensor_parallel.rows import even_rows

pytestmark = pytest.mark.turns

INITIALIZERS = {
    "normal": lambda: keras.initializers.RandomNormal(0.3, 0.7, seed=7),
    "truncated": lambda: keras.initializers.HeNormal(seed=7),
    "uniform": lambda: keras.initializers.GlorotUniform(seed=7),
    "fill": lambda: keras.initializers.Constant(-1 / 3),
}
# Few runs and many; dims that nothing divides; the gates of an LSTM.
SHAPES = [
    ((41, 51), 0, 1),
    ((41, 51), 1, 1),
    ((201, 7), 1, 1),
    ((5, 201, 3), 1, 1),
    ((3, 3, 25, 7), 3, 1),
    ((19, 4 * 9), 1, 4),
    ((4 * 9,), 0, 4),
]


def assert_pieces_of_the_whole(monkeypatch, name, dtype, at_a_time):
    monkeypatch.setattr(drawn_pieces, "_NUMBERS_AT_A_TIME", at_a_time)
    for shape, dim, blocks in SHAPES:
        whole = INITIALIZERS[name]()(shape, dtype)
        asked = (INITIALIZERS[name](), shape, dtype)  # by Keras's variable
        monkeypatch.setattr(drawn_values, "asked_of", lambda _, asked=asked: asked)
        drawn = drawn_values.drawn_value(None)
        rows = even_rows(dim, shape[dim], 3, blocks)
        for index, expected in enumerate(cut_apart(whole, rows)):
            piece = drawn_pieces.drawn_piece(drawn, rows, index)
            np.testing.assert_array_equal(piece, expected, err_msg=f"{rows}")


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_piece_has_the_bits_of_the_whole(monkeypatch, name):
    assert_pieces_of_the_whole(monkeypatch, name, "float64", 1 << 16)
    assert_pieces_of_the_whole(monkeypatch, name, "float32", 1 << 16)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "truncated" else pytest.param(name, marks=pytest.mark.long)
        for name in INITIALIZERS
    ],
)
def test_a_piece_that_is_drawn_a_few_numbers_at_a_time_has_the_bits_of_the_whole(monkeypatch, name):
    assert_pieces_of_the_whole(monkeypatch, name, "float32", 97)


def build(width: int = 12) -> keras.Model:
    """Layers cut by columns, rows, heads and gates; some of which nothing divides."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(31, width, name="embeddings")(inputs)
    x = keras.layers.MultiHeadAttention(3, 4, name="attention")(x, x)
    x = keras.layers.LSTM(9, name="lstm")(x)
    x = keras.layers.Dense(13, name="dense", kernel_initializer="he_normal")(x)
    outputs = keras.layers.Dense(7, name="dense_1", kernel_initializer="random_normal")(x)
    return keras.Model(inputs, outputs)


def mesh(**sizes: int) -> keras.distribution.DeviceMesh:
    shape = tuple(sizes.values())
    return keras.distribution.DeviceMesh(
        shape, tuple(sizes), [f"cpu:{i}" for i in range(int(np.prod(shape)))]
    )


def hybrid(**sizes: int):
    of_all, options = mesh(**sizes), {}
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(of_all)
    if "pipeline" in sizes:
        options["pipeline"] = tfparallel.PipelineOptions(2)
    shard = tfparallel.Sharding(min_size=1)
    return tfparallel.HybridStrategy(of_all, shard=shard, **options)


STRATEGIES = {
    "tensor_1x3": lambda: tfparallel.TensorParallelStrategy(LayoutOfAnything(cpu_mesh(1, 3))),
    "tensor_2x2": lambda: tfparallel.TensorParallelStrategy(LayoutOfAnything(cpu_mesh(2, 2))),
    "shard_model_2x2": lambda: hybrid(shard=2, model=2),
    "shard_pipeline_2x2": lambda: hybrid(shard=2, pipeline=2),
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_a_model_begins_as_on_one_device(make):
    keras.utils.set_random_seed(5)
    expected = build()
    keras.utils.set_random_seed(5)
    with make().scope():
        model = build()
    assert len(model.weights) == len(expected.weights)
    for weight, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), other.numpy(), err_msg=weight.path)


WIDTH = 1024
WHOLE_BYTES = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfparallel.TensorParallelStrategy(LayoutOfAnything(cpu_mesh(1, 4))),
        lambda: hybrid(shard=2, model=2),
        lambda: hybrid(shard=4, pipeline=1),
    ],
    ids=["tensor_1x4", "shard_model_2x2", "shard_pipeline_4x1"],
)
def test_the_whole_of_no_weight_or_slot_is_anywhere_while_a_model_is_made(make):
    strategy = make()
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    with strategy.scope():
        layers = [
            keras.layers.Dense(WIDTH, name=f"dense_{i}", kernel_initializer="he_normal")
            for i in range(3)
        ]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.AdamW(), "mse")
        model.optimizer.build(model.trainable_variables)
    after = tf.config.experimental.get_memory_info("CPU:0")
    assert after["current"] - before >= 3 * 3 * WHOLE_BYTES  # weights and two slots are there
    assert after["peak"] - after["current"] < 0.9 * WHOLE_BYTES
