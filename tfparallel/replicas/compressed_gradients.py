"""Gradients that cross workers in compressed form: how strategies of several processes use it.

The replicas of one process add their gradients first, uncompressed. What the process has left out
so far, and all else that compression remembers, belongs to the optimizer: `tf.train.Checkpoint`
saves it with the optimizer.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.communication.compression.compression_report import CompressionReport
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.gradient_compression import GradientCompression
from tfparallel.communication.compression.transport import Transport, sum_halves
from tfparallel.communication.joining import add_tensors, join, split
from tfparallel.communication.local_sgd import LocalSGD, Meeting
from tfparallel.internals import (
    BaseOptimizer,
    Mirrored,
    TrainerCall,
    distribute_lib,
    distribute_utils,
)
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.across_workers import WorkersExtended
from tfparallel.replicas.batch import Batch
from tfparallel.replicas.local_rounds import LocalRounds, scaled
from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.optimizer_hooks import GradientSource, gradient_source
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.variables import mark_statistics, statistics_of

ATTRIBUTE = "gradient_compression"  # of the optimizer


class CompressedGradients(WorkersExtended):
    """`WorkersExtended` whose gradients may be compressed between workers."""

    _compressor: Compressor | None = None
    _local_sgd: LocalSGD | None = None
    _transport: Transport
    _host_has_all_to_all = False
    _step_to_count: tuple[BaseOptimizer, tf.Tensor] | None = None  # of the step that is traced
    _has_round_ended: tf.Tensor | bool = False
    _statistics: Sequence[tf.Variable] = ()  # of the model that trains

    def _compress_gradients(self, meeting: Meeting | None, transport: Transport) -> None:
        """Compresses from now on; called when the strategy is built."""
        self._transport = transport
        self._compressions: weakref.WeakSet = weakref.WeakSet()
        if not isinstance(meeting, LocalSGD):
            self._compressor = meeting
        elif self._num_workers > 1:
            meeting.tensorflow_may_start()
            self._local_sgd = meeting

    def _sum_gradients(self, gradients: list) -> list:
        source = gradient_source()
        if self._local_sgd is not None and source is not None:
            return self._mean_here(source, gradients)
        if self._compressor is None or self._num_workers == 1 or source is None:
            return super()._sum_gradients(gradients)

        def merge(_: tf.distribute.Strategy, loss_scale: object, *gradients: object) -> list:
            return self._reduce_compressed(source, loss_scale, gradients)

        context = distribute_lib.get_replica_context()
        return context.merge_call(merge, args=(source.loss_scale(), *gradients))

    def _reduce_compressed(
        self, source: GradientSource, loss_scale: object, gradients: tuple
    ) -> list:
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
            compression = GradientCompression(
                self._compressor, source.all_variables(), late_counts=source.late_counts()
            )
            setattr(source.optimizer, ATTRIBUTE, compression)
        self._compressions.add(compression)
        return compression

    def compression_of(self, optimizer: BaseOptimizer) -> GradientCompression | LocalRounds | None:
        """What compresses the gradients of a built optimizer; None where nothing is compressed."""
        if self._local_sgd is not None:
            return self._rounds_of(optimizer)
        if self._compressor is None or self._num_workers == 1:
            return None
        return self._compression_of(GradientSource(optimizer, []))

    def _on_replicas(self, total: object) -> object:
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, total, expand_composites=True))
        return distribute_utils.regroup(tuple(copies), wrap_class=Mirrored)

    # ---- rounds of local steps -------------------------------------------------------------------

    def _mean_here(self, source: GradientSource, gradients: list) -> list:
        """Gradients of the mean loss over the rows of this worker, from weighted ones."""

        def merge(_: tf.distribute.Strategy, weight: object, *gradients: object) -> list:
            own = sum_in_order(self._local_results(weight))
            self._step_to_count = source.optimizer, own
            inverse = tf.math.divide_no_nan(tf.ones_like(own), own)
            local = [add_tensors(self._local_results(gradient)) for gradient in gradients]
            return [self._on_replicas(scaled(gradient, inverse)) for gradient in local]

        step = current_replica_step()
        share = tf.constant(1 / self._num_replicas_in_sync, tf.float64)
        context = distribute_lib.get_replica_context()
        return context.merge_call(merge, args=(share if step is None else step.weight, *gradients))

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._statistics = statistics_of(model)
        with super()._step_of(model):
            yield

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        updated = super()._apply_reduced(apply, gradients, variables)
        if self._local_sgd is not None:
            distribute_lib.get_replica_context().merge_call(self._count_step)
        return updated

    def _count_step(self, _: tf.distribute.Strategy) -> None:
        if self._step_to_count is not None:
            optimizer, weight = self._step_to_count
            self._step_to_count = None
            self._has_round_ended = self._rounds_of(optimizer).count_step(weight)

    def _rounds_of(self, optimizer: BaseOptimizer) -> LocalRounds:
        rounds = vars(optimizer).get(ATTRIBUTE)
        if rounds is None:
            assert self._local_sgd is not None
            if getattr(optimizer, "use_ema", False):
                raise ValueError(
                    f"{self._local_sgd!r} averages weights, use_ema=True replaces them by another "
                    "average at the end. Received: both. Take one or the other."
                )
            rounds = LocalRounds(self._local_sgd, optimizer, self)
            setattr(optimizer, ATTRIBUTE, rounds)
        return rounds

    def _check_weights(self, every_steps: int | None) -> None:
        if every_steps is not None and self._local_sgd is not None:
            raise ValueError(
                f"Workers have weights of their own within a round of {self._local_sgd!r}. "
                f"Received: also check_weights_every={every_steps}. Leave one of them out."
            )
        super()._check_weights(every_steps)

    @property
    def _meets_every_step(self) -> bool:
        return self._local_sgd is None

    def _mean_statistics(
        self, firsts: list[tf.Tensor], shares: list[tf.Tensor], batch: Batch
    ) -> list[tf.Tensor]:
        if self._local_sgd is None:
            return super()._mean_statistics(firsts, shares, batch)
        own, ended, self._has_round_ended = (
            sum_in_order(batch.weights),
            self._has_round_ended,
            False,
        )
        return tf.cond(
            tf.less(batch.total, self._num_replicas_in_sync),  # a worker without rows has no mean
            lambda: self._sum_list_across_workers(shares),
            lambda: tf.cond(
                tf.convert_to_tensor(ended),  # with means of all workers, the same bits on each
                lambda: firsts,
                lambda: [share / tf.cast(own, share.dtype) for share in shares],
            ),
        )

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        if self._local_sgd is not None and call.model.built:
            mark_statistics(call.model)
            self._statistics = statistics_of(call.model)  # backups are restored before a step
        return super()._keras_dataset(dataset, call)

    @contextlib.contextmanager
    def _around_epoch(self, call: TrainerCall) -> Iterator[None]:
        with super()._around_epoch(call):
            if call.method != "fit":
                self._end_rounds(call.model)
            yield
            self._end_rounds(call.model)

    def _end_rounds(self, model: keras.Model) -> None:
        for optimizer in optimizers_of(model):
            rounds = vars(optimizer).get(ATTRIBUTE)
            if isinstance(rounds, LocalRounds):  # a compressor has none
                rounds.end_now()

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
        """In one collective for each dtype, or two; between two ranks in one, if any is of 16 bits.

        Nobody waits for anybody where no tensor has numbers, as is known when they are there.
        """
        # Hosts' libraries add 16-bit floats at a thirtieth of TensorFlow's speed, or not at all.
        narrow = [i for i, each in enumerate(tensors) if each.dtype in (tf.float16, tf.bfloat16)]
        wide = [i for i in range(len(tensors)) if i not in narrow]

        def one_by_one(sum_narrow: Callable = list) -> list[tf.Tensor]:
            sums: dict[int, tf.Tensor] = {}
            for chosen, add_up in ((wide, self._sum_wide), (narrow, sum_narrow)):
                own = [tensors[i] for i in chosen]
                sums.update(zip(chosen, add_up(own) if own else [], strict=True))
            return [sums[i] for i in range(len(tensors))]

        if not narrow:
            return self._sum_wide(tensors)
        if self.world_size != 2:
            return one_by_one(self._sum_narrow)
        narrow_ones = [tensors[i] for i in narrow]
        return _if_any_numbers(narrow_ones, lambda: self._sum_of_both(tensors), one_by_one)

    def _sum_wide(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        def sums() -> list[tf.Tensor]:
            return self._extended._sum_list_between_hosts(tensors)

        return _if_any_numbers(tensors, sums, lambda: list(map(tf.identity, tensors)))

    def _sum_narrow(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Moves bytes, and adds them in TensorFlow."""
        if not self._extended._host_has_all_to_all:
            return self._sum_wide(tensors)
        sums: list = [None] * len(tensors)
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            chosen = [i for i, each in enumerate(tensors) if each.dtype == dtype]
            own = [tensors[i] for i in chosen]
            add_up = functools.partial(self._sum_halves, own)
            totals = _if_any_numbers(own, add_up, functools.partial(list, own))
            for i, total in zip(chosen, totals, strict=True):
                sums[i] = total
        return sums

    def _sum_halves(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        total = sum_halves(
            join(tensors),
            self.world_size,
            self._extended._collectives.all_to_all,
            lambda part: self.all_gather([part])[0],
        )
        return split(total, [tf.shape(each) for each in tensors])

    def _sum_of_both(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Of whatever dtypes: bytes are exchanged, as many as a sum would send."""
        own = [tf.reshape(tf.bitcast(each, tf.uint8), [-1]) for each in tensors]
        others = split(self._bytes_of_other(join(own)), [tf.shape(each) for each in own])
        sums = []
        for tensor, bytes_of_other in zip(tensors, others, strict=True):
            rows = tf.reshape(bytes_of_other, [-1, tensor.dtype.size])
            other = tf.reshape(tf.bitcast(rows, tensor.dtype), tf.shape(tensor))
            sums.append(tensor + other if self.rank == 0 else other + tensor)
        return sums

    def all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """In one collective."""
        if not tensors:
            return []
        flat = join(tensors)
        if self.world_size == 2:
            other = self._bytes_of_other(flat)
            rows = tf.stack([flat, other] if self.rank == 0 else [other, flat])
        else:
            rows = tf.reshape(self._extended._host_gather(flat), [self.world_size, flat.shape[0]])
        parts = tf.split(rows, [each.shape.num_elements() for each in tensors], axis=1)
        return [
            tf.reshape(part, [self.world_size, *each.shape])
            for part, each in zip(parts, tensors, strict=True)
        ]

    def _bytes_of_other(self, own: tf.Tensor) -> tf.Tensor:
        """`[bytes]`, as many as one's own: these taken from the sum of both leave the other's.

        As many bytes travel as in an all-gather; but in Gloo's, a rank may begin to send only when
        it has received, so that a slow link takes twice as long.
        """
        size = tf.size(own)
        words = tf.bitcast(tf.reshape(tf.pad(own, [[0, -size % 4]]), [-1, 4]), tf.int32)
        (total,) = self._extended._sum_list_between_hosts([words])
        return tf.reshape(tf.bitcast(total - words, tf.uint8), [-1])[:size]

    def all_gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """In one collective."""
        return self._extended._host_gather(tensor)


def _if_any_numbers(tensors: list[tf.Tensor], sums: Callable, otherwise: Callable) -> list:
    """`sums()`, or where no tensor has numbers `otherwise()`; a branch where shapes do not tell."""
    if all(each.shape.is_fully_defined() for each in tensors):
        return sums()
    size = tf.add_n([tf.size(each) for each in tensors])
    return tf.nest.flatten(tf.cond(size > 0, sums, otherwise))
