"""Collectives that run on every rank, whatever TensorFlow makes of the graphs.

It knows no other rank: an operation that nobody reads is taken out, if it is not said to do
something, and one of constants is run while a graph is optimised. Other ranks wait then.
"""

import functools
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable

_names_of_true: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by graph


def hidden(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, not copied, of which TensorFlow's optimiser knows nothing.

    What gives it runs, also if nobody reads this: Horovod's operations are none that TensorFlow
    keeps for what they do; unread, as by layers of a rank that is known to have no rows, they are
    taken out, and the other ranks wait. And what takes it is not run beforehand: a collective of
    constants would be, once, and its sum used in every step. A rank's gradients are constants where
    it has no rows.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.Switch(data=tensor, pred=_true_in_graph()).output_true


def keep(tensors: Sequence[tf.Tensor], count: ResourceVariable) -> None:
    """Has the collectives that give `tensors` run, also if nobody on this rank reads them.

    Args:
        tensors: what they give.
        count: what counts them, where the tensors are, so that no host waits for a GPU.
    """
    if not tf.executing_eagerly():
        with (
            tf.device(count.device),
            tf.control_dependencies([hidden(each) for each in tensors]),
        ):
            count.assign_add(1)


def _true_in_graph() -> tf.Tensor:
    """One for all of a graph, on the host."""
    graph = tf.compat.v1.get_default_graph()
    if graph not in _names_of_true:
        # Not `read_value`, which is where the current device is. And it comes behind nothing, or
        # the host would wait for all that a GPU was given before.
        with tf.control_dependencies(None):
            _names_of_true[graph] = _true().value().name
    return graph.get_tensor_by_name(_names_of_true[graph])


@functools.cache
def _true() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(True, trainable=False)  # not replicated in a strategy's scope
