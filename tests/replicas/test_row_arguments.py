"""Which arguments of a function of a batch are rows."""

import pytest
import tensorflow as tf

from tfparallel.replicas.row_arguments import RowArguments


@pytest.mark.parametrize(
    ("shape", "count", "are_rows"),
    [
        ((4, 3), 4, True),
        ((8,), 4, True),  # two positions of each row
        ((6,), 4, False),
        ((2,), 4, False),
        ((), 4, False),
        ((6,), None, True),
        ((), None, False),
    ],
)
def test_rows_are_as_many_as_the_replica_has_or_a_multiple(shape, count, are_rows):
    arguments = RowArguments((tf.zeros(shape),), {}, count, ["x"], lambda *_: None)
    assert (arguments.rows, arguments.numbers) == (([0], []) if are_rows else ([], [0]))
