"""Collectives that run on every rank, whatever TensorFlow makes of the graphs.

It knows no other rank: an operation that nobody reads is taken out, if it is not said to do
something, and one of constants is run while a graph is optimised. Other ranks wait then.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable


def unknown(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, not copied, that TensorFlow cannot know while it optimises a graph.

    It would run a collective of constants by itself then, once, and use that sum in every step. A
    rank's gradients are constants where it has no rows.
    """
    if tf.executing_eagerly():
        return tensor
    # `value` is where the variable is, as `pred`: on the host. `read_value` is where `tensor` is.
    # And it comes behind nothing, or the host would wait for all that a GPU was given before.
    with tf.control_dependencies(None):
        known = _true().value()
    return tf.raw_ops.Switch(data=tensor, pred=known).output_true


def runs_anyway(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, not copied; the collective that gives it runs, also if nobody reads it.

    Horovod's operations are none that TensorFlow keeps for what they do: unread, as by layers of a
    rank that is known to have no rows, they are taken out, and the other ranks wait.
    """
    return unknown(tensor)


def keep(tensors: Sequence[tf.Tensor], count: ResourceVariable) -> None:
    """Has the collectives that give `tensors` run, also if nobody on this rank reads them.

    Args:
        tensors: what they give.
        count: what counts them, where the tensors are, so that no host waits for a GPU.
    """
    if not tf.executing_eagerly():
        with (
            tf.device(count.device),
            tf.control_dependencies([runs_anyway(each) for each in tensors]),
        ):
            count.assign_add(1)


@functools.cache
def _true() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(True, trainable=False)  # not replicated in a strategy's scope
