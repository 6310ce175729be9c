"""What a forward pass keeps, on the host until the backward pass."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.graphs import never_bypass


def to_host(tensors: Sequence[tf.Tensor], host: str) -> list[tf.Tensor]:
    """The same on `host`."""
    return _copies(tensors, host, "offload")


def from_host(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """The same on the current device, and the operations to wait with, until they are wanted.

    Those are on the host: TensorFlow sends what another device wants as soon as it is there, so
    that it would lie on the device while a copy there waits.
    """
    released = [copy for x in tensors for copy in _copies([x], x.device, "release")]
    with record.stop_recording():
        return [tf.identity(x, "fetch") for x in released], [x.op for x in released]


def _copies(tensors: Sequence[tf.Tensor], device: str, name: str) -> list[tf.Tensor]:
    with record.stop_recording(), tf.device(device):
        copies = [tf.identity(x, name) for x in tensors]
    for tensor in copies:
        never_bypass(tensor.op)
    return copies
