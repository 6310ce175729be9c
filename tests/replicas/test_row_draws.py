"""Random numbers of some rows are those that TensorFlow draws for these rows among all."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.replicas.row_draws import normal_of_rows, truncated_normal_of_rows, uniform_of_rows

ROWS = 11
OURS = {
    "uniform": uniform_of_rows,
    "normal": normal_of_rows,
    "truncated_normal": truncated_normal_of_rows,
}
THEIRS = {name: getattr(tf.random, f"stateless_{name}") for name in OURS}


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=str)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("shape", [(), (4,), (3, 7)], ids=str)
def test_rows_draw_what_they_draw_among_all(name, shape, dtype):
    seed = tf.constant([123, 7])
    every = THEIRS[name]([ROWS, *shape], seed, dtype=dtype)
    for start, end in [(0, ROWS), (1, 2), (2, 5), (5, ROWS), (3, 3)]:
        own = OURS[name]([end - start, *shape], start, seed, dtype)
        np.testing.assert_array_equal(own, every[start:end])


def test_a_counter_carries():
    """Behind the last value of its lower half comes the upper half's next."""
    from tfparallel.replicas.row_draws import _advanced

    counter = tf.constant([2**64 - 2, 5], tf.uint64)
    np.testing.assert_array_equal(_advanced(counter, tf.constant(3, tf.int64)), [1, 6])


def test_xla_draws_uniform_numbers_of_rows_as_it_draws_those_of_all():
    def all_rows(seed):
        return tf.random.stateless_uniform([ROWS, 5], seed)

    def some(seed):
        return uniform_of_rows([3, 5], 4, seed, tf.float32)

    compiled = [tf.function(f, jit_compile=True) for f in (all_rows, some)]
    every, own = (f(tf.constant([123, 7])) for f in compiled)
    np.testing.assert_array_equal(own, every[4:7])
