"""Replicas that compute a norm each have the same bits."""

import keras
import numpy as np
import tensorflow as tf

from tfparallel.replicas.clipping import clipped_by_norm, scaled_gradient, sum_of_squares


def test_a_norm_does_not_depend_on_what_may_be_overwritten():
    """`AddN` takes the first number that nobody else reads for its result, and begins with it."""
    optimizer = keras.optimizers.SGD(global_clipnorm=1e-3)
    random = np.random.default_rng(0)
    gradients = [tf.constant(random.normal(size=50).astype("float32")) for _ in range(9)]

    @tf.function
    def clipped(given, fresh):
        squares = [sum_of_squares(gradient) for gradient in given]
        kept = [square if i == fresh else tf.identity(square) for i, square in enumerate(squares)]
        results = clipped_by_norm(optimizer, given, kept, scaled_gradient)
        return results, [square for i, square in enumerate(squares) if i != fresh]

    first, *others = (clipped(gradients, fresh)[0] for fresh in range(9))
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    keras_own = optimizer._clip_gradients(gradients)
    for ours, theirs in zip(first, keras_own, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
