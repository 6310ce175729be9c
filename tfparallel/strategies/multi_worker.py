"""Data parallel over several processes or hosts: each has all variables, gradients all-reduce."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster import read_tf_config
from tfparallel.communication.agreement import Agreement, DisagreementError
from tfparallel.communication.ring import connect_ring
from tfparallel.communication.ring_all_reduce import RingAllReduce, is_sparse
from tfparallel.communication.waiting import report_absent_peers
from tfparallel.strategies.base import KerasStrategy, ReplicatedExtended
from tfparallel.strategies.variables import MetricVariable, prefetched_metrics
from tfparallel.strategies.worker_files import keep_files_of_other_workers_apart
from tfparallel.tf_internals import (
    CollectiveAllReduceExtended,
    PerReplica,
    ReduceOp,
    TrainerCall,
    context,
    owner_of_new_variable,
)

CommunicationImplementation = tf.distribute.experimental.CommunicationImplementation


class MultiWorkerMirroredStrategy(KerasStrategy):
    """Synchronous data parallelism over the workers of a cluster.

    Drop-in for `tf.distribute.MultiWorkerMirroredStrategy`. The batch size of `fit` is global.
    Every worker runs the same script with the same data and keeps the rows of its replicas; with
    `tf.data.Options.experimental_distribute.auto_shard_policy` FILE it reads only its files.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads
            `TF_CONFIG`.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        ClusterConfigError: listing all that is wrong with `TF_CONFIG`, before a server starts.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    ):
        if cluster_resolver is None and (cluster := read_tf_config()) is not None:
            cluster_resolver = cluster.cluster_resolver()
        if communication_options is None:
            communication_options = tf.distribute.experimental.CommunicationOptions()
        super().__init__(MultiWorkerExtended(self, cluster_resolver, communication_options))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver of this strategy."""
        return self.extended._cluster_resolver


class MultiWorkerExtended(ReplicatedExtended, CollectiveAllReduceExtended):
    """`CollectiveAllReduceExtended` whose workers agree before a collective can hang."""

    _server_started = False  # of the process: TensorFlow starts one server in it

    def __init__(self, container_strategy: Any, cluster_resolver: Any, communication_options: Any):
        self._std_server_started = MultiWorkerExtended._server_started
        report_absent_peers(*_rank_and_peers(cluster_resolver))
        super().__init__(container_strategy, cluster_resolver, communication_options)
        MultiWorkerExtended._server_started = self._num_workers > 1
        self._agreement = Agreement(
            str(self._collective_key_base), self._id_in_cluster, self._num_workers
        )
        self._ring_all_reduce: RingAllReduce | None = None
        if self._num_workers > 1:
            self._agree_on_seed()
            self._open_ring()
        for cross_device_ops in (self._cross_device_ops, self._host_cross_device_ops):
            for launcher in cross_device_ops._launchers:
                launcher._use_unique_instance_key = self._draws_keys_at_call_time
        self._is_in_loop = False

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        devices, device_type = super()._initialize_local_devices(cluster_resolver, worker_device)
        if device_type == "CPU":  # all logical ones: the stock strategy takes only the first
            cpu = tf.config.list_physical_devices("CPU")[0]
            num_devices = len(tf.config.get_logical_device_configuration(cpu) or [cpu])
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(num_devices))
        return devices, device_type

    def _open_ring(self) -> None:
        """Lets our ring reduce tensors of CPUs, unless an implementation was asked for.

        In loops (`steps_per_execution`) it gathers the sparse gradients of all others, too.
        """
        address = self._cluster_spec.task_address(self._task_type, self._task_id)
        host = address.rpartition(":")[0].strip("[]")
        options = self._communication_options
        try:
            ring = connect_ring(
                self._id_in_cluster,
                self._num_workers,
                host,
                self._agreement.exchange,
                options.timeout_seconds,
            )
        except OSError as error:
            if self._is_chief:
                tf.get_logger().warning(
                    "Workers cannot reach one another at free ports (%s). Gradients go through "
                    "TensorFlow's own collectives instead, which are slower on CPUs and make "
                    "sparse gradients dense where steps_per_execution > 1.",
                    error,
                )
            return
        common = {
            "ring": ring,
            "host_device": self._host_device,
            "options": options,
            "collective_keys": self._collective_keys,
        }
        self._ring_all_reduce = RingAllReduce(
            devices=self._devices, group_size=self._num_replicas_in_sync, **common
        )
        automatic = options.implementation == CommunicationImplementation.AUTO
        if self._local_device_type == "CPU" and automatic:
            self._cross_device_ops = self._ring_all_reduce
            self._host_cross_device_ops = RingAllReduce(
                devices=[self._worker_device], group_size=self._num_workers, **common
            )

    # ---- where variables live --------------------------------------------------------------------

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        """Rank 0's initial value, once all ranks have said that they create the same variable."""
        if replica_id == 0 and self._num_workers > 1:
            initial_value, owner = kwargs["initial_value"], owner_of_new_variable()
            name = f"{getattr(owner, 'name', '')}/{kwargs.get('name')}"

            def announced() -> tf.Tensor:
                value = initial_value() if callable(initial_value) else initial_value
                value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
                value = tf.convert_to_tensor(value, kwargs.get("dtype"))
                self._agreement.require_equal(
                    "create a variable", f"{name} {value.dtype.name}{value.shape.as_list()}"
                )
                return value

            kwargs["initial_value"] = announced
        return super()._get_variable_creator_initial_value(
            replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
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
                f"all of them. Received by rank: {seeds}. (Rank {self._id_in_cluster} is speaking.)"
            )

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        if self._num_workers == 1:
            return dataset
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
        if not self._is_chief:
            keep_files_of_other_workers_apart(call.callbacks)
        if shards:
            strategy = self._container_strategy()
            shard = tf.distribute.Strategy.experimental_distribute_dataset(strategy, dataset)
            return AgreedBatches(shard, self._agreement, self._as_per_replica)
        endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if not call.is_length_known and not endless:
            return AgreedBatches(dataset, self._agreement, lambda batch: batch)
        return dataset

    def _as_per_replica(self, batch: Any) -> Any:
        """A batch that is this worker's already, also where it has one replica only."""
        return keras.tree.map_structure(
            lambda leaf: leaf if isinstance(leaf, PerReplica) else PerReplica([leaf]), batch
        )

    # ---- across workers --------------------------------------------------------------------------

    @property
    def _host_device(self) -> str:
        return self._worker_device + "/device:CPU:0" if self._num_workers > 1 else "/device:CPU:0"

    def _draws_keys_at_call_time(self) -> bool:
        """Whether a collective's key is drawn when it runs; else it is fixed when tracing.

        Keys drawn at call time do not mind that shapes differ from call to call, or that one worker
        traces more often than another. But they cannot enter the `tf.while_loop` that Keras makes
        of `steps_per_execution`.
        """
        return not self._is_in_loop

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._is_in_loop = model.steps_per_execution > 1
        try:
            yield
        finally:
            self._is_in_loop = False

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: list, options: Any
    ) -> list:
        """As the stock one; the rows of sparse gradients also vary where keys are fixed.

        A key that is fixed allows one shape only, so that they go through our ring there.
        """
        pairs = list(value_destination_pairs)
        sparse = [i for i, (value, _) in enumerate(pairs) if is_sparse(value)]
        if not (self._is_in_loop and self._num_workers > 1 and sparse):
            return super()._batch_reduce_to(reduce_op, pairs, options)
        if self._ring_all_reduce is None:
            for i in sparse:
                parts = self._local_results(pairs[i][0])
                dense = PerReplica([tf.convert_to_tensor(part) for part in parts])
                pairs[i] = (dense, dense)
            return super()._batch_reduce_to(reduce_op, pairs, options)
        through_ring = [pairs[i] for i in sparse]
        others = [pair for i, pair in enumerate(pairs) if i not in sparse]
        results = dict(
            zip(sparse, self._ring_all_reduce.batch_reduce(reduce_op, through_ring), strict=True)
        )
        rest = iter(super()._batch_reduce_to(reduce_op, others, options) if others else [])
        return [results[i] if i in results else next(rest) for i in range(len(pairs))]

    def _sum_across_workers(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._sum_list_across_workers([tensor])[0]

    def _sum_list_across_workers(self, tensors: list) -> list:
        """Sums of the workers' tensors, in one all-reduce for each dtype."""
        if self._num_workers == 1:
            return tensors
        sums: list = [None] * len(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in chosen], 0)
            flat = self._host_sum(flat)
            parts = tf.split(flat, [tf.size(tensors[i]) for i in chosen])
            for i, part in zip(chosen, parts, strict=True):
                sums[i] = tf.reshape(part, tf.shape(tensors[i]))
        return sums

    def _host_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self._host_device):
            tensor = tf.identity(tensor)
            reduced = self._host_cross_device_ops.reduce(ReduceOp.SUM, tensor, self._host_device)
        return self._local_results(reduced)[0]

    def _gather_rows(self, rows: Any) -> Any:
        if self._num_workers == 1:
            return rows
        if isinstance(rows, (tf.RaggedTensor, tf.SparseTensor)):
            raise NotImplementedError(
                "predict over several workers gathers dense tensors. Received: "
                f"{type(rows).__name__}. Predict in one process, or return `to_tensor()`."
            )
        if tf.executing_eagerly():
            return tf.function(self._gather_rows)(rows)
        scalar = rows.shape.rank == 0
        launcher = self._host_cross_device_ops._launchers[0]
        return launcher.all_gather(rows[tf.newaxis] if scalar else rows, axis=0)

    @contextlib.contextmanager
    def _metrics_read_together(self, metrics: Sequence) -> Iterator[None]:
        """Reads all metric variables in one all-reduce instead of one for each."""
        variables = [v._value for metric in metrics for v in metric.variables]
        variables = [v for v in variables if isinstance(v, MetricVariable)]
        if self._num_workers == 1 or not variables:
            yield
            return
        local = [tf.add_n([copy.read_value() for copy in v.values]) for v in variables]
        sums = self._sum_list_across_workers(local)
        with prefetched_metrics({id(v): value for v, value in zip(variables, sums, strict=True)}):
            yield


