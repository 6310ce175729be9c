"""A process as one place among several, or as all there is."""

import contextlib

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.internals import BaseOptimizer, numpy_dataset
from tfparallel.replicas.axis_of_processes import AxisOfProcesses, value_of_rank_zero
from tfparallel.replicas.batch import Batch
from tfparallel.replicas.optimizer_hooks import GradientSource
from tfparallel.replicas.training import GradientMemory


class OnePlace(tf.distribute.StrategyExtended):
    """Mixin: this process is all there is, unless it has others around it.

    `WorkersExtended` overrides it for processes that are one replica, or some, each.
    """

    _agreed_value: tf.Tensor | None
    _num_workers = 1
    _id_in_cluster = 0
    _agreement: Agreement | None = None  # of several workers
    _workers: AxisOfProcesses | None = None  # around devices that are a mesh of their own

    # ---- what callbacks ask: `training.Training` -------------------------------------------------

    def settle(self) -> None:
        """Every step is done when it returns."""

    def agreement(self) -> Agreement | None:
        """That of the workers, if there are several."""
        return self._agreement if self._num_workers > 1 else None

    def compression_of(self, optimizer: BaseOptimizer) -> GradientMemory | None:
        """What the workers around this process compress with, if there are any."""
        return None if self._workers is None else self._workers.compression_of(optimizer)

    def _join(self, workers: AxisOfProcesses) -> None:
        """Makes this process one place of an axis over several; before variables are created."""
        self._workers, self._agreement = workers, workers._agreement
        self._num_workers, self._id_in_cluster = workers._num_workers, workers._id_in_cluster
        self._default_device = workers._default_device

    def _names_lost_ranks(self) -> contextlib.AbstractContextManager | None:
        """Within it, errors name a process that has ended; None where nobody would be known."""
        return None

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self.worker_devices) * self._num_workers

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._id_in_cluster * len(self.worker_devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self._id_in_cluster * len(self.worker_devices)

    def _in_multi_worker_mode(self) -> bool:
        if self._workers is None:
            return super()._in_multi_worker_mode()
        return self._workers._in_multi_worker_mode()

    def _begun_alike(self, kwargs: dict) -> dict:
        """What a variable creator gets, with rank 0's initial value; asking twice changes nothing.

        For whoever looks at the value before the base's `_create_variable` does.
        """
        is_local = isinstance(kwargs.get("colocate_with"), numpy_dataset.SingleDevice)
        if self._workers is None or is_local or kwargs["initial_value"] is self._agreed_value:
            return kwargs
        self._agreed_value = value_of_rank_zero(self._workers, kwargs)
        return {**kwargs, "initial_value": self._agreed_value}

    def _check_outside_of_replicas(self, name: str) -> None:
        """Whether variable `name` may be differentiated outside of `run`."""
        if self._workers is not None:
            self._workers._check_outside_of_replicas(name)

    def _sum_across_workers(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._sum_list_across_workers([tensor])[0]

    def _sum_list_across_workers(self, tensors: list) -> list:
        return tensors if self._workers is None else self._workers._sum_list_across_workers(tensors)

    def _sum_list_between_hosts(self, tensors: list) -> list:
        """The same, of what is large: through the hosts' memory, where workers are several."""
        return self._sum_list_across_workers(tensors)

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        """Of the sums of this process; called in a cross-replica context."""
        if self._workers is None:
            return gradients
        return self._workers._sum_gradients_across_workers(gradients, source)

    @property
    def _compresses(self) -> bool:
        """Whether gradients are compressed between workers, which takes whole ones.

        What has gradients in parts then leaves them whole until they are summed.
        """
        return self._workers is not None and self._workers._compressor is not None

    def _mean_statistics(
        self, firsts: list[tf.Tensor], shares: list[tf.Tensor], batch: Batch
    ) -> list[tf.Tensor]:
        """Means over all rows of a batch of what replicas have computed of their own.

        Args:
            firsts: what the first replica of this process has.
            shares: of each mean, what this process adds to it.
            batch: whose rows it is of.
        """
        del firsts, batch
        return self._sum_list_across_workers(shares)

    def _gather_rows(self, rows: object) -> object:
        return rows if self._workers is None else self._workers._gather_rows(rows)

    def _scattered_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """This process's rows of the sum of all processes' `rows`; `counts` of each process."""
        return rows if self._workers is None else self._workers._scattered_sum(rows, counts)

    @property
    def _meets_every_step(self) -> bool:
        """Whether workers hear of one another in each step; what a step reports is of all then."""
        return True

    def _sum_and_check_weights(self, tensors: list) -> list:
        if self._workers is None:
            return self._sum_list_across_workers(tensors)
        return self._workers._sum_and_check_weights(tensors)
