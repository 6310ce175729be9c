"""Sums of what the replicas of one process have: additions in the graph, and copies of the sums."""

from collections.abc import Sequence
from typing import TypeGuard

import tensorflow as tf

from tfparallel.internals import DistributedValues, Mirrored, distribute_utils
from tfparallel.internals.ordered_sums import sum_in_order


def sums_on_devices(
    values: Sequence[DistributedValues], devices: Sequence[str]
) -> list[tf.Tensor | Mirrored]:
    """For each of `values` the sum of its parts, dense tensors, on each of `devices`.

    As TensorFlow's `ReductionToOneDevice`, bit by bit, in less to trace: devices are entered once
    for all values, and the first one, which adds up, gets no copy of what it has.
    """
    first, *others = devices
    with tf.device(first):
        copies = [[sum_in_order(value.values) for value in values]]
    for device in others:
        with tf.device(device):
            copies.append([tf.identity(total) for total in copies[0]])
    return [
        distribute_utils.regroup(of_value, wrap_class=Mirrored)
        for of_value in zip(*copies, strict=True)
    ]


def is_of_tensors(value: object) -> TypeGuard[DistributedValues]:
    """Whether replicas have dense tensors of their own for `value`."""
    return (
        isinstance(value, DistributedValues)
        and not distribute_utils.is_mirrored(value)
        and len(value.values) > 1
        and all(isinstance(part, tf.Tensor) for part in value.values)
    )
