"""Replicas that are groups of processes each: the ranks that have one part meet, over all rows.

               part 0         part 1
    replica 0  rank 0  -----  rank 1      those that compute a replica: `ModelRanks`
                 |              |
    replica 1  rank 2  -----  rank 3      those that have a part of all replicas: here

What is whole is alike on all ranks of a replica, and so is its sum over replicas on each.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import keras
import tensorflow as tf

from tfparallel.communication.collectives import LeftOutIfUnread
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.kept_collectives import keep
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.hybrid.groups_of_workers import WorkerGroup
from tfparallel.internals import BaseOptimizer, ResourceVariable, TrainerCall
from tfparallel.replicas.across_workers import assert_equal_shapes, shape_beside
from tfparallel.replicas.axis_of_processes import AxisOfProcesses, Gradient
from tfparallel.replicas.optimizer_hooks import GradientSource
from tfparallel.replicas.sums_of_processes import SumsOfProcesses
from tfparallel.tensor_parallel.ranks import ModelRanks


class ReplicasOfRanks(SumsOfProcesses):
    """The axis of replicas, as a rank of one of them sees it: an `AxisOfProcesses`.

    Args:
        job: all processes.
        ranks: of this one's replica.
        collectives: between `alike`.
        alike: the ranks that have this one's part.
    """

    _compressor: Compressor | None = None
    _meets_every_step = True

    def __init__(
        self,
        job: AxisOfProcesses,
        ranks: ModelRanks,
        collectives: LeftOutIfUnread,
        alike: WorkerGroup,
    ):
        self._job, self._agreement = job, job._agreement
        self._default_device, self._host_device = job._default_device, job._host_device
        self._num_workers = len(alike.ranks)
        self._id_in_cluster = alike.ranks.index(job._id_in_cluster)
        self._collectives = _CollectivesInStep(
            ranks, collectives, self._num_workers, self._id_in_cluster, self._host_device
        )

    # ---- as all processes do ---------------------------------------------------------------------

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> Callable[[], tf.Tensor]:
        return self._job._get_variable_creator_initial_value(
            replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
        )

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        return self._job._keras_dataset(dataset, call)

    def _step_of(self, model: keras.Model) -> AbstractContextManager[None]:
        del model
        return nullcontext()

    def _check_outside_of_replicas(self, name: str) -> None:
        self._job._check_outside_of_replicas(name)

    def _names_lost_ranks(self) -> AbstractContextManager[None] | None:
        return self._job._names_lost_ranks()

    def _in_multi_worker_mode(self) -> bool:
        return self._job._in_multi_worker_mode()

    def _link_times(self) -> LinkTimes:
        return self._job._link_times()

    def _link_journal(self) -> AbstractContextManager[LinkJournal]:
        return self._job._link_journal()

    def compression_of(self, optimizer: BaseOptimizer) -> None:
        """None: gradients cross as they are."""
        del optimizer

    # ---- over replicas ---------------------------------------------------------------------------

    def _sum_gradients_across_workers(
        self, gradients: list[Gradient], source: GradientSource | None
    ) -> list[Gradient]:
        del source
        dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
        sums = iter(self._sum_list_across_workers(dense))
        return [self._all(g) if isinstance(g, tf.IndexedSlices) else next(sums) for g in gradients]

    def _all(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The rows of all replicas, one after the other."""
        gathered = [self._host_gather(x) for x in (slices.values, slices.indices)]
        return tf.IndexedSlices(*gathered, slices.dense_shape)

    def _gather_along(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        shapes = self._gather_rows(shape_beside(tensor, axis)[tf.newaxis])
        with tf.control_dependencies([assert_equal_shapes(shapes, axis)]):
            rows = self._gather_rows(_with_axis_first(tensor, axis))
        return _with_axis_back(rows, axis)

    def _sum_and_check_weights(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._sum_list_across_workers(tensors)


def _with_axis_first(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.transpose(tensor, [axis, *(i for i in range(len(tensor.shape)) if i != axis)])


def _with_axis_back(rows: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.transpose(rows, [*range(1, axis + 1), 0, *range(axis + 1, len(rows.shape))])


class _CollectivesInStep:
    """`Collectives` in the order of what the ranks of a replica exchange.

    Ranks of a replica tell one another what they exchange, without shapes: parts may be uneven.

    Args:
        ranks: of this one's replica.
        between: those of all replicas that have the same part.
        size: how many these are.
        index: which of them this is.
        device: of this process, where tensors are sent.
    """

    def __init__(
        self, ranks: ModelRanks, between: LeftOutIfUnread, size: int, index: int, device: str
    ):
        self._ranks, self._between = ranks, between
        self.size, self.index = size, index
        with tf.init_scope(), tf.device(device):
            self._num_kept = ResourceVariable(0, dtype=tf.int64)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_reduce`."""
        return self._meet(self._between.sum_of, tensor, f"sum {tensor.dtype.name} over replicas")

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`; twice what would have to be sent."""
        return self.all_reduce(rows)[self.index]

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`."""
        return self._meet(self._between.gather_rows, rows, f"gather {rows.dtype.name} of replicas")

    def _meet(self, collective: Callable, tensor: tf.Tensor, what: str) -> tf.Tensor:
        """Also where one replica alone reads what comes of it, as the first one for metrics.

        Not of parts that other ranks store: those who do meet.
        """
        result = self._ranks.meet(collective, tf.convert_to_tensor(tensor), what)
        if not self._ranks.is_of_stand_ins(result):
            keep([result], self._num_kept)
        return result

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`."""
        wholes = [self.all_gather(part) for part in parts]
        for whole, part in zip(wholes, parts, strict=True):
            whole.set_shape([part.shape[0] * self.size])
        return wholes

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`; all rows go around, `size` times what would have to."""
        return self.all_gather(rows[tf.newaxis])[:, self.index]

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`."""
        return self.all_gather(tensor[tf.newaxis][: 1 if self.index == 0 else 0])[0]
