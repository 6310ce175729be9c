"""`BucketedAllReduce` whose sums go through Horovod."""

from typing import Any

import tensorflow as tf

from tfparallel.communication.bucketed_all_reduce import BucketedAllReduce
from tfparallel.communication.horovod_collectives import all_gather, all_reduce_sum
from tfparallel.communication.horovod_start import ProcessSet
from tfparallel.communication.kept_collectives import keep
from tfparallel.internals import ResourceVariable


class HorovodAllReduce(BucketedAllReduce):
    """`BucketedAllReduce` through Horovod.

    Args:
        process_set: the ranks.
        predivide, adasum: as `all_reduce_sum`.
        **options: as `BucketedAllReduce`.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        predivide: float = 1.0,
        adasum: bool = False,
        **options: Any,
    ):
        super().__init__(**options)
        self._process_set, self._predivide, self._adasum = process_set, predivide, adasum
        with tf.init_scope(), tf.device(self._device):
            self._num_kept = ResourceVariable(0, dtype=tf.int64)

    def _sum_bucket(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        sums = all_reduce_sum(tensors, self._process_set, self._predivide, self._adasum)
        keep(sums, self._num_kept)
        return sums

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        gathered = all_gather(rows, self._process_set)
        keep([gathered], self._num_kept)
        return gathered
