"""What three devices of a group add up has the same bits, whichever term may be overwritten.

`AddN` begins with that one: `tfparallel/internals/ordered_sums.py`.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.tensor_parallel.exchanges import copy_on_each, sum_of
from tfparallel.tensor_parallel.gradients import _sum_on

DEVICES = [f"CPU:{i}" for i in range(3)]


def _sum_of_gradients(terms):
    whole = tf.zeros_like(terms[0])
    with tf.GradientTape() as tape:
        tape.watch(whole)
        copies = copy_on_each(whole, DEVICES)
    return tape.gradient(copies, whole, output_gradients=terms)


SUMS = {
    "of terms": lambda terms: sum_of(terms, DEVICES),
    "of gradients of copies": _sum_of_gradients,
    "of replicas": lambda terms: _sum_on("CPU:0", SimpleNamespace(values=terms)),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_has_the_same_bits_whatever_may_be_overwritten(kind):
    values = np.random.default_rng(0).normal(size=(3, 999)).astype("float32")
    given = list(map(tf.constant, values))

    def total(*given, fresh):
        return SUMS[kind]([abs(x) * tf.sign(x) if i == fresh else x for i, x in enumerate(given)])

    first, *others = (tf.function(partial(total, fresh=fresh))(*given) for fresh in range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)
