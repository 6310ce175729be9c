"""Replicas on devices of one process, between which nothing has to be matched."""

from collections.abc import Callable

import tensorflow as tf

from tfparallel.communication.bucketed_all_reduce import is_sparse
from tfparallel.communication.collectives import Collectives
from tfparallel.internals import (
    CollectiveAllReduce,
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    distribute_lib,
    distribute_utils,
)
from tfparallel.internals.distribute import gather
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.device_names import is_in_parts
from tfparallel.replicas.extended import ReplicatedExtended
from tfparallel.replicas.graph_collectives import GraphCollectives
from tfparallel.replicas.optimizer_hooks import gradient_source
from tfparallel.replicas.sums_on_devices import is_of_tensors, sums_on_devices


class LocalExtended(ReplicatedExtended):
    """Replicas on devices of one process: reduction is a sum in the graph, no collective to match.

    Collectives (NCCL) are kept for several physical GPUs, and wherever the user passed
    `cross_device_ops`.
    """

    _user_cross_device_ops: tf.distribute.CrossDeviceOps | None = None
    _replicas: Collectives = GraphCollectives()
    _takes_workers = True  # may be inside of a strategy over several processes

    def _local_reduction(self) -> tf.distribute.CrossDeviceOps:
        if self._user_cross_device_ops is not None:
            return self._user_cross_device_ops
        if all("gpu" in device.lower() for device in self._devices) and not is_in_parts():
            return self._collective_ops
        return ReductionToOneDevice()

    def _all_rows(self, tensors: list) -> list:
        """As the base's; in one process gathered on each device from each."""
        if self._workers is not None:
            return super()._all_rows(tensors)

        return self._replicas.all_gather_each(tensors)

    def _own_rows_of_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """As the base's; in one process each device adds up the rows of its own alone."""
        if self._workers is not None:
            return super()._own_rows_of_sum(rows, counts)

        def merge(_: tf.distribute.Strategy, rows: object, counts: object) -> PerReplica:
            parts, by_replica = self._local_results(rows), self._local_results(counts)[0]
            owns = []
            for number, device in enumerate(self._devices):
                with tf.device(device):
                    start, count = tf.reduce_sum(by_replica[:number]), by_replica[number]
                    owns.append(sum_in_order([part[start : start + count] for part in parts]))
            return PerReplica(owns)

        return distribute_lib.get_replica_context().merge_call(merge, args=(rows, counts))

    def _reduce_to(
        self, reduce_op: ReduceOp, value: object, destinations: object, options: object
    ) -> object:
        local = self._reduce_in_process(reduce_op, value, destinations, options)
        return self._reduce_over_workers(reduce_op, [local])[0]

    def _reduce_in_process(
        self, reduce_op: ReduceOp, value: object, destinations: object, options: object
    ) -> object:
        if isinstance(value, DistributedValues) and not distribute_utils.is_mirrored(value):
            return ReductionToOneDevice().reduce(reduce_op, value, destinations)
        if self._workers is not None and tf.is_tensor(value) and len(self._devices) == 1:
            return value  # of the one replica here: TensorFlow knows none but those of the process
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _gather_to_implementation(
        self, value: object, destinations: object, axis: int, options: object
    ) -> object:
        if isinstance(value, DistributedValues):
            value = gather(self._local_reduction(), value, destinations, axis, options)
        if self._workers is None:
            return value
        return self._workers._gather_along(self._local_results(value)[0], axis)

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], object]
    ) -> object:
        """As TensorFlow's, for the replicas of this process; each has its number among all."""
        if self._workers is None:
            return super()._experimental_distribute_values_from_function(value_fn)
        count = self._num_replicas_in_sync
        here = count // self._workers._num_workers
        first = self._workers._id_in_cluster * here
        contexts = [
            tf.distribute.experimental.ValueContext(number, count)
            for number in range(first, first + here)
        ]
        return distribute_utils.regroup([value_fn(each) for each in contexts], always_wrap=True)

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: list, options: object
    ) -> list:
        local = self._batch_reduce_here(reduce_op, list(value_destination_pairs), options)
        return self._reduce_over_workers(reduce_op, local)

    def _batch_reduce_here(self, reduce_op: ReduceOp, pairs: list, options: object = None) -> list:
        """Between the devices of this process, sparse gradients by copies where it has NCCL.

        TensorFlow's gather asks all GPUs for their numbers of rows first, and the host waits for
        the answer; here they are known where the graph is.
        """
        reduction, known = self._local_reduction(), {}
        if isinstance(reduction, CollectiveAllReduce):
            known = {
                i: self._all_slices(reduce_op, value)
                for i, (value, _) in enumerate(pairs)
                if is_sparse(value)
            }
        elif self._user_cross_device_ops is None and reduce_op == ReduceOp.SUM:
            dense = {i: value for i, (value, to) in enumerate(pairs) if self._is_summed(value, to)}
            sums = sums_on_devices(list(dense.values()), self._devices)
            known = dict(zip(dense, sums, strict=True))
        others = [pair for i, pair in enumerate(pairs) if i not in known]
        reduced = iter(reduction.batch_reduce(reduce_op, others, options) if others else ())
        return [known[i] if i in known else next(reduced) for i in range(len(pairs))]

    def _is_summed(self, value: object, destinations: object) -> bool:
        """Whether `value` is of tensors on the devices of the replicas, and its sum is to be."""
        if destinations is not value or not is_of_tensors(value):
            return False
        return [part.device for part in value.values] == list(self._devices)

    def _all_slices(self, reduce_op: ReduceOp, value: PerReplica) -> Mirrored:
        """The rows of all replicas' sparse gradients, on each of their devices."""
        parts = self._local_results(value)
        count = len(parts) if reduce_op == ReduceOp.MEAN else 1
        copies = []
        for own, device in zip(parts, self._devices, strict=True):
            with tf.device(device):
                values = tf.concat([part.values for part in parts], 0) / count
                indices = tf.concat([part.indices for part in parts], 0)
                copies.append(tf.IndexedSlices(values, indices, own.dense_shape))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    def _sum_gradients(self, gradients: list) -> list:
        """Through the workers as gradients, which may be compressed there."""
        source = gradient_source()
        if self._workers is None:
            return super()._sum_gradients(gradients)

        def merge(_: tf.distribute.Strategy, *gradients: object) -> list:
            pairs = [(gradient, gradient) for gradient in gradients]
            local = self._batch_reduce_here(ReduceOp.SUM, pairs)
            own = [self._local_results(total)[0] for total in local]
            sums = self._sum_gradients_across_workers(own, source)
            return [self._like(total, each) for total, each in zip(sums, local, strict=True)]

        return list(distribute_lib.get_replica_context().merge_call(merge, args=gradients))

    def _reduce_over_workers(self, reduce_op: ReduceOp, local: list) -> list:
        """What the processes have reduced in themselves, where there are several."""
        if self._workers is None:
            return local
        own = [self._local_results(each)[0] for each in local]
        sums = self._sum_gradients_across_workers(own, None)
        if reduce_op == ReduceOp.MEAN:
            sums = [total / tf.cast(self._num_workers, total.dtype) for total in sums]
        return [self._like(total, each) for total, each in zip(sums, local, strict=True)]

    def _like(self, total: object, local: object) -> object:
        """`total` on the devices that `local` is on."""
        if not isinstance(local, DistributedValues):
            return total
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, total, expand_composites=True))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    def _refuse_workers(self, what: str) -> None:
        if self._workers is not None:
            raise NotImplementedError(
                "A strategy over several processes with `inner`, or with a mesh inside of each, "
                f"trains by fit, evaluate and predict. Received: a call of {what}. Call fit, or "
                f"give `run` the rows of each process. (Rank {self._id_in_cluster} is speaking.)"
            )

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: object) -> object:
        self._refuse_workers("experimental_distribute_dataset")
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: object, options: object) -> object:
        self._refuse_workers("distribute_datasets_from_function")
        return super()._distribute_datasets_from_function(dataset_fn, options)
