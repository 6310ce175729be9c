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
        ([4, 2, 2, 4], "abba", [[1, 2], [0, 3]]),  # those of b are ready before those of a
    ],
)
def test_neighbours_of_one_kind_share_a_bucket(sizes, kinds, buckets):
    assert plan_buckets(sizes, kinds, bucket_bytes=9) == buckets


def test_small_tensors_between_large_ones_share_a_bucket():
    bias, kernel, bucket_bytes = 10, 1000, 1000
    sizes = [bias, kernel, bias, kernel, bias, kernel]
    planned = plan_buckets(sizes, "aaaaaa", bucket_bytes)
    assert planned == [[1], [3], [0, 2, 4], [5]]  # when the last of the biases is ready
    many = plan_buckets([bias] * 250, "a" * 250, bucket_bytes)
    assert [len(bucket) for bucket in many] == [100, 100, 50]
