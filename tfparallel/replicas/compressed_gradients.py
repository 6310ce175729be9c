"""Gradients that cross workers in compressed form: how strategies of several processes use it.

The replicas of one process add their gradients first, uncompressed. What the process has left out
so far, and all else that compression remembers, belongs to the optimizer: `tf.train.Checkpoint`
saves it with the optimizer.
"""

import weakref
from typing import Any

import tensorflow as tf

from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.gradient_compression import GradientCompression
from tfparallel.communication.compression.transport import Transport, sum_halves
from tfparallel.communication.joining import add_tensors, join, split
from tfparallel.internals import Mirrored, distribute_lib, distribute_utils
from tfparallel.replicas.across_workers import WorkersExtended
from tfparallel.replicas.optimizer_hooks import GradientSource, gradient_source

ATTRIBUTE = "gradient_compression"  # of the optimizer


class CompressedGradients(WorkersExtended):
    """`WorkersExtended` whose gradients may be compressed between workers."""

    _compressor: Compressor | None = None
    _transport: Transport
    _host_has_all_to_all = False

    def _host_all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """`[workers, ...]`: row j goes to worker j, row i came from worker i."""
        raise NotImplementedError

    def _compress_gradients(self, compressor: Compressor | None, transport: Transport) -> None:
        """Compresses from now on; called when the strategy is built."""
        self._compressor, self._transport = compressor, transport
        self._compressions: weakref.WeakSet = weakref.WeakSet()

    def _sum_gradients(self, gradients: list) -> list:
        source = gradient_source()
        if self._compressor is None or self._num_workers == 1 or source is None:
            return super()._sum_gradients(gradients)

        def merge(_: tf.distribute.Strategy, loss_scale: Any, *gradients: Any) -> list:
            return self._reduce_compressed(source, loss_scale, gradients)

        context = distribute_lib.get_replica_context()
        return context.merge_call(merge, args=(source.loss_scale(), *gradients))

    def _reduce_compressed(self, source: GradientSource, loss_scale: Any, gradients: tuple) -> list:
        with tf.device(self._devices[0]):
            local = [add_tensors(self._local_results(gradient)) for gradient in gradients]
            sums = self._compression_of(source).reduce(
                local, self._transport, source.variables, self._local_results(loss_scale)[0]
            )
        return [self._on_replicas(total) for total in sums]

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        if self._compressor is None or self._num_workers == 1 or source is None:
            return super()._sum_gradients_across_workers(gradients, source)
        with tf.device(self._devices[0]):
            return self._compression_of(source).reduce(
                gradients, self._transport, source.variables, source.loss_scale()
            )

    def _compression_of(self, source: GradientSource) -> GradientCompression:
        compression = vars(source.optimizer).get(ATTRIBUTE)
        if compression is None:
            assert self._compressor is not None
            compression = GradientCompression(self._compressor, source.all_variables())
            setattr(source.optimizer, ATTRIBUTE, compression)
        self._compressions.add(compression)
        return compression

    def compression_of(self, optimizer: Any) -> GradientCompression | None:
        """What compresses the gradients of a built optimizer; None where nothing is compressed."""
        if self._compressor is None or self._num_workers == 1:
            return None
        return self._compression_of(GradientSource(optimizer, []))

    def _on_replicas(self, total: Any) -> Any:
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, total, expand_composites=True))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    def compression_report(self) -> list[CompressionReport]:
        """One for each optimizer that has trained."""
        return [each.report(self._num_workers) for each in self._compressions]


class WorkersTransport:
    """The collectives between workers that any `WorkersExtended` has, as compression wants them.

    Payloads go through the host.
    """

    def __init__(self, extended: WorkersExtended, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self._extended = weakref.proxy(extended)

    def all_reduce_sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """In one collective for each dtype, or two."""
        # Hosts' libraries add 16-bit floats at a thirtieth of TensorFlow's speed, or not at all.
        narrow = [i for i, each in enumerate(tensors) if each.dtype in (tf.float16, tf.bfloat16)]
        wide = [i for i in range(len(tensors)) if i not in narrow]
        results: dict[int, tf.Tensor] = {}
        for chosen, sum_all in ((wide, self._sum_wide), (narrow, self._sum_narrow)):
            sums = sum_all([tensors[i] for i in chosen]) if chosen else []
            results.update(zip(chosen, sums, strict=True))
        return [results[i] for i in range(len(tensors))]

    def _sum_wide(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._extended._sum_list_across_workers(tensors)

    def _sum_narrow(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Moves bytes, and adds them in TensorFlow."""
        if self.world_size == 2:  # gathering sends the same bytes as a ring
            return self._sum_of_both(tensors)
        if not self._extended._host_has_all_to_all:
            return self._sum_wide(tensors)
        sums: list = [None] * len(tensors)
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            chosen = [i for i, each in enumerate(tensors) if each.dtype == dtype]
            total = sum_halves(
                join([tensors[i] for i in chosen]),
                self.world_size,
                self._extended._host_all_to_all,
                lambda part: self.all_gather([part])[0],
            )
            own = split(total, [tensors[i].shape for i in chosen])
            for i, part in zip(chosen, own, strict=True):
                sums[i] = part
        return sums

    def _sum_of_both(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        payloads = [tf.reshape(tf.bitcast(each, tf.uint8), [-1]) for each in tensors]
        sums = []
        for tensor, gathered in zip(tensors, self.all_gather(payloads), strict=True):
            parts = tf.reshape(gathered, [2, *tensor.shape, 2])
            first, second = tf.unstack(tf.bitcast(parts, tensor.dtype))
            sums.append(first + second)
        return sums

    def all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """In one collective."""
        if not tensors:
            return []
        flat = join(tensors)
        if self.world_size == 2:
            rows = self._gather_of_both(flat)
        else:
            rows = tf.reshape(self._extended._host_gather(flat), [self.world_size, flat.shape[0]])
        parts = tf.split(rows, [each.shape.num_elements() for each in tensors], axis=1)
        return [
            tf.reshape(part, [self.world_size, *each.shape])
            for part, each in zip(parts, tensors, strict=True)
        ]

    def _gather_of_both(self, own: tf.Tensor) -> tf.Tensor:
        """`[2, bytes]`: one's own bits taken from the sum of both ranks' bits leave the other's.

        As many bytes travel as in an all-gather; but in Gloo's, a rank may begin to send only when
        it has received, so that a slow link takes twice as long.
        """
        size = own.shape.num_elements()
        words = tf.bitcast(tf.reshape(tf.pad(own, [[0, -size % 4]]), [-1, 4]), tf.int32)
        (total,) = self._sum_wide([words])
        other = tf.reshape(tf.bitcast(total - words, tf.uint8), [-1])[:size]
        return tf.stack([own, other] if self.rank == 0 else [other, own])

    def all_gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """In one collective."""
        return self._extended._host_gather(tensor)
