"""Squares of the replicas' gradients in some steps, for the noise scale; no backward pass is added.

Each replica notes its own term of the mean over replicas, and that of the sum is noted once: by the
first replica, or part by part by those that have the parts. All terms are additive, so nothing
crosses replicas or workers in a step: each process has its sums, and adding those up gives the
estimate (`measure/noise_scale.py`).
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable, distribute_lib
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.measure.noise_scale import Estimate
from tfparallel.replicas.replica_step import ReplicaStep


class NoiseProbe:
    """What one process notes of its replicas.

    Args:
        num_replicas: of all processes.
    """

    def __init__(self, num_replicas: int):
        self._num_replicas = num_replicas
        with tf.init_scope(), tf.device("CPU:0"):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._sums = ResourceVariable(tf.zeros([3], tf.float64), trainable=False)

    def note(self, step: ReplicaStep, own: Sequence[object], sums: Sequence[object]) -> None:
        """Called in the graph of a replica's step.

        Args:
            step: of the replica.
            own: its gradients, weighted by its share of the rows.
            sums: what no other replica notes of the gradients of all replicas, summed.
        """
        weight = tf.cast(step.weight, tf.float64)
        rows = tf.math.divide_no_nan(tf.cast(step.rows, tf.float64), weight)
        groups = tf.minimum(tf.constant(self._num_replicas, tf.float64), rows)
        others = groups - 1
        local = tf.math.divide_no_nan(_squared_norm(own), weight)  # (n_i / N) |g_i|^2
        together = _squared_norm(sums)
        batches = others if replica_number() == 0 else tf.zeros_like(others)
        terms = tf.stack([groups * together - local, rows * (local - together), batches])
        with tf.device("CPU:0"):
            self._sums.assign_add(tf.math.divide_no_nan(terms, others))

    def sums(self) -> list[float]:
        """`[|G|^2, S, batches]`, summed over the batches so far; and begins anew."""
        sums = self._sums.numpy().tolist()
        self._sums.assign(tf.zeros([3], tf.float64))
        return sums


def mean_estimate(sums: Sequence[Sequence[float]]) -> Estimate | None:
    """Of the sums of all processes; None where no batch was looked at by two replicas."""
    squared, variance, batches = map(sum, zip(*sums, strict=True))
    return Estimate(squared / batches, variance / batches) if batches else None


def replica_number() -> int:
    """Of the calling replica thread, among the replicas of all processes."""
    number = distribute_lib.get_replica_context().replica_id_in_sync_group
    return int(number if isinstance(number, int) else tf.get_static_value(number))


def _squared_norm(gradients: Sequence[object]) -> tf.Tensor:
    halves = [tf.nn.l2_loss(_wide(tf.convert_to_tensor(each))) for each in gradients]
    wide = [2 * tf.cast(half, tf.float64) for half in halves]
    return sum_in_order(wide) if wide else tf.constant(0.0, tf.float64)


def _wide(gradient: tf.Tensor) -> tf.Tensor:
    """Squares of halves would overflow."""
    return gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)
