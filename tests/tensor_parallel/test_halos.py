"""What devices need of a tensor in parts, and where gradients of it go."""

import pytest
import tensorflow as tf

from tfparallel.tensor_parallel.halos import regions
from tfparallel.tensor_parallel.rows import Rows


@pytest.mark.parametrize(
    ("spans", "expected", "slopes"),
    [
        ([(0, 3), (1, 5)], [[0, 1, 2], [1, 2, 3, 4]], [[1, 2], [2, 1, 1]]),
        ([(0, 5), (5, 5)], [[0, 1, 2, 3, 4], []], [[1, 1], [1, 1, 1]]),  # of which one needs none
        ([(0, 1), (3, 5)], [[0], [3, 4]], [[1, 0], [0, 1, 1]]),
    ],
)
def test_regions_and_their_gradients(spans, expected, slopes):
    parts = [tf.constant([[0.0, 1.0]]), tf.constant([[2.0, 3.0, 4.0]])]
    with tf.GradientTape() as tape:
        tape.watch(parts)
        received = regions(parts, Rows(1, (2, 3)), spans, ["CPU:0", "CPU:1"])
        total = tf.add_n([tf.reduce_sum(each) for each in received])
    assert [each.numpy()[0].tolist() for each in received] == expected
    assert [each.numpy()[0].tolist() for each in tape.gradient(total, parts)] == slopes
