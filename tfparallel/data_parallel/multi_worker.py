"""Replicas on the devices of several workers, over TensorFlow's collectives or our ring."""

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfparallel.communication.bucketed_all_reduce import is_sparse
from tfparallel.communication.collectives import Collectives
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.local_sgd import Meeting
from tfparallel.communication.neighbours import PeerLostError
from tfparallel.communication.ring import Ring
from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.ring_opening import connect_ring
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.lost_ranks import RankLostError
from tfparallel.coordination.meeting import meet
from tfparallel.coordination.store import CoordinationStore
from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.coordination.watch import Watch, always, watch_once
from tfparallel.data_parallel.sums_on_gpus import SumsOnGpus
from tfparallel.data_parallel.watched_collectives import WatchedCollectives
from tfparallel.data_parallel.worker_collectives import (
    check_alike,
    options_of_gradients,
    options_of_hosts,
    without_limit,
)
from tfparallel.internals import (
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    CollectiveKeys,
    PerReplica,
    ReduceOp,
    ResourceVariable,
    TrainerCall,
    is_called_by_trainer,
)
from tfparallel.internals.distribute import (
    collectives_of_device,
    count_collectives,
    draw_keys_at_call_time,
    launchers_of,
)
from tfparallel.internals.eager import has_started
from tfparallel.machine.processors import MIN_INTEROP_THREADS, usable_cores
from tfparallel.replicas.compressed_gradients import CompressedGradients, WorkersTransport
from tfparallel.replicas.device_names import is_in_parts

_ABORTED = "Collective ops is aborted by"  # in errors of TensorFlow's collectives

CommunicationImplementation = tf.distribute.experimental.CommunicationImplementation


