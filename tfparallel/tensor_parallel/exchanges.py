"""What devices of a group exchange where nobody has a whole: the two halves of an all-reduce.

    reduce-scatter    device i has terms [ a_i | b_i ]    ->  device 0: sum a_i    device 1: sum b_i
    all-gather        device 0: a    device 1: b          ->  each device: [ a | b ]

Each is the other's gradient.

Source: sequence parallelism, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.tensor_parallel.known_parts import cut_apart, put_together
from tfparallel.tensor_parallel.rows import Rows


def scatter_sum(terms: Sequence[tf.Tensor], rows: Rows, devices: Sequence[str]) -> list[tf.Tensor]:
    """The sum of `terms`, one on each device, of which each device gets its part."""
    with record.stop_recording():
        pieces = []
        for device, term in zip(devices, terms, strict=True):
            with tf.device(device):
                pieces.append(cut_apart(term, rows))
        sums = []
        for device, own in zip(devices, zip(*pieces, strict=True), strict=True):
            with tf.device(device):
                sums.append(tf.add_n(list(own)))
    record.record_operation(
        "ReduceScatter",
        sums,
        list(terms),
        lambda *gradients: gather_on_each(gradients, rows, devices),
    )
    return sums


def gather_on_each(
    parts: Sequence[tf.Tensor], rows: Rows, devices: Sequence[str]
) -> list[tf.Tensor]:
    """The whole of `parts`, one on each device, on each of them."""
    with record.stop_recording():
        wholes = []
        for device in devices:
            with tf.device(device):
                wholes.append(put_together(parts, rows))
    record.record_operation(
        "AllGather", wholes, list(parts), lambda *grads: scatter_sum(grads, rows, devices)
    )
    return wholes
