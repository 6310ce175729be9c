"""Who shares a copy, and who stores the same part of each."""

import pytest

from tfparallel.hybrid.groups_of_workers import all_groups, check_copies, groups_around


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
        both = groups_around(rank, num_workers, num_copies)
        assert [list(group.ranks) for group in both] == [sharing[rank], alike[rank]]


@pytest.mark.parametrize(("num_workers", "num_copies"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_groups_are_numbered_one_after_the_other_alike_for_all_workers(num_workers, num_copies):
    groups = all_groups(num_workers, num_copies)
    assert [group.number for group in groups] == list(range(num_copies + num_workers // num_copies))
    for rank in range(num_workers):
        around = groups_around(rank, num_workers, num_copies)
        assert [groups[group.number] for group in around] == list(around)
        assert all(rank in group.ranks for group in around)
        assert sum(rank in group.ranks for group in groups) == 2


@pytest.mark.parametrize(("num_workers", "num_copies"), [(4, 1), (4, 4), (4, 3), (1, 1)])
def test_without_several_copies_of_several_workers_there_are_none(num_workers, num_copies):
    assert all_groups(num_workers, num_copies) == []


@pytest.mark.parametrize("num_copies", [0, 3, 8])
def test_workers_that_cannot_be_divided_are_refused(num_copies):
    with pytest.raises(ValueError, match=f"4 workers must be.*{num_copies} `replicas`. .Rank 2"):
        check_copies(num_copies, 4, 2)
