"""What compression asks of a library of collectives, in two kinds of requests."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import tensorflow as tf


class Transport(Protocol):
    """The collectives of one participant: a process of Horovod, a worker of a cluster.

    All methods are called in one order on all ranks, eagerly or while a `tf.function` is traced,
    and keep that order when they run. Who implements them fuses the tensors of a list as suits its
    library.

    Attributes:
        rank: of this participant, from 0.
        world_size: how many participants there are.
    """

    rank: int
    world_size: int

    def all_reduce_sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all ranks, the same bits on each.

        Takes float16, bfloat16, float32, float64 and the integers, of any shape, empty ones
        included. A library that cannot add 16-bit floats, or slowly, may use `sum_halves`.
        """

    def all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """All ranks' tensors, each `[world_size, *shape]`; uint8, of equal shapes on all ranks."""

    def all_gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """The rows of all ranks in their order; the number of rows may differ by rank."""


@dataclass(frozen=True)
class Sum:
    """Asks for the sums of tensors over all ranks."""

    tensors: list[tf.Tensor]


@dataclass(frozen=True)
class Gather:
    """Asks for the tensors of all ranks, each `[world_size, *shape]`; their dtype is uint8."""

    tensors: list[tf.Tensor]


@dataclass(frozen=True)
class Reduction:
    """What a reduction of several tensors returns.

    Attributes:
        sums: over ranks, of each tensor.
        updates: variables and their next values, to be assigned if no rank's gradient overflowed.
        witnesses: tensors, equal on all ranks, that are finite only if what was reduced is.
    """

    sums: list[tf.Tensor]
    updates: list[tuple[tf.Variable, tf.Tensor]] = field(default_factory=list)
    witnesses: list[tf.Tensor] = field(default_factory=list)


# A reduction stops wherever it needs the other ranks: it yields a request and is sent the answer.
# So several of them can share a collective, and nothing but the driver knows a transport.
Rounds = Generator[Sum | Gather, list[tf.Tensor], Reduction]


def run_together(
    reductions: Sequence[Rounds], starts: Sequence[int], transport: Transport
) -> list[Reduction]:
    """Runs reductions through a transport, each as soon as its turn comes; returns their results.

    Requests of one turn share a collective. With `starts = [0, 1, 2]` and two rounds each::

        turn            0        1            2            3
        collectives     P0       P1 + Q0      P2 + Q1      Q2

    The first reduction is under way while the gradients of the later ones are being computed, and
    its second round costs no collective of its own.

    Args:
        reductions: not started yet.
        starts: the turn at which each begins; none is negative.
        transport: of this rank.
    """
    results: list = [None] * len(reductions)
    answers: dict[int, list | None] = {}
    turn = 0
    while answers or turn <= max(starts, default=-1):
        answers.update({i: None for i, start in enumerate(starts) if start == turn})
        requests: dict[int, Sum | Gather] = {}
        for i in sorted(answers):
            try:
                requests[i] = reductions[i].send(answers.pop(i))  # type: ignore[arg-type]
            except StopIteration as end:
                results[i] = end.value
        for kind, collective in ((Sum, transport.all_reduce_sum), (Gather, transport.all_gather)):
            of_kind = {i: request for i, request in requests.items() if type(request) is kind}
            answers.update(_answer(collective, of_kind))
        turn += 1
    return results


def _answer(collective: Callable, requests: dict[int, Sum | Gather]) -> dict[int, list]:
    tensors = [tensor for request in requests.values() for tensor in request.tensors]
    received = iter(collective(tensors) if tensors else [])
    return {i: [next(received) for _ in request.tensors] for i, request in requests.items()}


def sum_halves(
    tensor: tf.Tensor,
    world_size: int,
    all_to_all: Callable[[tf.Tensor], tf.Tensor],
    all_gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """The sum of 16-bit floats, for a library that moves their bytes but does not add them.

    Every rank adds one part in float32, and rounds it once. On the wire are the bytes of a ring
    all-reduce: `2 (N - 1) / N` times those of the tensor.

    Args:
        tensor: float16 or bfloat16.
        world_size: the number of ranks, N.
        all_to_all: uint8 `[N, bytes]` to `[N, bytes]`: row j goes to rank j, row i came from i.
        all_gather: uint8 `[bytes]` to `[N, bytes]`.
    """
    size, dtype = tf.size(tensor), tensor.dtype
    part = -(-size // world_size)
    flat = tf.pad(tf.reshape(tensor, [-1]), [[0, part * world_size - size]])
    mine = tf.bitcast(tf.reshape(flat, [world_size, part]), tf.uint8)
    received = all_to_all(tf.reshape(mine, [world_size, 2 * part]))
    parts = tf.bitcast(tf.reshape(received, [world_size, part, 2]), dtype)
    total = tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), dtype)
    gathered = all_gather(tf.reshape(tf.bitcast(total, tf.uint8), [2 * part]))
    totals = tf.bitcast(tf.reshape(gathered, [world_size * part, 2]), dtype)
    return tf.reshape(totals[:size], tf.shape(tensor))
