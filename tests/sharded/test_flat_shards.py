"""Cutting and joining give back what was cut, of any shape."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.sharded.flat_shards import FlatShards

SHAPES = [(1,), (2, 3), (7,), (3, 1, 5), (4, 4)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_parts_joined_are_the_whole(shape, num_shards):
    shards = FlatShards(shape, num_shards)
    whole = np.arange(1, np.prod(shape) + 1, dtype="float32").reshape(shape)
    parts = [shards.part(tf.constant(whole), i) for i in range(num_shards)]
    assert all(part.shape == [shards.length] for part in parts)
    np.testing.assert_array_equal(tf.concat(parts, 0), shards.padded(tf.constant(whole)))
    np.testing.assert_array_equal(shards.whole(tf.concat(parts, 0)), whole)


def test_padding_is_zeros_at_the_end():
    shards = FlatShards((7,), 3)
    assert shards.padded(tf.range(1, 8)).numpy().tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]
    assert shards.part(tf.range(1, 8), 2).numpy().tolist() == [7, 0, 0]


def test_a_shard_may_have_nothing_but_padding():
    assert FlatShards((2,), 4).part(tf.constant([1.0, 2.0]), 3).numpy().tolist() == [0.0]


@pytest.mark.parametrize("num_shards", [2, 3, 5])
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (7, 2, 2)])
def test_parts_of_sparse_rows_add_up_to_parts_of_the_dense_tensor(shape, num_shards):
    shards, rng = FlatShards(shape, num_shards), np.random.default_rng(0)
    indices = rng.integers(0, shape[0], 9)
    values = rng.normal(size=(9, *shape[1:]))
    rows = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(shape))
    dense = np.zeros(shape)
    np.add.at(dense, indices, values)
    for i in range(num_shards):
        part = tf.convert_to_tensor(shards.part_of_rows(rows, i))
        np.testing.assert_allclose(part, shards.part(tf.constant(dense), i), atol=1e-12)


def test_rows_that_are_given_twice_stay_twice():
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([1, 1]), [2, 2])
    part = FlatShards((2, 2), 2).part_of_rows(rows, 1)
    assert part.values.numpy().tolist() == [1, 2, 3, 4]
    assert part.indices.numpy().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_part_keeps_no_more_memory_than_its_own(index):
    """A slice would keep the whole alive in the variable that is assigned it."""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    part = FlatShards((1024, 1024), 4).part(tf.ones([1024, 1024]), index)
    held = tf.config.experimental.get_memory_info("CPU:0")["current"] - before
    assert part.shape == [1024 * 256]
    assert held <= 1.1 * 1024 * 1024
