"""Gradients that are reduced as soon as the backward pass has them, so that no whole one is kept.

Only in Keras's own step, in which nobody looks at a gradient before the optimizer does. Sparse
gradients stay rows, and meet in the optimizer.
"""

import tensorflow as tf

from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.sharded.unit_gathers import UnitGathers


class BackwardReduction:
    """That of one step; in one that notes squares of gradients, also what they were before.

    Args:
        extended: of the strategy.
    """

    def __init__(self, extended: UnitGathers):
        self._extended = extended
        self._stay_whole: dict[tuple[int, int], bool] = {}
        self._unreduced: dict[tuple[int, int], list[tf.Tensor]] = {}

    def reduced(
        self, variable: tf.Variable, i: int, gradient: tf.Tensor | tf.IndexedSlices
    ) -> tf.Tensor | tf.IndexedSlices:
        """What a tape gets for the gradient of the whole: the part of replica `i`, or rows.

        A tape adds up the gradients of all reads of a variable, so they have to be of one kind:
        that of the first.
        """
        step = current_replica_step()
        if step is None or not step.weights_loss:
            return gradient
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if self._stay_whole.setdefault((id(variable), i), is_sparse):
            return gradient
        (dense,) = step.zero_without_rows([tf.convert_to_tensor(gradient)])
        if self._extended._noise_probe is not None:
            self._unreduced.setdefault((id(variable), i), []).append(dense)
        (part,) = self._extended._reduce_scatter([variable.shards.padded(dense)])
        part.set_shape([variable.shards.length])
        return part

    def unreduced(
        self, variable: tf.Variable, i: int, gradient: tf.Tensor | tf.IndexedSlices
    ) -> tf.Tensor | tf.IndexedSlices:
        """Of replica `i`'s rows alone, what a tape has got for as `gradient`, of all reads."""
        whole = self._unreduced.get((id(variable), i))
        return gradient if whole is None else sum_in_order(whole)


def is_part(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable) -> bool:
    """Whether a gradient of a sharded `variable` is the caller's part of that of all rows.

    Of a whole one some sizes may not be known when it is traced.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return False
    return not gradient.shape.is_compatible_with(variable.shape)
