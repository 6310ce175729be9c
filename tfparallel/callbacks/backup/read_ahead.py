"""Batches that are read before the step that trains on them: so a backup can tell what is next.

Keras reads its batches inside the traced step, so nobody else sees them. Those that were taken from
its iterator here are given to the next step by an iterator of their own, of the same structure: the
step is not traced again. An iterator that is read in Python has a method `peek`: it shows its next
batches, or what stands for them, and they still come from it.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.not_taken import not_taken_of
from tfparallel.replicas.peeked_iterator import BatchOfNumber

_HASHED_BYTES = 1 << 20  # of each tensor: two batches that differ only behind them are taken as one


class ReadAhead:
    """The next batches of an iterator, which come from here and not from it any more.

    Args:
        iterator: of `tf.data`, or one that has `peek`.
        most: how many batches one step takes.
        checkpoint: where `iterator` was before, as far as it is known.

    Attributes:
        not_taken: batches that `iterator` had read before that and gave to nobody.
    """

    def __init__(self, iterator: Any, most: int, checkpoint: list[np.ndarray] | None = None):
        self.checkpoint, self._from = checkpoint, iterator
        self.not_taken = not_taken_of(iterator)
        self._still_come = hasattr(iterator, "peek")
        take = iterator.peek if self._still_come else functools.partial(_taken, iterator)
        self._batches = list(take(most))
        self.hashes = [hash_of(batch) for batch in self._batches]

    def iterator(self) -> Iterator:
        """Gives the batches; of the element spec of the iterator that they were taken from."""
        if self._still_come:
            return self._from
        datasets = [tf.data.Dataset.from_tensors(batch) for batch in self._batches]
        dataset = functools.reduce(lambda one, other: one.concatenate(other), datasets)
        variant = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(variant, self._from.element_spec))


def _taken(iterator: tf.data.Iterator, most: int) -> Iterator[object]:
    for _ in range(most):
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            return
        yield batch.get_value()


def hash_of(batch: object) -> str:
    """Sixteen hexadecimal digits that differ where batches do.

    Args:
        batch: a nest of tensors; dense, sparse, ragged or optional. Of a `BatchOfNumber`, "@" and
            the number follow the hash.
    """
    if isinstance(batch, BatchOfNumber):
        return f"{hash_of(batch.first)}@{batch.number}"
    digest = hashlib.blake2b(digest_size=8)
    values = [_value(leaf) for leaf in tf.nest.flatten(batch)]
    for tensor in tf.nest.flatten(values, expand_composites=True):
        if tensor is not None and tensor.dtype != tf.variant:
            array = np.asarray(tensor)
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(_first_bytes(array))
    return digest.hexdigest()


def _value(leaf: object) -> object:
    if not isinstance(leaf, tf.experimental.Optional):
        return leaf
    return leaf.get_value() if leaf.has_value() else None


def _first_bytes(array: np.ndarray) -> bytes:
    if array.dtype == object:  # of text
        return b"\0".join(array.reshape(-1).tolist())[:_HASHED_BYTES]
    rows = array.reshape(-1)[: max(1, _HASHED_BYTES // array.itemsize)]
    return np.ascontiguousarray(rows).tobytes()


def differ(expected: Sequence[str], received: Sequence[str]) -> bool:
    """Whether hashes of batches differ: as far as both are known, and whether there is any.

    Those of whole batches cannot be compared with those of a first batch and a number.
    """
    if len({"@" in each for each in (*expected, *received)}) > 1:
        return False
    together = min(len(expected), len(received))
    return bool(expected) != bool(received) or expected[:together] != received[:together]
