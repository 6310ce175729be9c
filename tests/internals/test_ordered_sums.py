"""A sum has the bits of additions in order, whatever TensorFlow may overwrite."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.internals.ordered_sums import sum_in_order


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("num_terms", [1, 2, 3, 4, 9])
def test_it_is_that_of_additions_one_by_one(num_terms, is_traced):
    values = np.random.default_rng(0).normal(size=(num_terms, 999)).astype("float32")
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    for fresh in range(num_terms):  # the only term that nobody else has

        def total(*given, fresh=fresh):
            terms = [abs(x) * tf.sign(x) if i == fresh else x for i, x in enumerate(given)]
            return sum_in_order(terms)

        run = tf.function(total) if is_traced else total
        np.testing.assert_array_equal(run(*map(tf.constant, values)), expected)
