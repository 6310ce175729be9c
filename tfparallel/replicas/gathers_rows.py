"""What replicas have together: the rows of all, sums of them, metrics read once."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.internals import PerReplica, distribute_lib
from tfparallel.internals.keras_layers import behind
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.batch import concat_rows
from tfparallel.replicas.variables import SummedWhenRead, prefetched_metrics, sums_of_copies


class GathersRows(tf.distribute.StrategyExtended):
    """Mixin: the devices of a process join what they have, then the processes do."""

    def _all_rows(self, tensors: list) -> list:
        """The rows of all replicas of each tensor `[rows, ...]`; called in a replica context."""

        def merge(_: tf.distribute.Strategy, *tensors: object) -> list:
            parts = [self._local_results(tensor) for tensor in tensors]
            with tf.device(self._host_device):
                rows = [self._gather_rows(concat_rows(each)) for each in parts]
            return rows

        return distribute_lib.get_replica_context().merge_call(merge, args=tensors)

    def _own_rows_of_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """This replica's rows of the sum of all replicas' `rows`; called in a replica context.

        Args:
            rows: `[rows of all, ...]` on each replica, what it adds to the sum.
            counts: `[replicas]`, whose rows they are, one replica after the other.
        """

        def merge(_: tf.distribute.Strategy, rows: object, counts: object) -> object:
            parts = self._local_results(rows)
            with tf.device(self._host_device):
                by_worker = self._local_results(counts)[0]
                by_worker = tf.reshape(by_worker, [self._num_workers, len(parts)])
                own = self._scattered_sum(sum_in_order(parts), tf.reduce_sum(by_worker, 1))
                own_counts = by_worker[self._id_in_cluster]
                split_up = tf.split(own, own_counts, num=len(parts))
            return split_up[0] if len(parts) == 1 else PerReplica(split_up)

        return distribute_lib.get_replica_context().merge_call(merge, args=(rows, counts))

    @contextlib.contextmanager
    def _metrics_read_together(self, metrics: Sequence) -> Iterator[None]:
        """Reads all metric variables at once: one tensor a type from each device and worker."""
        variables = [behind(v) for metric in metrics for v in metric.variables]
        variables = [v for v in variables if isinstance(v, SummedWhenRead)]
        if self._num_workers == 1:
            variables = [v for v in variables if v.is_sum_of_copies]
        if not variables:
            yield
            return
        is_of_all = self._num_workers > 1 and self._meets_every_step
        sums = self._sums_of_all(variables) if is_of_all else sums_of_copies(variables)
        with prefetched_metrics({id(v): value for v, value in zip(variables, sums, strict=True)}):
            yield

    def _sums_of_all(self, variables: Sequence) -> list[tf.Tensor]:
        """Of each metric variable the sum of all copies, of all workers."""
        return self._sum_and_check_weights(sums_of_copies(variables))
