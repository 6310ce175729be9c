"""Horovod's collectives, for any dtype.

Horovod knows neither bfloat16 nor most integers: they travel as a dtype that holds their sums, or,
where nothing is summed, as bytes.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.carried_dtypes import summed_by
from tfparallel.communication.horovod_start import ProcessSet, hvd
from tfparallel.communication.kept_collectives import hidden
from tfparallel.internals import ResourceVariable
from tfparallel.internals.keras_integers import has_gpu

__all__ = [
    "HorovodCollectives",
    "all_gather",
    "all_gather_each",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
]

_SUMMED_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}
_SCATTERED_AS = {**_SUMMED_AS, tf.int8: tf.int32, tf.uint8: tf.int32}
_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of the last one in a graph
_SENT_AS_THEY_ARE = {tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.uint8}


def all_reduce_sum(
    tensors: list[tf.Tensor], process_set: object, predivide: float = 1.0, adasum: bool = False
) -> list[tf.Tensor]:
    """Sums over ranks of tensors of one dtype, reduced together.

    Args:
        tensors: of the same shapes on every rank, in the same order.
        process_set: the ranks.
        predivide: every rank divides by it before the sum and multiplies after it, so that sums in
            float16 do not overflow.
        adasum: combine by Adasum instead of the sum.
    """
    dtype = tensors[0].dtype
    sent = [hidden(tf.cast(tensor, _SUMMED_AS.get(dtype, dtype))) for tensor in tensors]
    op = hvd.Adasum if adasum else hvd.Sum
    options: dict[str, Any] = {"op": op, "process_set": process_set}
    if predivide != 1.0 and not adasum:
        options |= {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide}
    if len(sent) == 1 or adasum:
        reduced = [hvd.allreduce(each, **options, **_named()) for each in sent]
    else:
        reduced = hvd.grouped_allreduce(sent, **options, **_named())
    return [
        tf.ensure_shape(tf.cast(each, dtype), tensor.shape)
        for each, tensor in zip(reduced, tensors, strict=True)
    ]


def all_gather(rows: tf.Tensor, process_set: object) -> tf.Tensor:
    """The rows, `[rows, ...]`, of all ranks in their order; only their number may differ."""
    sent, shape = hidden(_as_bytes(rows)), [None, *rows.shape[1:]]
    gathered = hvd.allgather(sent, process_set=process_set, **_named())
    return tf.ensure_shape(_from_bytes(gathered, rows.dtype), shape)


def all_gather_each(parts: Sequence[tf.Tensor], process_set: ProcessSet) -> list[tf.Tensor]:
    """Of each `[length]`, as long on every rank, all ranks' one after the other, together."""
    sent = [hidden(_as_bytes(part)) for part in parts]
    gathered = hvd.grouped_allgather(sent, process_set=process_set, **_named())
    lengths = [part.shape[0] * process_set.size() for part in parts]
    return [
        tf.ensure_shape(_from_bytes(each, part.dtype), [length])
        for each, part, length in zip(gathered, parts, lengths, strict=True)
    ]


def reduce_scatter(rows: tf.Tensor, process_set: ProcessSet, is_by_nccl: bool = False) -> tf.Tensor:
    """This rank's row of the sum of all ranks' `[ranks, length]`.

    Gloo's own halves what is exchanged, as often as there are halves. Of more than two ranks some
    end with another's row then, and send it once more: of `N = 2^k` ranks `N - 2^ceil(k/2)`, so
    that 4 send 7/6 of the least and 8 15/14; 3, by count, 5/4. Sums of what Gloo exchanges do not.
    """
    summed_as = _SCATTERED_AS.get(rows.dtype, rows.dtype)
    if process_set.size() > 2 and not (is_by_nccl or hvd.mpi_enabled()):
        own = tf.reduce_sum(tf.cast(all_to_all(rows, process_set), summed_as), 0)
    else:
        sent = hidden(tf.cast(rows, summed_as))
        own = hvd.reducescatter(sent, op=hvd.Sum, process_set=process_set, **_named())
    own = tf.reshape(tf.cast(own, rows.dtype), tf.shape(rows)[1:])
    return tf.ensure_shape(own, rows.shape[1:])


def all_to_all(rows: tf.Tensor, process_set: object) -> tf.Tensor:
    """`[ranks, ...]`: row j goes to rank j, row i came from rank i."""
    sent = hidden(_as_bytes(rows))
    received = hvd.alltoall(sent, process_set=process_set, **_named())
    return tf.ensure_shape(_from_bytes(received, rows.dtype), rows.shape)


