"""What strategies of several processes share: their workers agree before a collective can hang.

A strategy gives the transport, two collectives between the hosts of all workers; this is what is
done with them.
"""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

import keras
import tensorflow as tf

from tfparallel.coordination.agreement import Agreement, DisagreementError
from tfparallel.internals import (
    PerReplica,
    ReduceOp,
    TrainerCall,
    context,
    owner_of_new_variable,
)
from tfparallel.internals.datasets import let_go_beside
from tfparallel.internals.keras_epochs import surround_epochs
from tfparallel.replicas.extended import ReplicatedExtended
from tfparallel.replicas.optimizer_hooks import GradientSource
from tfparallel.replicas.peeked_iterator import PeekedIterator
from tfparallel.replicas.sums_of_processes import SumsOfProcesses
from tfparallel.replicas.weights_check import WeightsCheck
from tfparallel.replicas.worker_files import keep_files_of_other_workers_apart

_MAX_RANK = 16  # of what is gathered


class WorkersExtended(SumsOfProcesses, ReplicatedExtended):
    """`ReplicatedExtended` over several processes, each with all variables.

    Set by the strategy that inherits it, before a variable is created: `_num_workers`, and where
    there are several, `_agreement` and `_collectives`, between the hosts of all workers; and
    `_has_nccl`, whether gradients meet on GPUs, by NCCL.
    """

    _agreement: Agreement
    _has_nccl = False
    _weights_check: WeightsCheck | None = None
    _weights_to_check: list | None = None  # of the model whose step is traced, until it is checked

    def _check_weights(self, every_steps: int | None) -> None:
        """Compares the workers' weights from now on; called when the strategy is built."""
        if every_steps is not None and self._num_workers > 1:
            self._weights_check = WeightsCheck(self._id_in_cluster, self._num_workers, every_steps)

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._weights_to_check = [weight.value for weight in model.trainable_variables]
        try:
            yield
        finally:
            self._weights_to_check = None

    # ---- where variables live --------------------------------------------------------------------

    def _value_of_rank_zero(
        self, kwargs: Mapping[str, object], broadcast: Callable[[tf.Tensor], tf.Tensor]
    ) -> Callable[[], tf.Tensor]:
        """Rank 0's initial value, once all workers have said that they create the same variable.

        Where all have drawn the same value, as after `set_random_seed`, nothing else is sent.

        Args:
            kwargs: what a variable creator gets.
            broadcast: gives all workers rank 0's tensor.
        """
        owner = owner_of_new_variable()
        name = f"{getattr(owner, 'name', '')}/{kwargs.get('name')}"
        dtype = kwargs.get("dtype")  # not `kwargs`, which will hold this function, and the value
        initial_value = kwargs["initial_value"]

        def agreed() -> tf.Tensor:
            value = initial_value() if callable(initial_value) else initial_value
            value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
            value = tf.convert_to_tensor(value, dtype)
            form = f"{name} {value.dtype.name}{value.shape.as_list()}"
            digest = _digest(value)
            is_same = self._agreement.require_equal("create a variable", form, digest)
            return value if is_same and digest is not None else broadcast(value)

        return agreed

    def _check_outside_of_replicas(self, name: str) -> None:
        if self._num_workers > 1:
            raise ValueError(
                "Gradients with several workers are computed in strategy.run, which adds up those "
                f"of all workers. Received: variable '{name}' differentiated outside of it. Put "
                "the step into a function and call strategy.run(step, args=(batch,))."
            )

    # ---- how a batch is split --------------------------------------------------------------------

    def _agree_on_seed(self) -> None:
        """One global seed for all workers, which have to shuffle alike to keep rows of one batch.

        Where nobody has set a seed, rank 0's draw is set.
        """
        seeds = self._agreement.exchange("set a global seed", context.global_seed())
        if seeds == [None] * self._num_workers:
            drawn = self._agreement.exchange("draw a global seed", random.getrandbits(31))
            tf.random.set_seed(drawn[0])
        elif len(set(seeds)) > 1:
            raise DisagreementError(
                "All workers must have the same global seed, or none: they shuffle the same data "
                "and each keeps its own rows. Call keras.utils.set_random_seed with one value on "
                f"all of them. Received by rank: {seeds}. (Rank {self._agreement.rank} is "
                "speaking.)"
            )

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        if self._num_workers == 1:
            return dataset
        surround_epochs(call.epoch_iterator, lambda: self._around_epoch(call))
        policy = dataset.options().experimental_distribute.auto_shard_policy
        shards = call.is_dataset_of_user and policy == tf.data.experimental.AutoShardPolicy.FILE
        self._agreement.require_equal(
            f"call {call.method}",
            {
                "batches": call.num_batches,
                "element_spec": str(dataset.element_spec),
                "reads_shards": shards,
                "global_seed": context.global_seed(),
                "variables": [[v.path, list(v.shape)] for v in call.model.variables],
            },
        )
        if self._agreement.rank != 0:
            keep_files_of_other_workers_apart(call.callbacks)
        if shards:
            strategy = self._container_strategy()
            self._check_has_own_replicas(strategy)
            shard = tf.distribute.Strategy.experimental_distribute_dataset(strategy, dataset)
            return AgreedBatches(shard, self._agreement, self._as_per_replica)
        endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if not call.is_length_known and not endless:
            return AgreedBatches(dataset, self._agreement, lambda batch: batch)
        return dataset

    def _check_has_own_replicas(self, strategy: tf.distribute.Strategy) -> None:
        if strategy.extended is not self:
            raise ValueError(
                "auto_shard_policy FILE deals files to the replicas of workers, and the devices "
                "of a worker with an inner strategy divide the rows of a whole batch. Received: a "
                f"dataset with FILE. Use AutoShardPolicy.OFF. (Rank {self._id_in_cluster} is "
                "speaking.)"
            )

    def _around_epoch(self, call: TrainerCall) -> contextlib.AbstractContextManager:
        """Around the steps of each epoch of a call of `fit`, `evaluate` or `predict`."""
        del call
        return contextlib.nullcontext()

    def _as_per_replica(self, batch: object) -> object:
        """A batch that is this worker's already, also where it has one replica only."""
        return keras.tree.map_structure(
            lambda leaf: leaf if isinstance(leaf, PerReplica) else PerReplica([leaf]), batch
        )

    # ---- across workers --------------------------------------------------------------------------

    def _sum_on_gpus(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `_host_sum`, of floats and int64; called where workers have NCCL."""
        raise NotImplementedError

    def _sum_where_gradients_meet(self, tensor: tf.Tensor) -> tf.Tensor:
        """By NCCL where it can: a sum between hosts waits for all that a GPU was given before.

        int32 is in the host's memory. Rounds of local steps sum in branches, where the hosts do it.
        """
        is_carried = tensor.dtype.is_floating or tensor.dtype == tf.int64
        if self._has_nccl and self._meets_every_step and is_carried:
            return self._sum_on_gpus(tensor)
        return self._host_sum(tensor)

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        """As one replica of each worker; for the devices of a process that are a mesh of their own.

        Called in a cross-replica context, with the sums of the process.
        """
        del source
        if not gradients:
            return []
        with tf.device(self.worker_devices[0]):  # from different devices, each is sent by itself
            here = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
        sums = self._batch_reduce_to(ReduceOp.SUM, [(each, each) for each in here], None)
        return [self._local_results(total)[0] for total in sums]

    def _gather_along(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        """All workers' tensors along `axis`, of equal shapes but for it, in the order of ranks."""
        gathered = self._gather_to_implementation(tensor, self._host_device, axis, None)
        return self._local_results(gathered)[0]

    def _gather_to_implementation(
        self, value: object, destinations: object, axis: int, options: object
    ) -> object:
        parts = self._local_results(value)
        checks = []
        if self._num_workers > 1 and not any(isinstance(p, tf.IndexedSlices) for p in parts):
            shapes = self._gather_rows(tf.stack([shape_beside(part, axis) for part in parts]))
            checks = [assert_equal_shapes(shapes, axis)]
        with tf.control_dependencies(checks):
            return super()._gather_to_implementation(value, destinations, axis, options)

    def _sum_and_check_weights(self, tensors: list) -> list:
        """`_sum_list_across_workers`; once in each step the hash of the weights rides on it."""
        check, weights = self._weights_check, self._weights_to_check
        if check is None or not weights or tf.executing_eagerly():
            return self._sum_list_across_workers(tensors)
        self._weights_to_check = None
        first = [self._local_results(weight)[0] for weight in weights]
        slots = check.slots([[tf.convert_to_tensor(weight) for weight in first]], tensors)
        *sums, slots = self._sum_list_across_workers([*tensors, slots])
        with tf.control_dependencies([check.verify(slots)]):
            return [tf.identity(total) for total in sums]


class AgreedBatches:
    """Batches of a dataset whose length is not known, or differs by worker, checked batch by batch.

    Attributes:
        read_dataset: where they come from.
    """

    def __init__(self, dataset: Iterable, agreement: Agreement, convert: Callable):
        self.read_dataset, self._agreement, self._convert = dataset, agreement, convert

    def __iter__(self) -> "AgreedIterator":
        return AgreedIterator(iter(self.read_dataset), self._agreement, self._convert)


class AgreedIterator:
    """Iterates in Python: one announcement a batch is the price of an error instead of a hang.

    Attributes:
        position: the iterator of `tf.data` whose checkpoint is all that is needed to go on, or
            None.
    """

    def __init__(self, iterator: Iterator, agreement: Agreement, convert: Callable):
        let_go_beside(iterator)
        self._batches, self._number = PeekedIterator(iterator), 0
        self.position = iterator if isinstance(iterator, tf.data.Iterator) else None
        self._agreement, self._convert = agreement, convert

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        batch, self._number = next(self._batches, None), self._number + 1
        announced = self._agreement.exchange("read a batch", _shapes(batch))
        if announced == [None] * len(announced):
            # As an exhausted `tf.data` iterator: Keras does not look for StopIteration here.
            raise tf.errors.OutOfRangeError(None, None, "end of the dataset")
        if any(other != announced[0] for other in announced):
            # A traceback keeps this object; a generator's iterator must not outlive Python.
            self._batches, self.position = PeekedIterator(iter(())), None
            raise DisagreementError(
                "All workers must have the same number of batches, of as many rows at each "
                f"step. Received: batch {self._number - 1} is {announced} by rank (None: the data "
                "ended before it). Use drop_remainder=True, or let every worker "
                f"read all data (no auto_shard_policy). (Rank {self._agreement.rank} is speaking.)"
            )
        return self._convert(batch)

    def peek(self, most: int) -> list:
        """The next batches that this worker reads, as far as there are so many."""
        return self._batches.peek(most)


def shape_beside(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """`[1 + _MAX_RANK]`, int32: a tensor's rank and shape, without what `axis` has."""
    shape = tf.shape(tensor)
    rank = tf.size(shape)
    shape *= 1 - tf.one_hot(axis, rank, dtype=tf.int32)
    return tf.concat([[rank], tf.pad(shape, [[0, _MAX_RANK - rank]])], 0)


def assert_equal_shapes(shapes: tf.Tensor, axis: int) -> object:
    """Raises InvalidArgumentError on all workers alike, where TensorFlow's collectives would end.

    Args:
        shapes: `shape_beside` of all replicas, `[replicas, ...]`.
        axis: that is gathered along.
    """
    message = (
        f"Shape mismatch: what is gathered along axis {axis} must have the same rank on all "
        "replicas, and the same shape but for that axis. Received by replica: rank, then the shape "
        "with 0 for that axis:"
    )
    ranks = shapes[:, :1]
    used = shapes[:, : 1 + tf.reduce_max(ranks)]
    return tf.debugging.Assert(
        tf.reduce_all(tf.equal(shapes, shapes[:1])), [message, used], summarize=64
    )


def _shapes(batch: object) -> list[list[int | None]] | None:
    """The shape of every tensor of a batch on this worker, replica by replica; None of None."""
    if batch is None:
        return None
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    parts = [x.values if isinstance(x, PerReplica) else (x,) for x in leaves]
    return [part.shape.as_list() for leaf in parts for part in leaf]


def _digest(value: tf.Tensor) -> str | None:
    """Of all bytes of a tensor; None for one that is not computed yet, and for strings."""
    if not hasattr(value, "numpy") or value.dtype == tf.string:
        return None
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()
