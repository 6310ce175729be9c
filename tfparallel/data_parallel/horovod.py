"""One replica in each process that Horovod has started."""

import contextlib
import os
import socket
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import keras
import tensorflow as tf

from tfparallel.communication.horovod_all_reduce import HorovodAllReduce
from tfparallel.communication.horovod_collectives import HorovodCollectives, broadcast
from tfparallel.communication.horovod_start import ProcessSet, hvd
from tfparallel.communication.kept_collectives import hidden
from tfparallel.communication.link_times import LinkTimes
from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.lost_ranks import names_lost_ranks
from tfparallel.coordination.printed_lines import without_lines
from tfparallel.coordination.stall_watch import StalledError, StallWatch
from tfparallel.coordination.tcp_store import StoreServer, TcpStore
from tfparallel.data_parallel.gpu_of_rank import check_no_gpu_is_shared, device_of_rank
from tfparallel.internals import (
    CollectiveAllReduceExtended,
    ReduceOp,
    ResourceVariable,
    TrainerCall,
)
from tfparallel.internals.keras_integers import has_gpu
from tfparallel.replicas.compressed_gradients import CompressedGradients
from tfparallel.replicas.local_copies import first_copy
from tfparallel.replicas.optimizer_hooks import GradientSource, gradient_source
from tfparallel.replicas.replica_step import current_replica_step

_SHUTDOWN_TIMEOUT_S = 5.0
_GLOO_TIMEOUT_S = 30.0  # Gloo's default (gloo/context.cc)


