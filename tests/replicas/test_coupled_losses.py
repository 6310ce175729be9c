"""The divisors of losses that are no mean over rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.replicas.coupled_losses import _both, _of_rows, sum_of_weights


@pytest.mark.parametrize(
    ("weights", "mask", "expected"),
    [
        ([2.0, 3.0, 5.0], None, 10.0),
        ([2.0, 3.0, 5.0], [True, False, True], 7.0),
        ([2.0, 3.0], [[True, True, False], [True, False, False]], 2 * 2.0 + 3.0),  # of each row
        ([[2.0, 3.0]], [[False, True]], 3.0),
    ],
)
def test_sum_of_weights(weights, mask, expected):
    mask = None if mask is None else tf.constant(mask)
    assert sum_of_weights(weights, mask, tf.float64) == expected


def test_two_masks_leave_what_both_leave():
    a, b = tf.constant([True, True, False]), tf.constant([True, False, True])
    assert _both(None, None) is None
    assert _both(a, None) is a and _both(None, b) is b
    np.testing.assert_array_equal(_both(a, b), [True, False, False])


@pytest.mark.parametrize(("reduction", "shape"), [("sum_over_batch_size", ()), ("none", (0,))])
def test_a_mean_of_no_rows_is_a_number_and_values_of_no_rows_are_none(reduction, shape):
    """Eagerly, Keras reduces neither."""
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    value = _of_rows(loss, tf.zeros([0]), None, None, None)
    assert value.shape == shape
