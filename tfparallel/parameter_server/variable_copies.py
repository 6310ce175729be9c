"""Copies of variables, each beside its variable: what training goes back to."""

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfparallel.internals import ResourceVariable
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
                copy = ResourceVariable(_read(handle), trainable=False)
            self._copies[id(handle)] = (handle, copy)
        if new:
            self._take = tf.function(self._guarded(_take), autograph=False)
            self._restore = tf.function(self._guarded(_restore), autograph=False)
        return bool(new)

    def take(self) -> None:
        """Copies := variables."""
        self._take(self._fence.generation)

    def restore(self) -> None:
        """Variables := copies."""
        self._restore(self._fence.generation)

    def _guarded(self, function: Callable[[tf.Tensor, tf.Variable], object]) -> object:
        def guarded(generation: tf.Tensor) -> None:
            for handle, copy in self._copies.values():
                with tf.device(handle.device):
                    function(handle, copy)
            self._fence.guard(tf.compat.v1.get_default_graph(), generation)

        return guarded


def _nothing(generation: tf.Tensor) -> None:
    del generation


def _take(handle: tf.Tensor, copy: tf.Variable) -> None:
    copy.assign(_read(handle), read_value=False)


def _restore(handle: tf.Tensor, copy: tf.Variable) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=copy.read_value())


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype_behind(handle))
