"""TensorFlow's own checkpoint of an iterator over a dataset."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.not_taken import is_whole, source_of
from tfparallel.internals.datasets import set_state_of_iterator, state_of_iterator

# What TensorFlow calls, in a checkpoint, how many seeds a `shuffle` has drawn.
_SEEDS_DRAWN = b"num_random_samples"


def checkpoint_of(iterator: Iterator) -> list[np.ndarray] | None:
    """The state of an iterator, or None where the dataset has none that can be saved."""
    position = _position(iterator)
    if not is_whole(iterator) or not isinstance(position, tf.data.Iterator):
        return None
    try:
        states = tf.unstack(state_of_iterator(position))
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
        tf.get_logger().info("This dataset has no checkpoint: %s", error.message)
        return None
    return [np.frombuffer(tf.io.serialize_tensor(s).numpy(), np.uint8) for s in states]


def restore(iterator: Iterator, checkpoint: list[np.ndarray]) -> None:
    """Goes on from a `checkpoint_of` an iterator over the same data; see `can_restore`."""
    parts = [tf.io.parse_tensor(part.tobytes(), tf.variant) for part in checkpoint]
    set_state_of_iterator(_position(iterator), tf.stack(parts))


def _position(iterator: Iterator) -> object:
    """What a checkpoint is of: the iterator, or the one of `tf.data` that it reads, if any."""
    source = source_of(iterator)
    return getattr(source, "position", source)


def is_of_numbers(iterator: Iterator) -> bool:
    """Whether a checkpoint is of the numbers of batches, which workers read by themselves."""
    return _position(iterator) is not source_of(iterator)


def can_restore(iterator: Iterator, state: dict[str, Any]) -> bool:
    """Whether `iterator` can be set to the checkpoint, which may be another strategy's."""
    position = _position(iterator)
    is_of_same = state.get("is_of_numbers", False) == is_of_numbers(iterator)
    return state["checkpoint"] is not None and is_of_same and isinstance(position, tf.data.Iterator)


def num_seeds_drawn(checkpoint: list[np.ndarray]) -> int:
    """How often a checkpoint tells how far the seeds of a shuffle have come."""
    return sum(part.tobytes().count(_SEEDS_DRAWN) for part in checkpoint)
