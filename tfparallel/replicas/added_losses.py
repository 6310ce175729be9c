"""The losses that layers add in a forward pass (`add_loss`, activity regularizers), by replica.

A layer keeps them in a list, and replicas share the layer. At a collective, in synchronised
BatchNorm or in a loss, one replica's thread waits while the next computes its forward pass: reading
the list then, the first would find the losses of the last.
"""

import contextlib
import threading
from collections.abc import Iterator, MutableSequence

import keras
import tensorflow as tf

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import layers_of


@contextlib.contextmanager
def added_losses_by_replica(model: keras.Model) -> Iterator[None]:
    """Within it, each thread has its own list of the losses that `model`'s layers add."""
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            hooks.enter_context(
                shadowed(
                    layer,
                    "_losses",
                    _ByThread(),
                    during="a step on replicas",
                    why="Replicas share a layer, and each has its own losses that it added.",
                )
            )
        yield


class _ByThread(MutableSequence):
    """A list for each thread, empty at first."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def _own(self) -> list:
        return vars(self._thread).setdefault("losses", [])

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: int | slice) -> tf.Tensor:
        return self._own[index]

    def __setitem__(self, index: int | slice, loss: tf.Tensor) -> None:
        self._own[index] = loss

    def __delitem__(self, index: int | slice) -> None:
        del self._own[index]

    def insert(self, index: int, loss: object) -> None:
        """As a list does."""
        self._own.insert(index, loss)
