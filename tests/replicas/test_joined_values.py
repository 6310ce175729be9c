"""Means of what microbatches have of several variables, computed as one tensor."""

import numpy as np
import tensorflow as tf

from tfparallel.replicas.joined_values import means_by_rows

SHAPES = [(3,), (), (2, 4), (5,)]


def test_means_are_those_of_each_variable_alone_bit_by_bit():
    variables, values, shares = _three_microbatches()
    together = means_by_rows(variables, values, shares)
    for i, variable in enumerate(variables):
        (alone,) = means_by_rows([variable], [[own[i]] for own in values], shares)
        assert together[i].shape == variable.shape
        np.testing.assert_array_equal(together[i], alone)


def test_a_microbatch_without_rows_has_no_say():
    variables, values, shares = _three_microbatches()
    values[1] = [value * np.nan for value in values[1]]
    shares[1] = (0, tf.constant(0.0, tf.float64))
    for mean in means_by_rows(variables, values, shares):
        assert not np.isnan(mean).any()


def test_many_variables_are_no_more_sums_than_one():
    variables, values, shares = _three_microbatches()

    def kinds(count: int) -> list[str]:
        chosen = [own[:count] for own in values]
        with tf.Graph().as_default() as graph:
            placed = [[tf.constant(value.numpy()) for value in own] for own in chosen]
            means_by_rows(variables[:count], placed, [(rows, w.numpy()) for rows, w in shares])
        return sorted(o.type for o in graph.get_operations() if o.type in ("AddV2", "Mul"))

    assert kinds(4) == kinds(1)


def _three_microbatches() -> tuple[list, list, list]:
    generator = np.random.default_rng(0)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    values = [
        [tf.constant(generator.normal(size=shape), tf.float32) for shape in SHAPES]
        for _ in range(3)
    ]
    return variables, values, [(n, tf.constant(n / 7, tf.float64)) for n in (4, 2, 1)]