class HorovodExtended(CompressedGradients, CollectiveAllReduceExtended):
    """One local replica; everything that crosses ranks goes through Horovod."""

    _host_has_all_to_all = True
    _places_batches = True
    _collectives: HorovodCollectives

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        process_set: ProcessSet,
        adasum: bool,
        sparse_as_dense: bool,
        options: dict,
        has_inner: bool = False,
    ):
        device = device_of_rank(hvd.local_rank(), hvd.local_size(), has_inner)
        communication = tf.distribute.experimental.CommunicationOptions()
        with without_lines("Collective ops is not configured"):  # Horovod reduces instead
            super().__init__(strategy, None, communication, devices=(device,))
        self._process_set = process_set
        self._collectives = HorovodCollectives(process_set, self._host_device)
        self._has_nccl = bool(hvd.nccl_built()) and has_gpu([device])
        self._on_device = HorovodCollectives(process_set, device)
        with tf.init_scope(), tf.device(device):  # where the host waits for nothing to count
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._begun, self._ended = (ResourceVariable(0, dtype=tf.int64) for _ in range(2))
        self._broadcasts = [0, 0]  # begun and ended, outside of graphs
        self._reduced: list[str] = []  # paths of the variables whose gradients met last
        self._adasum, self._sparse_as_dense = adasum, sparse_as_dense
        self._num_workers, self._id_in_cluster = process_set.size(), process_set.rank()
        self._is_chief = self._id_in_cluster == 0
        common = {
            "process_set": process_set,
            "device": device,
            "group_size": self._num_workers,
            "options": communication,
            "collective_keys": self._collective_keys,
        }
        self._host_cross_device_ops = HorovodAllReduce(devices=[self._host_device], **common)
        self._cross_device_ops = HorovodAllReduce(devices=[device], **common)
        self._gradient_all_reduce = HorovodAllReduce(
            devices=[device], adasum=adasum, **options, **common
        )
        if self._num_workers > 1:
            self._agreement = self._open_agreement()
            check_no_gpu_is_shared(self._agreement)
            self._agree_on_seed()

    def _open_agreement(self) -> Agreement:
        """Rank 0 keeps what ranks agree on, and tells the others where."""
        address = ""
        if self._is_chief:
            host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
            server = StoreServer(host)
            weakref.finalize(self, server.close)
            address = f"{host} {server.port} {server.token}"
        encoded = tf.io.decode_raw(tf.constant(address.ljust(512)), tf.uint8)
        encoded = broadcast(encoded, self._process_set)
        host, port, token = bytes(encoded.numpy()).decode().split()
        rank = self._id_in_cluster
        store = TcpStore(host, int(port), token, rank, _answer_s())
        return Agreement(store, "horovod", rank, self._num_workers)

    def _watch_for_stalls(self, timeout_s: float) -> None:
        if self._num_workers == 1:
            return
        counts, reduced = self._counts_of_collectives(), self._reduced
        watch = StallWatch(
            cast(TcpStore, self._agreement.store),
            self._id_in_cluster,
            self._num_workers,
            counts,
            lambda: f"gradients of {', '.join(reduced[:3])}{', ...' if reduced[3:] else ''}",
            timeout_s,
            _end_stalled_job,
        )
        weakref.finalize(self, watch.stop)

    def _names_lost_ranks(self) -> contextlib.AbstractContextManager:
        return names_lost_ranks(self._agreement, "Horovod")

    def _counts_of_collectives(self) -> Callable[[], tuple[int, int]]:
        """Gives how many this rank has begun and ended; keeps nothing alive but the counters."""
        begun, ended, broadcasts = self._begun, self._ended, self._broadcasts
        orders = self._collectives.order, self._on_device.order

        def counts() -> tuple[int, int]:
            ordered = [int(order.numpy()) for order in orders]  # on before each and after it
            return (
                int(begun.numpy()) + sum((each + 1) // 2 for each in ordered) + broadcasts[0],
                int(ended.numpy()) + sum(each // 2 for each in ordered) + broadcasts[1],
            )

        return counts

    def _broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        self._broadcasts[0] += 1
        result = broadcast(tensor, self._process_set)
        self._broadcasts[1] += 1
        return result

    # ---- where variables live --------------------------------------------------------------------

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> object:
        """Rank 0's initial value, once all ranks have said that they create the same variable."""
        del replica_id, primary_var
        if self._num_workers == 1:
            return kwargs["initial_value"]

        def broadcast_there(value: tf.Tensor) -> tf.Tensor:
            with tf.device(device):
                return self._broadcast(value)

        return self._value_of_rank_zero(kwargs, broadcast_there)

    # ---- how a batch is split --------------------------------------------------------------------

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        dataset = super()._keras_dataset(dataset, call)
        if self._num_workers > 1:
            self._spread_state(call.model)
        return dataset

    @contextlib.contextmanager
    def _around_epoch(self, call: TrainerCall) -> Iterator[None]:
        with self._names_lost_ranks(), super()._around_epoch(call):
            yield

    def _spread_state(self, model: keras.Model) -> None:
        """Gives all ranks rank 0's weights and optimizer state where a rank has other ones.

        They differ where one rank alone has restored a checkpoint.
        """
        variables = [v.value for v in model.variables]
        optimizer = getattr(model, "optimizer", None) if self._meets_every_step else None
        variables += [v.value for v in optimizer.variables] if optimizer is not None else []
        variables = [v for v in {id(v): v for v in variables}.values() if self._is_held_alike(v)]
        checksum = 0
        for variable in variables:
            checksum = zlib.crc32(first_copy(variable).numpy().tobytes(), checksum)
        checksums = self._agreement.exchange("compare weights", checksum)
        if len(set(checksums)) == 1:
            return
        if self._is_chief:
            tf.get_logger().warning(
                "Ranks %s have other weights or optimizer state than rank 0: they get rank 0's.",
                [rank for rank, each in enumerate(checksums) if each != checksums[0]],
            )
        for variable in variables:
            variable.assign(self._broadcast(variable.read_value()))

    def _is_held_alike(self, variable: tf.Variable) -> bool:
        """Whether all ranks have the whole of `variable`."""
        return not getattr(variable, "has_pieces_elsewhere", False)

    def _link_times(self) -> LinkTimes:
        """Sums of gradients that nothing hides, from the last gradient to the last sum.

        What Horovod does beside the step, and what it sends, it does not tell.
        """
        return LinkTimes(self._gradient_all_reduce.exposed_s)

    # ---- how gradients meet ----------------------------------------------------------------------

    def _sum_on_gpus(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._on_device.all_reduce(tensor)

    def _sum_gradients(self, gradients: list) -> list:
        if self._num_workers == 1:
            return gradients
        if not self._meets_every_step:
            return super()._sum_gradients(gradients)
        return self._counted(gradients, gradient_source(), self._sum_across_ranks)

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        def add_up(gradients: list) -> list:
            if self._compressor is None or source is None:
                return self._reduced_in_buckets(gradients)
            return super(HorovodExtended, self)._sum_gradients_across_workers(gradients, source)

        is_trivial = self._num_workers == 1 or not gradients
        return gradients if is_trivial else self._counted(gradients, source, add_up)

    def _counted(
        self, gradients: list, source: GradientSource | None, add_up: Callable[[list], list]
    ) -> list:
        """`add_up(gradients)`, of which the watch for stalls knows."""
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        self._reduced[:] = [v.path for v in source.variables] if source is not None else []
        with tf.device(self._begun.device), tf.control_dependencies(_tensors_of(gradients)):
            self._begun.assign_add(1)
        sums = add_up(gradients)
        done = [hidden(each) for each in _tensors_of(sums)]
        with tf.device(self._ended.device), tf.control_dependencies(done):
            self._ended.assign_add(1)
        return sums

    def _sum_across_ranks(self, gradients: list) -> list:
        if self._compressor is not None:
            with self._collectives.at_once_if(not self._compressor.has_branches):
                return super()._sum_gradients(gradients)
        step = current_replica_step()
        if self._adasum and step is not None:  # it combines means over rows, not shares of them
            gradients = [tf.math.divide_no_nan(g, tf.cast(step.weight, g.dtype)) for g in gradients]
        return self._reduced_in_buckets(gradients)

    def _reduced_in_buckets(self, gradients: list) -> list:
        pairs = [(gradient, gradient) for gradient in gradients]
        sums = self._gradient_all_reduce.batch_reduce(ReduceOp.SUM, pairs)
        return [self._local_results(each)[0] for each in sums]


def _answer_s() -> float:
    """How long rank 0 may not answer: as long as a rank in Horovod's own transport Gloo."""
    return float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or _GLOO_TIMEOUT_S)


def _tensors_of(gradients: list) -> list[tf.Tensor]:
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _end_stalled_job(error: StalledError) -> None:
    """Makes what waits in Horovod fail, so that `fit` raises, or else ends the process."""
    tf.get_logger().error("%s", error)
    shutdown = threading.Thread(target=hvd.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(_SHUTDOWN_TIMEOUT_S)
    if shutdown.is_alive():
        tf.get_logger().error("Horovod does not end either. This process exits with status 1.")
        os._exit(1)
