"""Data parallel over the ranks that `horovodrun` starts: one replica in each process."""

import contextlib

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.bucketing import HOROVOD_BUCKET_BYTES
from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.horovod_reductions import (
    REDUCTIONS,
    Job,
    lack_of_build,
    lack_of_job,
    slow_on_gpus,
)
from tfparallel.communication.horovod_start import ProcessSet, hvd, start
from tfparallel.communication.local_sgd import Meeting, as_meeting
from tfparallel.data_parallel.horovod import HorovodExtended
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.compressed_gradients import WorkersTransport
from tfparallel.replicas.inner import Inner, inside_of, made
from tfparallel.replicas.reporting_scope import ReportingScope
from tfparallel.segments.memory_policy import MemoryPolicy, around_inner


@checks_types
class HorovodStrategy(KerasStrategy):
    """Synchronous data parallelism over Horovod's ranks, with gradients all-reduced in a ring.

    Start the script with `horovodrun -np 4 python train.py`. Every rank runs the same script with
    the same data, computes on one GPU (that of its local rank) or on the CPU, and keeps its rows of
    every batch: the batch size of `fit` is global. Rank 0's initial values are everyone's.

    Without `horovodrun` there is one rank, and it trains as `OneDeviceStrategy` does.

    Args:
        compression: how gradients cross ranks: a compressor of `tfparallel.compression`, or its
            name ("fp16", "bf16"); None sends them as they are.
        reduction: "ring"; "hierarchical" reduces within each host first, on GPUs; "adasum"
            combines gradients by Adasum, which is not equal to one device. Both need a Horovod
            built for them, and ranks that MPI has started.
        bucket_bytes: gradients are reduced in groups of so many bytes, in the order in which the
            backward pass makes them; the first is under way while later ones are computed.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after
            it, against overflow of float16.
        sparse_as_dense: reduce gradients of embeddings as whole tables instead of rows.
        stall_timeout_s: how long ranks wait in the reduction of gradients for one that does not
            come. They then log which rank that is, and end with an error; None waits for ever.
        start_timeout_s: how long ranks that Gloo connects wait for all to start; they then end with
            an error that names who has not. None waits for ever.
        process_set: a `horovod.tensorflow.ProcessSet` to train on, instead of all ranks.
        check_weights_every: after so many steps the ranks compare a hash of their weights, and end
            with an error that names who has other ones. None compares nothing.
        memory: which activations are computed again in the backward pass, a
            `tfparallel.MemoryPolicy`; None keeps all but those of layers made in a
            `keras.RematScope`. With `inner` it is given to that.
        prefetch_batches: how many batches are read and copied to the devices before their steps
            begin; a step on a GPU would wait for its copy otherwise. None: 2 on GPUs, else 0.

    Raises:
        ImportError: if Horovod is not installed, saying how to build it.
        TypeError: for an `inner` that is no strategy of one process.
        ValueError: for a `compression` that is none, or a reduction that this Horovod does not
            offer.
        WaitedTooLong: naming the ranks that have not started.

    Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
    https://arxiv.org/abs/1802.05799
    """

    def __init__(
        self,
        compression: Meeting | str | None = None,
        *,
        reduction: str = "ring",
        bucket_bytes: int = HOROVOD_BUCKET_BYTES,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        stall_timeout_s: float | None = 300.0,
        process_set: ProcessSet | None = None,
        check_weights_every: int | None = None,
        inner: Inner | None = None,
        memory: MemoryPolicy | None = None,
        start_timeout_s: float | None = 600.0,
        prefetch_batches: int | None = None,
    ):
        kept_in_step_of = around_inner(memory, inner)
        _check_options(reduction, bucket_bytes, gradient_predivide_factor)
        _check_seconds(stall_timeout_s=stall_timeout_s, start_timeout_s=start_timeout_s)
        compressor = as_meeting(compression)
        if reduction == "adasum" and inner is not None:
            raise ValueError(
                'reduction="adasum" combines the gradients of single replicas. Received: also '
                f"inner={inner!r}. Take one or the other."
            )
        if reduction == "adasum" and (compressor is not None or gradient_predivide_factor != 1.0):
            raise ValueError(
                'reduction="adasum" combines whole gradients, whatever their scale. Received: also '
                f"compression={compression!r}, gradient_predivide_factor="
                f"{gradient_predivide_factor}. Take one or the other."
            )
        _refuse(reduction, lack_of_build(reduction, hvd.mpi_built(), bool(hvd.nccl_built())))
        start(reduction == "hierarchical", bucket_bytes, start_timeout_s)
        process_set = process_set or hvd.global_process_set
        if not process_set.included():
            raise ValueError(
                "Only the ranks of a process set may create its strategy. Received: process set of "
                f"ranks {process_set.ranks}. (Rank {hvd.rank()} is speaking.)"
            )
        job = _job(process_set)
        _refuse(reduction, lack_of_job(reduction, job))
        if hvd.rank() == 0 and (warning := slow_on_gpus(job)) is not None:
            tf.get_logger().warning(warning)
        options = {"predivide": gradient_predivide_factor, "bucket_bytes": bucket_bytes}
        is_adasum = reduction == "adasum"
        workers = HorovodExtended(
            self, process_set, is_adasum, sparse_as_dense, options, has_inner=inner is not None
        )
        workers._compress_gradients(
            compressor, WorkersTransport(workers, process_set.rank(), process_set.size())
        )
        if stall_timeout_s is not None:
            workers._watch_for_stalls(stall_timeout_s)
        workers._check_weights(check_weights_every)
        self._workers = workers
        self.inner = None if inner is None else made(inner)
        extended = workers if self.inner is None else inside_of(self, self.inner, workers)
        if inner is None or prefetch_batches is not None:
            extended._read_ahead(prefetch_batches)
        super().__init__(extended, kept_in_step_of)

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; errors within it name a rank that has ended."""
        if self.world_size == 1:
            return super().scope()
        return ReportingScope(super().scope(), self._workers._names_lost_ranks())

    @property
    def rank(self) -> int:
        """This process's number among those that train together, from 0."""
        return self.extended._id_in_cluster

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.extended._num_workers

    def compression_report(self) -> list[CompressionReport]:
        """What compression sends, for each optimizer that has trained; printed, it is a table."""
        return self._workers.compression_report()


def _check_options(reduction: str, bucket_bytes: int, predivide: float) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"Expected a reduction out of {REDUCTIONS}. Received: {reduction!r}.")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1. Received: {bucket_bytes}.")
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor must be positive. Received: {predivide}.")


def _check_seconds(**limits: float | None) -> None:
    for name, seconds in limits.items():
        if seconds is not None and seconds <= 0:
            raise ValueError(f"{name} must be positive, or None. Received: {seconds}.")


def _job(process_set: ProcessSet) -> Job:
    return Job(
        mpi_started=hvd.mpi_enabled(),
        nccl_built=bool(hvd.nccl_built()),
        on_gpu=bool(tf.config.list_physical_devices("GPU")),
        num_ranks=hvd.size(),
        num_hosts=hvd.cross_size(),
        all_ranks=process_set.size() == hvd.size(),
    )


def _refuse(reduction: str, lack: str | None) -> None:
    if lack is not None:
        raise ValueError(f'reduction="{reduction}" needs {lack}')
