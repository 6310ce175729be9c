"""A hash of weights tells any flipped bit, and ranks that differ are named."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.replicas.weights_check import WeightsCheck, WeightsDifferError, _pieces, describe


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "uint8", "bfloat16"])
def test_every_single_flipped_bit_changes_the_hash(dtype):
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 100, (3, 2)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    hashes = {_hash([weight])}
    raw = weight.view(np.uint8).reshape(-1)
    for byte in range(raw.size):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            hashes.add(_hash([weight]))
            raw[byte] ^= 1 << bit
    hashes_of_one_flip = len(hashes) - 1
    # Flips of the same bit in two numbers may give the same hash; that of no flip never comes.
    assert hashes_of_one_flip >= 8 * weight.itemsize
    assert _hash([weight]) in hashes and _flips_that_are_missed(weight) == []


def _flips_that_are_missed(weight: np.ndarray) -> list:
    right, raw, missed = _hash([weight]), weight.view(np.uint8).reshape(-1), []
    for byte in range(raw.size):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            if _hash([weight]) == right:
                missed.append((byte, bit))
            raw[byte] ^= 1 << bit
    return missed


def _hash(weights: list) -> tuple:
    return tuple(_pieces([tf.constant(weight) for weight in weights]).numpy())


def test_variables_that_swap_their_values_change_the_hash():
    a, b = np.ones(3, "float32"), np.zeros(3, "float32")
    assert _hash([a, b]) != _hash([b, a])


def test_the_rank_that_differs_from_the_others_is_named():
    assert "other weights in rank 2, in step 8" in describe({0: (1,), 1: (1,), 2: (3,)}, 8, rank=0)


def test_of_two_ranks_neither_is_said_to_be_wrong():
    assert "different weights in ranks [0] and ranks [1] from" in describe(
        {0: (1,), 1: (2,)}, 8, rank=0
    )


def test_refuses_to_check_every_0_steps():
    with pytest.raises(ValueError, match="number of steps. Received: 0"):
        WeightsCheck(0, 2, 0)


def test_copies_of_parts_are_compared_among_those_that_hold_them():
    """Ranks 0 and 2 hold one part, ranks 1 and 3 the other."""
    holders = [[range(4)], [[0, 2], [1, 3]]]
    checks = [WeightsCheck(rank, 4, 1, holders) for rank in range(4)]

    def compare(parts: list[float]) -> None:
        groups = [([tf.ones(2)], [tf.fill([3], part)]) for part in parts]
        slots = tf.add_n([c.slots(own, []) for c, own in zip(checks, groups, strict=True)])
        for check in checks:
            check.verify(slots)

    compare([1.0, 5.0, 1.0, 5.0])
    with pytest.raises(
        WeightsDifferError, match=r"different weights in ranks \[1\] and ranks \[3\]"
    ):
        compare([1.0, 5.0, 1.0, 6.0])
