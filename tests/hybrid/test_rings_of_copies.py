"""Who shares a copy, and who stores the same part of each."""

import pytest

from tfparallel.hybrid.rings_of_copies import ranks_around


@pytest.mark.parametrize(
    ("num_workers", "num_copies", "sharing", "alike"),
    [
        (4, 2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (
            6,
            2,
            [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3,
            [[0, 3], [1, 4], [2, 5]] * 2,
        ),
        (6, 3, [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2, [[0, 2, 4], [1, 3, 5]] * 3),
    ],
)
def test_members_are_neighbours_and_those_at_the_same_place(
    num_workers, num_copies, sharing, alike
):
    for rank in range(num_workers):
        assert ranks_around(rank, num_workers, num_copies) == (sharing[rank], alike[rank])
