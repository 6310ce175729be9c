"""Batches that were read ahead of their steps: a backup holds them beside the position behind them.

trained | read, and placed on devices | what the iterator gives next
        ^ where the training is       ^ where its checkpoint is
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.replicas.batches_ahead import BatchesAhead
from tfparallel.replicas.placed_batch import packed, tensor_specs


def source_of(iterator: Iterator) -> Iterator:
    """What batches are read from, which may be ahead of what `iterator` has given."""
    return iterator.source if isinstance(iterator, BatchesAhead) else iterator


def is_whole(iterator: Iterator) -> bool:
    """Whether all that was read ahead can be given; waits for what is being read."""
    return not isinstance(iterator, BatchesAhead) or iterator.is_whole()


def not_taken_of(iterator: Iterator) -> list[list[np.ndarray]] | None:
    """The tensors of each batch that was read and not given; None where nothing reads ahead."""
    if not isinstance(iterator, BatchesAhead):
        return None
    return [[_bytes_of(leaf) for leaf in _leaves(batch)] for batch in iterator.not_taken()]


def begun_with(iterator: Any, batches: Sequence[Sequence[np.ndarray]], num_taken: int) -> Iterator:
    """An iterator that gives `batches` first, then those of `iterator`.

    Args:
        iterator: set behind `batches`, where there are some.
        batches: of a backup, as `not_taken_of` told them.
        num_taken: how many batches of the pass are trained on.

    Raises:
        BackupError: if they have other tensors than the dataset.
    """
    if not isinstance(iterator, BatchesAhead):
        if not batches:
            return iterator
        iterator = BatchesAhead(iterator, lambda batch: batch, 0)  # not ahead any more
    given = [_batch(tensors, iterator.source.element_spec) for tensors in batches]
    iterator.skip(num_taken + len(batches))
    iterator.begin_with(given)
    return iterator


def _batch(tensors: Sequence[np.ndarray], element_spec: object) -> object:
    specs = tensor_specs(element_spec)
    try:
        pairs = zip(tensors, specs, strict=True)
        parsed = [tf.io.parse_tensor(each.tobytes(), spec.dtype) for each, spec in pairs]
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        raise BackupError(
            f"A training goes on with the data of its backup. Expected: {len(tensors)} tensors a "
            f"batch, of its types. Received: a dataset of {element_spec}. Put back what it was."
        ) from error
    return packed(element_spec, parsed)


def _leaves(batch: object) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def _bytes_of(tensor: tf.Tensor) -> np.ndarray:
    return np.frombuffer(tf.io.serialize_tensor(tensor).numpy(), np.uint8)
