"""What a forward pass keeps, on the host until the backward pass: weights stay where they are."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import record


def to_host(stash: Sequence, num_activations: int, host: str) -> list:
    """The same with the first `num_activations` of its tensors on `host`."""
    with record.stop_recording(), tf.device(host):
        moved = [tf.identity(x, "offload") for x in stash[:num_activations]]
    return [*moved, *stash[num_activations:]]


def from_host(stash: Sequence, num_activations: int) -> tuple[list, list[tf.Operation]]:
    """The same on the current device, and the operations that copy it there."""
    with record.stop_recording():
        fetched = [tf.identity(x, "fetch") for x in stash[:num_activations]]
    return [*fetched, *stash[num_activations:]], [x.op for x in fetched]
