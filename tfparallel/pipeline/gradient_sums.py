"""The gradients of all microbatches, summed where their stage is.

A sum grows with every backward pass, so that a stage holds two copies of its gradients and not one
for each microbatch.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.pipeline.executor import Executor


def sum_gradients(executor: Executor, gradients: Sequence[Sequence], rows: Sequence) -> list:
    """The sum over microbatches of each gradient.

    Args:
        executor: whose stages have made the gradients.
        gradients: for every microbatch the same number of tensors or IndexedSlices.
        rows: of every microbatch, ints or scalar tensors: a gradient of no rows, which is NaN for
            a mean, counts as zeros.
    """
    sums: list = [None] * len(gradients[0])
    by_stage: dict[int, list[int]] = collections.defaultdict(list)
    for i, per_microbatch in enumerate(zip(*gradients, strict=True)):
        stage = executor.stage_of_gradient(per_microbatch)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in per_microbatch):
            with tf.device(executor.device_of(stage)):
                sums[i] = _concat(per_microbatch)
        else:
            by_stage[stage].append(i)
    for stage, at in by_stage.items():
        add = tf.function(_add, autograph=False, experimental_attributes={"_noinline": True})
        total: list = []
        with tf.device(executor.device_of(stage)):
            for microbatch in executor.backward_order(stage):
                own = [gradients[microbatch][i] for i in at]
                total = add(total, own, rows[microbatch])
        for i, tensor in zip(at, total, strict=True):
            sums[i] = tensor
    return sums


def _add(total: list, gradients: list, rows: Any) -> list:
    if not (isinstance(rows, int) and rows > 0):
        has_rows = tf.greater(rows, 0)
        gradients = [tf.where(has_rows, gradient, 0) for gradient in gradients]
    pairs = zip(total, gradients, strict=True) if total else ()
    return [before + gradient for before, gradient in pairs] or gradients


def _concat(slices: Sequence) -> tf.IndexedSlices:
    values = [tf.convert_to_tensor(each.values) for each in slices]
    indices = [tf.convert_to_tensor(each.indices) for each in slices]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), slices[0].dense_shape)
