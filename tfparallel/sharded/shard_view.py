"""Inside an optimizer's update a replica sees its shards only; everywhere else whole variables."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

_thread = threading.local()


class GlobalNumbers:
    """What an update has to know of the shards of other replicas, computed before it.

    It is used in branches (accumulation, loss scaling), in which replicas cannot meet.

    Attributes:
        squares: for each gradient the sum of its squares over all shards; None where the replica
            has the whole gradient. None as a whole where nothing is clipped by norm.
        is_finite: whether all gradients are finite on all replicas; None where nobody asks.
    """

    def __init__(
        self, squares: Sequence[tf.Tensor | None] | None, is_finite: tf.Tensor | None
    ) -> None:
        self.squares, self.is_finite = squares, is_finite


def current_numbers() -> GlobalNumbers | None:
    """The numbers of the update that the calling replica thread is in, if it is in one."""
    return getattr(_thread, "numbers", None)


@contextlib.contextmanager
def shard_view(numbers: GlobalNumbers) -> Iterator[None]:
    """Within it, sharded variables of the calling replica thread are its own shards."""
    _thread.numbers = numbers
    try:
        yield
    finally:
        _thread.numbers = None
