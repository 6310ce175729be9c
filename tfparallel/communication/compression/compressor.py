"""How one gradient becomes fewer bytes: the interface of every compressor."""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.communication.compression.buckets import (
    BucketReducer,
    Pipelined,
    Ranks,
    State,
)
from tfparallel.communication.compression.packing import pack_bytes, unpack_bytes
from tfparallel.communication.compression.transport import (
    Gather,
    Reduction,
    Rounds,
    Sum,
)
from tfparallel.internals.ordered_sums import sum_in_order


class Compressor(abc.ABC):
    """A way to compress tensors, without state of its own: options only.

    Attributes:
        is_linear: the sum of the ranks' payloads is the payload of the sum, so that a ring can
            all-reduce them. Other payloads are all-gathered, and each rank adds what they stand
            for: a rank then sends `N - 1` payloads instead of `2 (N - 1) / N`.
        has_error_feedback: what compression left out is added to the next gradient.
        has_branches: collectives are in branches of the graph, of which one runs.
    """

    is_linear = False
    has_error_feedback = False
    has_branches = False

    def applies_to(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is compressed; the others are sent as they are."""
        return len(shape) >= 2 and 0 not in shape

    @property
    def sends_sums(self) -> bool:
        """Whether ranks send by all-reduce, around a ring, and not by all-gather."""
        return self.is_linear

    def initial_state(self, shape: Sequence[int], seed: int) -> dict[str, tf.Tensor]:
        """Initial values of what one tensor's compression remembers from step to step.

        Args:
            shape: of the tensor.
            seed: differs by tensor, equal on all ranks.
        """
        del seed
        return {"residual": tf.zeros(shape)} if self.has_error_feedback else {}

    @abc.abstractmethod
    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """The payload that stands for `tensor`, and what `decompress` needs besides.

        A tensor that is not finite must give a payload that is not finite after `decompress`.
        """

    @abc.abstractmethod
    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """The tensor that a payload stands for: one rank's, or, if linear, the sum of several."""

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """The size of the payload of one rank for a tensor of this shape."""

    def reducer(
        self, buckets: Sequence[Sequence[tuple[int, ...]]], late_counts: bool
    ) -> BucketReducer:
        """What reduces the buckets of one optimizer: all alike, by default.

        Args:
            buckets: the shapes of each.
            late_counts: whether a gradient is worth as much to the optimizer if it comes late.
        """
        del buckets, late_counts
        return Pipelined(self)

    def rounds(self, tensors: Sequence[tf.Tensor], states: Sequence[State], ranks: Ranks) -> Rounds:
        """Sums tensors over all ranks.

        Args:
            tensors: float32, of static shapes, all of one bucket.
            states: of each, with the keys of `initial_state`.
            ranks: this rank among all.
        """
        corrected = [with_residual(t, s) for t, s in zip(tensors, states, strict=True)]
        compressed = [self.compress(t, s, ranks) for t, s in zip(corrected, states, strict=True)]
        payloads = [payload for payload, _ in compressed]
        contexts = [context for _, context in compressed]
        if self.is_linear:
            received = iter((yield Sum([part for payload in payloads for part in payload])))
            parts = [[next(received) for _ in payload] for payload in payloads]
            sums = [self.decompress(p, c) for p, c in zip(parts, contexts, strict=True)]
        else:
            (gathered,) = yield Gather([pack_bytes([p for payload in payloads for p in payload])])
            sums = self._sum_of_gathered(gathered, payloads, contexts, ranks)
        updates = []
        for state, tensor, payload, context in zip(
            states, corrected, payloads, contexts, strict=True
        ):
            if "residual" in state:
                left_out = tensor - self.decompress(payload, context)
                updates.append((state["residual"], left_out))
            if "counter" in state:
                updates.append((state["counter"], state["counter"] + [0, 1]))
        return Reduction(sums, updates, witnesses=sums)

    def _sum_of_gathered(
        self, gathered: tf.Tensor, payloads: list, contexts: list, ranks: Ranks
    ) -> list[tf.Tensor]:
        like = [part for payload in payloads for part in payload]
        terms: list[list[tf.Tensor]] = [[] for _ in payloads]
        for rank in range(ranks.world_size):
            parts = iter(unpack_bytes(gathered[rank], like))
            for i, payload in enumerate(payloads):
                of_rank = [next(parts) for _ in payload]
                terms[i].append(self.decompress(of_rank, contexts[i]))
        return [sum_in_order(each) for each in terms]


def with_residual(tensor: tf.Tensor, state: Mapping[str, tf.Variable]) -> tf.Tensor:
    """`tensor` and what was left out of those before it."""
    return tensor + state["residual"] if "residual" in state else tensor


def poison_of(tensor: tf.Tensor) -> tf.Tensor:
    """0, or NaN if any value of `tensor` is not finite; one pass over the values."""
    return 0.0 * tf.reduce_sum(tensor)


def num_elements(shape: Sequence[int]) -> int:
    """The product of `shape`."""
    return math.prod(shape)