class MultiWorkerExtended(SumsOnGpus, CompressedGradients, CollectiveAllReduceExtended):
    """`CollectiveAllReduceExtended` whose workers agree before a collective can hang."""

    _places_batches = True
    _server_started = False  # of the process: TensorFlow starts one server in it

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        communication_options: tf.distribute.experimental.CommunicationOptions,
        compressor: Meeting | None,
        timeouts: WorkerTimeouts,
        has_inner: bool = False,
    ):
        self._has_inner = has_inner  # a worker is one place, whose devices are another's
        self._std_server_started = MultiWorkerExtended._server_started
        tasks, addresses, rank = _workers(cluster_resolver)
        if len(addresses) > 1 and rank is not None and not self._std_server_started:
            _check_is_first(type(container_strategy).__name__, rank)
            _have_threads_to_wait_in()
            meet(addresses, rank, timeouts.start_s)
        stall_s = communication_options.timeout_seconds or timeouts.stall_s
        super().__init__(container_strategy, cluster_resolver, without_limit(communication_options))
        MultiWorkerExtended._server_started = self._num_workers > 1
        self._watch = self._watch_others(addresses, timeouts.silent_s)
        self._agreement = Agreement(
            CoordinationStore(addresses, tasks, self._watch),
            str(self._collective_key_base),
            self._id_in_cluster,
            self._num_workers,
            stall_s,
            timeouts.write_s,
        )
        self._ring_all_reduce: RingAllReduce | None = None
        if self._num_workers > 1:
            self._agree_on_seed()
            self._agree_on_collectives(addresses)
            self._task_names = [f"/job:{job}/task:{i}" for job, i in tasks]
            self._open_ring(stall_s, timeouts.silent_s)
        self._watched = WatchedCollectives(self._agreement, stall_s)
        weakref.finalize(self, self._watched.stop)
        self._watch_collectives(self._cross_device_ops, self._devices[0])
        self._watch_collectives(self._host_cross_device_ops, self._host_device)
        self._is_in_loop = False
        transport = WorkersTransport(self, self._id_in_cluster, self._num_workers)
        self._compress_gradients(compressor, transport)

    def _watch_collectives(
        self, operations: CollectiveAllReduce, device: str, ranks: Sequence[int] | None = None
    ) -> None:
        """Those of `ranks`, None for all workers; of `device`, the first here, for all.

        A collective begins when all devices have come.
        """
        launchers = launchers_of(operations)
        for launcher in launchers:
            draw_keys_at_call_time(launcher, self._draws_keys_at_call_time)
        if self._num_workers > 1:
            count_collectives(launchers[0], self._watched.counter(device, ranks))

    def _agree_on_collectives(self, addresses: list[str]) -> None:
        """NCCL between GPUs; what is of hosts, which the same workers reduce, on CPUs alone."""
        own = [self._local_device_type, len(self._devices), is_in_parts()]
        told = self._agreement.exchange("tell its devices", own)
        kinds, counts, are_divided = (list(each) for each in zip(*told, strict=True))
        check_alike(kinds, counts, addresses)
        options = options_of_gradients(self._communication_options, kinds[0], any(are_divided))
        self._has_nccl = options.implementation == CommunicationImplementation.NCCL
        self._cross_device_ops = CollectiveAllReduce(
            self._devices, self._num_replicas_in_sync, options, self._collective_keys
        )
        self._host_cross_device_ops = CollectiveAllReduce(
            [self._host_device],
            self._num_workers,
            options_of_hosts(self._communication_options),
            self._collective_keys,
        )

    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        devices, device_type = super()._initialize_local_devices(cluster_resolver, worker_device)
        if device_type == "CPU":  # all logical ones: the stock strategy takes only the first
            cpu = tf.config.list_physical_devices("CPU")[0]
            num_devices = len(tf.config.get_logical_device_configuration(cpu) or [cpu])
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(num_devices))
        return devices[:1] if self._has_inner else devices, device_type

    def _watch_others(self, addresses: list[str], silent_s: float) -> Watch | None:
        """Calls to a worker that is silent fail from then on, TensorFlow's collectives too."""
        if self._num_workers == 1:
            return None
        own = self._id_in_cluster
        others = {f"rank {rank}": each for rank, each in enumerate(addresses) if rank != own}
        return watch_once(others, silent_s, always, cuts_all=False)

    @contextlib.contextmanager
    def _around_epoch(self, call: TrainerCall) -> Iterator[None]:
        with self._names_silent_workers(), super()._around_epoch(call):
            yield

    @contextlib.contextmanager
    def _names_silent_workers(self) -> Iterator[None]:
        """TensorFlow's collectives tell of a connection that was shut, not of who was silent."""
        try:
            yield
        except tf.errors.OpError as error:
            watch = self._watch if _ABORTED in error.message else None
            silent = [] if watch is None else watch.absent()
            if not silent:
                raise
            raise RankLostError(
                f"Expected all workers to take part in each step. Received: {', '.join(silent)} "
                "does not answer: it has ended, was stopped, or its network is cut. (Rank "
                f"{self._id_in_cluster} is speaking.)"
            ) from error

    @property
    def _own_host(self) -> str:
        """Where other workers reach this one."""
        address = self._cluster_spec.task_address(self._task_type, self._task_id)
        return address.rpartition(":")[0].strip("[]")

    def _open_ring(self, stall_s: float | None, silent_s: float) -> None:
        """Lets our ring reduce tensors of CPUs, unless an implementation was asked for.

        In loops (`steps_per_execution`) it gathers the sparse gradients of all others, too.
        """
        options = self._communication_options
        try:
            ring = connect_ring(
                self._id_in_cluster,
                self._num_workers,
                self._own_host,
                self._agreement.exchange,
                stall_s,
                self._watch,
                self._task_names,
                answer_s=silent_s,
                hosts_first=True,
            )
        except PeerLostError:
            raise  # it was there, and has ended
        except OSError as error:
            if self._is_chief:
                tf.get_logger().warning(
                    "Workers cannot reach one another at free ports (%s). Gradients go through "
                    "TensorFlow's own collectives instead, which are slower on CPUs and make "
                    "sparse gradients dense where steps_per_execution > 1.",
                    error,
                )
            return
        with tf.init_scope(), tf.device(self._host_device):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            order = ResourceVariable(0.0)
        common = {
            "ring": ring,
            "order": order,
            "device": self._host_device,
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

    def _all_reduce_through(self, ring: Ring, size: int) -> RingAllReduce:
        """That of `size` workers of all, which have opened a ring of their own."""
        assert self._ring_all_reduce is not None
        return RingAllReduce(
            ring=ring,
            order=self._ring_all_reduce.order,  # one of all rings: no two wait for each other
            devices=[self._worker_device],
            group_size=size,
            device=self._host_device,
            options=self._communication_options,
            collective_keys=self._collective_keys,
        )

    def _operations_of_gpu(self, i: int) -> CollectiveAllReduce:
        """TensorFlow's, between GPU `i` of each worker."""
        if len(self._devices) == 1:
            return self._cross_device_ops
        operations = collectives_of_device(self._cross_device_ops, i, self._num_workers)
        self._watch_collectives(operations, self._devices[i])
        return operations

    def _operations_among(self, key: int, ranks: Sequence[int]) -> CollectiveAllReduce:
        """TensorFlow's, between the hosts of some workers, which know one another by a key."""
        keys = CollectiveKeys(self._collective_key_base + key)
        options = options_of_hosts(self._communication_options)
        operations = CollectiveAllReduce([self._host_device], len(ranks), options, keys)
        self._watch_collectives(operations, self._host_device, ranks)
        return operations

    # ---- where variables live --------------------------------------------------------------------

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> object:
        """Rank 0's initial value, once all ranks have said that they create the same variable."""
        if replica_id > 0 or self._num_workers == 1:
            return super()._get_variable_creator_initial_value(
                replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )
        return self._value_of_rank_zero(kwargs, functools.partial(self._broadcast, device))

    def _broadcast(self, device: str, value: tf.Tensor) -> tf.Tensor:
        """Rank 0's, through our ring where there is one.

        TensorFlow's goes over the connection of its heartbeats, which come too late behind
        42 MB at 20 Mbit/s, and end the job. A session's graph knows no `order` of the ring.
        """
        ring = self._ring_all_reduce
        is_of_session = not tf.compat.v1.executing_eagerly_outside_functions()
        if ring is None or value.dtype == tf.string or is_of_session:
            stock = super()._get_variable_creator_initial_value
            kwargs = {"initial_value": value, "dtype": value.dtype}
            return stock(replica_id=0, device=device, primary_var=None, **kwargs)()
        place = self._host_device, self._num_workers, self._id_in_cluster
        return RingCollectives(ring, *place).broadcast(value)

    # ---- across workers --------------------------------------------------------------------------

    @property
    def _host_device(self) -> str:
        return self._worker_device + "/device:CPU:0" if self._num_workers > 1 else "/device:CPU:0"

    def _link_times(self) -> LinkTimes:
        ring = self._ring_all_reduce
        return super()._link_times() if ring is None else ring.times

    def _link_journal(self) -> AbstractContextManager[LinkJournal]:
        ring = self._ring_all_reduce
        return super()._link_journal() if ring is None else ring.journal()

    def _in_multi_worker_mode(self) -> bool:
        """Whether what `run` returns is this worker's only.

        Keras then joins it with the other workers'; what its steps return here is of all workers.
        """
        return self._num_workers > 1 and not is_called_by_trainer()

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
            with super()._step_of(model):
                yield
        finally:
            self._is_in_loop = False

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: list, options: object
    ) -> list:
        """As the stock one, which sparse gradients pass by on GPUs, and where keys are fixed.

        A key that is fixed allows one shape only, and the rows vary: they go through our ring.
        """
        pairs = list(value_destination_pairs)
        sparse = [i for i, (value, _) in enumerate(pairs) if is_sparse(value)]
        ring = self._ring_all_reduce
        if not (self._is_in_loop and self._num_workers > 1):
            is_of_gpus = self._local_device_type == "GPU" and reduce_op == ReduceOp.SUM
            sparse, ring = (sparse if is_of_gpus else []), None
        elif ring is None:
            for i in sparse:
                parts = self._local_results(pairs[i][0])
                dense = PerReplica([tf.convert_to_tensor(part) for part in parts])
                pairs[i] = (dense, dense)
            sparse = []
        if not sparse:
            return super()._batch_reduce_to(reduce_op, pairs, options)
        own = [pairs[i] for i in sparse]
        others = [pair for i, pair in enumerate(pairs) if i not in sparse]
        sums = ring.batch_reduce(reduce_op, own) if ring else self._sums_in_rows(own)
        results = dict(zip(sparse, sums, strict=True))
        rest = iter(super()._batch_reduce_to(reduce_op, others, options) if others else [])
        return [results[i] if i in results else next(rest) for i in range(len(pairs))]

    @property
    def _collectives(self) -> Collectives:  # type: ignore[override]
        """Of what reduces between hosts now."""
        reduction: Any = self._host_cross_device_ops
        place = self._host_device, self._num_workers, self._id_in_cluster
        if isinstance(reduction, RingAllReduce):
            return RingCollectives(reduction, *place)
        return StockCollectives(reduction, *place)

    def _host_scatter_sum(self, rows: tf.Tensor) -> tf.Tensor:
        """Through TensorFlow's collectives the row of a whole sum, which adds up in their order."""
        if isinstance(self._collectives, RingCollectives):
            return super()._host_scatter_sum(rows)
        return self._host_sum(rows)[self._id_in_cluster]


