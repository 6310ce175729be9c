"""What devices of a group exchange, each way with its gradient.

Where nobody has a whole, the two halves of an all-reduce:

    reduce-scatter    device i has terms [ a_i | b_i ]    ->  device 0: sum a_i    device 1: sum b_i
    all-gather        device 0: a    device 1: b          ->  each device: [ a | b ]

Each is the other's gradient. Devices that are those of ranks exchange through `ModelRanks`.

Source: sequence parallelism, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.tensor_parallel.known_parts import cut_apart, joined, put_together
from tfparallel.tensor_parallel.ranks import ranks_of_caller
from tfparallel.tensor_parallel.rows import Rows


def scatter_sum(terms: Sequence[tf.Tensor], rows: Rows, devices: Sequence[str]) -> list[tf.Tensor]:
    """The sum of `terms`, one on each device, of which each device gets its part."""
    ranks = ranks_of_caller()
    with record.stop_recording():
        if ranks is None:
            sums = _summed_pieces(terms, rows, devices)
        else:
            sums = cut_apart(ranks.all_reduce(terms[ranks.index]), rows)
    record.record_operation(
        "ReduceScatter",
        sums,
        list(terms),
        lambda *gradients: gather_on_each(gradients, rows, devices),
    )
    return sums


def _summed_pieces(
    terms: Sequence[tf.Tensor], rows: Rows, devices: Sequence[str]
) -> list[tf.Tensor]:
    pieces = []
    for device, term in zip(devices, terms, strict=True):
        with tf.device(device):
            pieces.append(cut_apart(term, rows))
    sums = []
    for device, own in zip(devices, zip(*pieces, strict=True), strict=True):
        with tf.device(device):
            sums.append(sum_in_order(own))
    return sums


def gather_on_each(
    parts: Sequence[tf.Tensor], rows: Rows, devices: Sequence[str]
) -> list[tf.Tensor]:
    """The whole of `parts`, one on each device, on each of them."""
    with record.stop_recording():
        if ranks_of_caller() is None:
            wholes = []
            for device in devices:
                with tf.device(device):
                    wholes.append(put_together(parts, rows))
        else:
            whole = put_together(parts, rows)
            wholes = [tf.identity(whole) for _ in devices]
    record.record_operation(
        "AllGather", wholes, list(parts), lambda *grads: scatter_sum(grads, rows, devices)
    )
    return wholes


def copy_on_each(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """`tensor` on each device, for several that read it there.

    Their gradients are added up where they are, and one for each device is sent.
    """
    with record.stop_recording():
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.identity(tensor))

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        if ranks_of_caller() is not None:
            return [sum_of(gradients, devices)]  # with a gradient, for a gradient of gradients
        own = [_added_on(device, g) for device, g in zip(devices, gradients, strict=True)]
        with tf.device(devices[0]):
            return [sum_in_order(own)]

    record.record_operation("CopyOnEach", copies, [tensor], backward)
    return copies


def sum_of(terms: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """The sum of `terms`, one on each device, on the first of them; on all of ranks."""
    ranks = ranks_of_caller()
    if ranks is None:
        with tf.device(devices[0]):
            return sum_in_order(terms)
    with record.stop_recording():
        total = ranks.all_reduce(terms[ranks.index])
    record.record_operation(
        "AllReduce", [total], list(terms), lambda gradient: copy_on_each(gradient, devices)
    )
    return total


def met(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors of one shape, one on each device, for who computes with all of them."""
    if ranks_of_caller() is None:
        return list(parts)
    return tf.unstack(joined([part[tf.newaxis] for part in parts], 0), len(parts))


def _added_on(device: str, total: tf.Tensor) -> tf.Tensor:
    """A sum that a tape has made on the device of its owner, on another one."""
    if tf.executing_eagerly() or total.op.type != "AddN":
        return total
    with tf.device(device):
        return sum_in_order([_added_on(device, term) for term in total.op.inputs])
