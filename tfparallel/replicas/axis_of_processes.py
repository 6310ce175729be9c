"""The workers around a process, as strategies of one process see them.

A strategy over several processes is an axis of a mesh: each process is one place on it. What
trains in a process may be a mesh of its own, of a pipeline, of tensor parallelism or of shards:

    HorovodStrategy(inner=...)            one place for each process: sums, rows, agreement
        PipelineStrategy(...)             the devices of a process

So an `extended` of one process does not become one of several, it has them: `extended._workers`.
First the devices of a process add up what they have, then the processes.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import keras
import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.coordination.agreement import Agreement
from tfparallel.internals import BaseOptimizer, TrainerCall
from tfparallel.replicas.optimizer_hooks import GradientSource
from tfparallel.replicas.training import GradientMemory

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class AxisOfProcesses(Protocol):
    """What an axis over processes answers; `WorkersExtended` does.

    All workers make these calls, in the same order.
    """

    _num_workers: int
    _id_in_cluster: int
    _agreement: Agreement
    _default_device: str | None
    _compressor: Compressor | None

    @property
    def _meets_every_step(self) -> bool:
        """Whether workers hear of one another in each step."""

    @property
    def _collectives(self) -> Collectives:
        """Between the hosts of all workers."""

    @property
    def _host_device(self) -> str:
        """A CPU of this process."""

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> Callable[[], tf.Tensor]:
        """A function that gives rank 0's initial value, for `replica_id` 0."""

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        """What Keras iterates over, once all workers have said that theirs is alike."""

    def _step_of(self, model: keras.Model) -> AbstractContextManager[None]:
        """Around each Keras step of `model`."""

    def _check_outside_of_replicas(self, name: str) -> None:
        """Refuses to differentiate variable `name` outside of `run`."""

    def _names_lost_ranks(self) -> AbstractContextManager[None] | None:
        """Within it, errors name a process that has ended; None where nobody would be known."""

    def _in_multi_worker_mode(self) -> bool:
        """Whether what `run` returns is this worker's only."""

    def compression_of(self, optimizer: BaseOptimizer) -> GradientMemory | None:
        """What compresses the gradients of a built optimizer between workers."""

    def _link_times(self) -> LinkTimes:
        """What collectives between processes have taken so far, where the transport is our own."""

    def _link_journal(self) -> AbstractContextManager[LinkJournal]:
        """Within it, what that transport sends and receives is noted."""

    def _sum_list_across_workers(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of the workers' tensors; called in a cross-replica context."""

    def _sum_gradients_across_workers(
        self, gradients: list[Gradient], source: GradientSource | None
    ) -> list[Gradient]:
        """Sums of the workers' tensors or IndexedSlices; called in a cross-replica context."""

    def _gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """All workers' tensors `[rows, ...]`, one after the other."""

    def _scattered_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Of the sum of the workers' `rows` those of this one; `counts` says how many each has."""

    def _gather_along(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        """The same along an axis, of equal shapes but for that axis."""

    def _sum_and_check_weights(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """`_sum_list_across_workers`, on which a check of the weights may ride."""


def value_of_rank_zero(workers: AxisOfProcesses, kwargs: Mapping[str, object]) -> tf.Tensor:
    """Rank 0's initial value of a variable that all workers create now.

    Args:
        workers: of several processes.
        kwargs: what a variable creator gets.
    """
    with tf.init_scope():
        return workers._get_variable_creator_initial_value(
            replica_id=0, device=workers._host_device, primary_var=None, **kwargs
        )()
