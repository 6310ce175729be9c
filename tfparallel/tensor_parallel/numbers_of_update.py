"""What the updates of all parts read alike is sent to each device once.

An optimizer reads its learning rate, and the number of the step, for every variable anew. For parts
on another device each of these reads would be a message:

    device 0    learning rate --.--> update        one message, for all parts there
                                |
    device 1                    '--> update, update, update
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfparallel.replicas.variables import ReplicatedVariable

_thread = threading.local()


@contextlib.contextmanager
def numbers_sent_once() -> Iterator[None]:
    """Around an update of the calling replica."""
    _thread.sent = {}
    try:
        yield
    finally:
        _thread.sent = None


@contextlib.contextmanager
def update_on(device: str) -> Iterator[None]:
    """Within it, parts on `device` are updated."""
    _thread.device = device
    try:
        with tf.device(device):
            yield
    finally:
        _thread.device = None


class NumberOfUpdate(ReplicatedVariable):
    """A variable of which updates of parts read a copy on the part's device, if it is a number."""

    def _get(self) -> tf.Tensor:
        sent = self._sent()
        return super()._get() if sent is None else sent

    def value(self) -> tf.Tensor:
        sent = self._sent()
        return super().value() if sent is None else sent

    def read_value(self) -> tf.Tensor:
        sent = self._sent()
        return super().read_value() if sent is None else sent

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        sent = self._sent()
        if sent is not None:
            return tf.convert_to_tensor(sent, dtype, name=name)
        return super()._dense_var_to_tensor(dtype, name, as_ref)

    def _sent(self) -> tf.Tensor | None:
        """The copy that was sent to the device of the part that is updated; None elsewhere."""
        sent, device = getattr(_thread, "sent", None), getattr(_thread, "device", None)
        if sent is None or device is None or self.shape.rank != 0 or tf.executing_eagerly():
            return None
        key = (id(self), device, id(tf.compat.v1.get_default_graph()))  # a branch has its own
        if key not in sent:
            sent[key] = tf.identity(super()._get())
        return sent[key]

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> object:
        sent = getattr(_thread, "sent", None) or {}
        for key in [key for key in sent if key[0] == id(self)]:
            del sent[key]
        return super()._update_replica(update_fn, value, **kwargs)
