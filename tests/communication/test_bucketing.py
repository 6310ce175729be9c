"""Buckets, planned by hand."""

import pytest

from tfparallel.communication.bucketing import plan_buckets


@pytest.mark.parametrize(
    ("sizes", "kinds", "buckets"),
    [
        ([], "", []),
        ([3, 3, 3, 3], "aaaa", [[0, 1, 2], [3]]),
        (
            [4, 9, 1],
            "aaa",
            [[0], [1], [2]],
        ),  # 4 + 9 is too much, 9 + 1 is not allowed to grow to it
        ([20, 1, 1], "aaa", [[0], [1, 2]]),
        ([1, 1, 1, 1], "abab", [[0, 2], [1, 3]]),
        ([1, None, 1, 1], "aaaa", [[0], [1], [2, 3]]),
        ([0, 0], "aa", [[0, 1]]),
    ],
)
def test_neighbours_of_one_kind_share_a_bucket(sizes, kinds, buckets):
    assert plan_buckets(sizes, kinds, bucket_bytes=9) == buckets
