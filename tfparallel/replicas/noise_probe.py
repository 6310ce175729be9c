"""Squares of the replicas' gradients in some steps, for the noise scale; no backward pass is added.

Each replica notes its own term of the mean over replicas, the first one also that of the sum. All
terms are additive, so nothing crosses replicas or workers in a step: each process has its sums, and
adding those up gives the estimate (`measure/noise_scale.py`).
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable, distribute_lib
from tfparallel.measure.noise_scale import Estimate
from tfparallel.replicas.replica_step import ReplicaStep


class NoiseProbe:
    """What one process notes of its replicas.

    Args:
        num_replicas: of all processes.
        every_steps: how often squares are taken.
    """

    def __init__(self, num_replicas: int, every_steps: int):
        if every_steps < 1:
            raise ValueError(f"noise_every is a number of steps. Received: {every_steps}.")
        self._num_replicas, self._every_steps = num_replicas, every_steps
        with tf.init_scope(), tf.device("CPU:0"):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._sums = ResourceVariable(tf.zeros([3], tf.float64), trainable=False)
        self._steps: dict[int, ResourceVariable] = {}

    def note(
        self, replica: int, step: ReplicaStep, own: Sequence[object], total: Sequence[object]
    ) -> None:
        """Called in the graph of a replica's step.

        Args:
            replica: its number among all.
            step: of the replica.
            own: its gradients, weighted by its share of the rows.
            total: those of all replicas, summed.
        """
        count = self._counter(replica).assign_add(1, read_value=True)
        is_due = tf.equal((count - 1) % self._every_steps, 0)
        terms = tf.cond(
            is_due, self._terms(replica, step, own, total), lambda: tf.zeros([3], tf.float64)
        )
        with tf.device("CPU:0"):
            self._sums.assign_add(terms)

    def sums(self) -> list[float]:
        """`[|G|^2, S, batches]`, summed over the batches so far; and begins anew."""
        sums = self._sums.numpy().tolist()
        self._sums.assign(tf.zeros([3], tf.float64))
        return sums

    def _counter(self, replica: int) -> ResourceVariable:
        if replica not in self._steps:
            with tf.init_scope(), tf.device("CPU:0"):
                self._steps[replica] = ResourceVariable(tf.constant(0, tf.int64), trainable=False)
        return self._steps[replica]

    def _terms(
        self, replica: int, step: ReplicaStep, own: Sequence[object], total: Sequence[object]
    ) -> Callable[[], tf.Tensor]:
        def terms() -> tf.Tensor:
            weight = tf.cast(step.weight, tf.float64)
            rows = tf.math.divide_no_nan(tf.cast(step.rows, tf.float64), weight)
            groups = tf.minimum(tf.constant(self._num_replicas, tf.float64), rows)
            others = groups - 1
            local = tf.math.divide_no_nan(_squared_norm(own), weight)  # (n_i / N) |g_i|^2
            found = tf.stack([-local, rows * local, tf.zeros_like(local)])
            if replica == 0:
                together = _squared_norm(total)
                found += tf.stack([groups * together, -rows * together, others])
            return tf.math.divide_no_nan(found, others)

        return terms


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
    return tf.add_n(wide) if wide else tf.constant(0.0, tf.float64)


def _wide(gradient: tf.Tensor) -> tf.Tensor:
    """Squares of halves would overflow."""
    return gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)
