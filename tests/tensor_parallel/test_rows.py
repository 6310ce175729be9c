"""Sizes of parts, as tables."""

import pytest

from tfparallel.tensor_parallel.rows import Rows, even_sizes


@pytest.mark.parametrize(
    "total, count, sizes", [(6, 2, (3, 3)), (7, 3, (3, 2, 2)), (4, 4, (1, 1, 1, 1)), (5, 1, (5,))]
)
def test_sizes_are_as_equal_as_can_be(total, count, sizes):
    assert even_sizes(total, count) == sizes


def test_no_part_is_empty():
    with pytest.raises(ValueError, match="at least one index"):
        even_sizes(2, 3)


def test_starts_and_the_shape_of_the_whole():
    rows = Rows(1, (3, 2, 2))
    assert rows.starts == (0, 3, 5)
    assert rows.whole_shape([None, 3, 4]) == [None, 7, 4]