def _rank_and_peers(resolver: Any) -> tuple[int, list[str]]:
    """This worker's rank and the addresses of the others that train."""
    cluster = resolver.cluster_spec().as_dict() if resolver is not None else {}
    tasks = [(job, i) for job in ("chief", "worker") for i in range(len(cluster.get(job, ())))]
    me = (resolver.task_type, resolver.task_id) if tasks else None
    rank = tasks.index(me) if me in tasks else 0
    return rank, [cluster[job][i] for job, i in tasks if (job, i) != me]


class AgreedBatches:
    """Batches of a dataset whose length is not known, or differs by worker, checked batch by batch.

    Iterates in Python: one announcement a batch is the price of an error instead of a hang.
    """

    def __init__(self, dataset: Iterable, agreement: Agreement, convert: Callable):
        self._dataset, self._agreement, self._convert = dataset, agreement, convert

    def __iter__(self) -> Iterator:
        end = object()
        iterator = iter(self._dataset)
        for number in itertools.count():
            batch = next(iterator, end)
            shapes = None if batch is end else _shapes(batch)
            announced = self._agreement.exchange("read a batch", shapes)
            if announced == [None] * len(announced):
                # As an exhausted `tf.data` iterator: Keras does not look for StopIteration here.
                raise tf.errors.OutOfRangeError(None, None, "end of the dataset")
            if any(other != announced[0] for other in announced):
                raise DisagreementError(
                    "All workers must have the same number of batches, of as many rows at each "
                    f"step. Received: batch {number} is {announced} by rank (None: the data ended "
                    "before it). Use drop_remainder=True, or let every worker "
                    f"read all data (no auto_shard_policy). (Rank {self._agreement._rank} is "
                    "speaking.)"
                )
            yield self._convert(batch)


def _shapes(batch: Any) -> list[list[int | None]]:
    """The shape of every tensor of a batch on this worker, replica by replica."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    parts = [x.values if isinstance(x, PerReplica) else (x,) for x in leaves]
    return [part.shape.as_list() for leaf in parts for part in leaf]