def broadcast(tensor: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """The tensor of the first rank of `process_set`, on every rank."""
    root = process_set.ranks[0] if process_set.ranks else 0
    sent = hidden(_as_bytes(tensor))
    received = hvd.broadcast(sent, root_rank=root, process_set=process_set, **_named())
    return tf.ensure_shape(_from_bytes(received, tensor.dtype), tensor.shape)


def _named() -> dict[str, object]:
    """Options that give a collective the same name on all ranks, which Horovod matches them by.

    Horovod takes the name of the tensor's operation. But graphs differ between ranks, where one has
    no rows, say. Ranks do trace collectives in the same order, in functions nested equally deep.
    """
    if tf.executing_eagerly():
        return {}  # Horovod counts them
    graph = tf.compat.v1.get_default_graph()
    number = _numbers[graph] = _numbers.get(graph, -1) + 1
    depth, outer = 0, getattr(graph, "outer_graph", None)
    while outer is not None:
        depth, outer = depth + 1, getattr(outer, "outer_graph", None)
    return {"name": f"tfparallel_{depth}_{number}", "ignore_name_scope": True}


def _as_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype in _SENT_AS_THEY_ARE:
        return tensor
    # Bytes are a last axis of their own, where the dtype has several.
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tf.bitcast(tensor, tf.uint8)


def _from_bytes(received: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype in _SENT_AS_THEY_ARE:
        return received
    return tf.cast(received, dtype) if dtype == tf.bool else tf.bitcast(received, dtype)


class HorovodCollectives:
    """`Collectives` of the ranks of a process set, one after the other.

    Nothing else keeps those of two iterations of a `tf.while_loop` apart, which have one name, nor
    those of branches. Gradients are: those of an iteration need the weights of the one before.

    Args:
        process_set: the ranks.
        device: of this rank, where tensors are sent.
        order: of other collectives of this rank, to be in one order with them; None: of its own.
    """

    def __init__(self, process_set: ProcessSet, device: str, order: ResourceVariable | None = None):
        self.size, self.index = process_set.size(), process_set.rank()
        self._process_set, self._device = process_set, device
        self._waits_for_last = True
        if order is None:
            with tf.init_scope(), tf.device(device):
                # Not `tf.Variable`: under a strategy's scope it would be replicated.
                order = ResourceVariable(0.0)
        self.order = order

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_reduce`."""

        def add_up(sent: tf.Tensor) -> tf.Tensor:
            return all_reduce_sum([tf.identity(sent)], self._process_set)[0]

        known = () if tensor.dtype.is_complex else (tensor.dtype,)
        return self._one(lambda: summed_by(add_up, tensor, known))

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.reduce_scatter`."""
        if rows.dtype.is_complex:
            return self.all_reduce(rows)[self.index]
        is_by_nccl = bool(hvd.nccl_built()) and has_gpu([self._device])
        return self._one(lambda: reduce_scatter(tf.identity(rows), self._process_set, is_by_nccl))

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_gather`."""
        return self._one(lambda: all_gather(rows, self._process_set))

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Collectives.all_gather_each`, in one collective."""
        with self._in_order() as sent:
            sent += all_gather_each([tf.identity(part) for part in parts], self._process_set)
        return sent

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """As `Collectives.all_to_all`."""
        return self._one(lambda: all_to_all(rows, self._process_set))

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As `Collectives.broadcast`."""
        return self._one(lambda: broadcast(tensor, self._process_set))

    def sum_of(self, tensor: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """As `LeftOutIfUnread.sum_of`."""
        with self._unordered(unordered):
            return self.all_reduce(tensor)

    def gather_rows(self, rows: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """As `LeftOutIfUnread.gather_rows`."""
        with self._unordered(unordered):
            return self.all_gather(rows)

    @contextlib.contextmanager
    def _unordered(self, number: tf.Tensor | None) -> Iterator[None]:
        """Of two steps, the second's collectives wait for the first's: they have the same names."""
        if number is None:
            yield
            return
        with self.at_once_if(True), tf.control_dependencies([number]):
            yield

    def _one(self, collective: Callable[[], tf.Tensor]) -> tf.Tensor:
        with self._in_order() as sent:
            sent.append(collective())
        return sent[0]

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[list[tf.Tensor]]:
        """Puts a collective, which the caller appends to the list, after the one before."""
        collectives: list[tf.Tensor] = []
        if not self._waits_for_last:
            with tf.device(self._device):
                yield collectives
            return
        with tf.device(self.order.device):
            begun = self.order.assign_add(1.0)
        with tf.device(self._device), tf.control_dependencies([begun]):
            yield collectives
            done = [hidden(each) for each in collectives]
        with tf.device(self.order.device), tf.control_dependencies(done):
            self.order.assign_add(1.0)

    @contextlib.contextmanager
    def at_once_if(self, at_once: bool) -> Iterator[None]:
        """Collectives traced in it reach Horovod when what they send is there, as gradients may.

        Horovod has agreed on the next one then when the last is done.
        """
        self._waits_for_last = not at_once
        try:
            yield
        finally:
            self._waits_for_last = True