def _check_is_first(strategy: str, rank: int) -> None:
    """Refuses a strategy that comes too late to connect TensorFlow, before others are waited for.

    Raises:
        RuntimeError: with what to do.
    """
    if has_started():
        raise RuntimeError(
            f"Expected {strategy} to be made before TensorFlow runs its first operation: it "
            "connects TensorFlow to the other workers. Received: a process in which TensorFlow has "
            "started (a tensor, a model, a dataset's iterator, a list of logical devices). Make "
            "the strategy first, right after the imports; in a notebook, restart the kernel "
            f"before. (Rank {rank} is speaking.)"
        )


def _have_threads_to_wait_in() -> None:
    """As the launcher does, where it did not start this process: unless TensorFlow was told."""
    environment = os.environ.get("TF_NUM_INTEROP_THREADS")
    is_told = environment or tf.config.threading.get_inter_op_parallelism_threads()
    if not is_told and usable_cores() < MIN_INTEROP_THREADS:
        tf.config.threading.set_inter_op_parallelism_threads(MIN_INTEROP_THREADS)


def _workers(
    resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
) -> tuple[list[tuple[str, int]], list[str], int | None]:
    """The tasks that train, their addresses, and which of them this process is, if any."""
    if resolver is None:
        return [], [], None
    cluster = resolver.cluster_spec().as_dict()
    tasks = [(job, i) for job in ("chief", "worker") for i in range(len(cluster.get(job, ())))]
    me = (resolver.task_type, resolver.task_id) if tasks else None
    addresses = [cluster[job][i] for job, i in tasks]
    return tasks, addresses, tasks.index(me) if me in tasks else None
