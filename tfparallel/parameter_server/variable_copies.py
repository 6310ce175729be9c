"""Copies of variables, each beside its variable: what training goes back to."""

import collections
from collections.abc import Callable, Iterable

import tensorflow as tf

from tfparallel.internals import UninitializedVariable
from tfparallel.internals.graphs import dtype_behind
from tfparallel.parameter_server.fence import Fence

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def changed_by(graph: tf.Graph) -> list[tf.Tensor]:
    """The handles of the variables that a function's graph may change."""
    handles = {
        id(inner): outer
        for outer, inner in graph.captures
        if outer.dtype == tf.resource and dtype_behind(outer) is not None
    }
    changed = {
        id(tensor)
        for operation in graph.get_operations()
        if operation.type not in _READS
        for tensor in operation.inputs
    }
    return [outer for inner, outer in handles.items() if inner in changed]


class VariableCopies:
    """The copies.

    Args:
        fence: guards what is done here.
    """

    def __init__(self, fence: Fence):
        self._fence = fence
        self._copies: dict[int, tuple[tf.Tensor, tf.Variable]] = {}
        self._take = self._restore = _nothing

    def cover(self, handles: Iterable[tf.Tensor]) -> bool:
        """Copies these variables from the next `take` on; returns whether any is new."""
        new = [handle for handle in handles if id(handle) not in self._copies]
        for handle in new:
            with tf.init_scope(), tf.device(handle.device):
                copy = UninitializedVariable(dtype=dtype_behind(handle), trainable=False)
            self._copies[id(handle)] = (handle, copy)
        if new:
            self._take = self._guarded(lambda handle, copy: _assign(copy, handle))
            self._restore = self._guarded(lambda handle, copy: _assign(handle, copy))
        return bool(new)

    def take(self) -> None:
        """Copies := variables."""
        self._take(self._fence.generation)

    def restore(self) -> None:
        """Variables := copies, which have been taken."""
        self._restore(self._fence.generation)

    def _guarded(self, function: Callable[[tf.Tensor, tf.Tensor], object]) -> Callable:
        """`function` of the handles of each variable and its copy, as a function of a graph."""
        places = collections.defaultdict(list)
        for handle, copy in self._copies.values():
            places[handle.device].append((handle, copy.handle))

        def guarded(generation: tf.Tensor) -> None:
            for device, handles in places.items():
                with tf.device(device):
                    for pair in handles:
                        function(*pair)
            self._fence.guard(tf.compat.v1.get_default_graph(), generation)

        return tf.function(guarded, autograph=False)


def _nothing(generation: tf.Tensor) -> None:
    del generation


def _assign(to: tf.Tensor, of: tf.Tensor) -> None:
    """Assigns one variable to another, by their handles."""
    value = tf.raw_ops.ReadVariableOp(resource=of, dtype=dtype_behind(of))
    tf.raw_ops.AssignVariableOp(resource=to, value=value)
