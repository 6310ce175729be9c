"""Copies of variables, on the servers that have these: what training goes back to.

A server keeps the values of its variables as a few tensors, each an optional of many components: an
operation to trace for all of these, where variables of their own would take two for each.
"""

import collections
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfparallel.internals import UninitializedVariable
from tfparallel.internals.graphs import dtype_behind
from tfparallel.parameter_server.fence import Fence
from tfparallel.segments.stash import optionals_for

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def changed_by(graph: tf.Graph) -> list[tf.Tensor]:
    """The handles of the variables that a function's graph may change."""
    return [
        outer
        for outer, inner in graph.captures
        if outer.dtype == tf.resource
        and dtype_behind(outer) is not None
        and any(operation.type not in _READS for operation in inner.consumers())
    ]


class VariableCopies:
    """The copies.

    Args:
        fence: guards what is done here.
    """

    def __init__(self, fence: Fence):
        self._fence = fence
        self._covered: dict[int, tf.Tensor] = {}
        self._take = self._restore = _nothing

    def cover(self, handles: Iterable[tf.Tensor]) -> bool:
        """Copies these variables from the next `take` on; returns whether any is new."""
        new = {id(handle): handle for handle in handles if id(handle) not in self._covered}
        self._covered |= new
        if new:
            kept = self._kept_by_servers()
            self._take, self._restore = self._guarded(_keep, kept), self._guarded(_put_back, kept)
        return bool(new)

    def take(self) -> None:
        """Copies := variables."""
        self._take(self._fence.generation)

    def restore(self) -> None:
        """Variables := copies, which have been taken."""
        self._restore(self._fence.generation)

    def _kept_by_servers(self) -> list[tuple[tf.Variable, list[tf.Tensor]]]:
        """On each server what copies are kept in, and the handles of their variables."""
        handles = collections.defaultdict(list)
        for handle in self._covered.values():
            handles[handle.device].append(handle)
        kept = []
        for device, own in handles.items():
            for held in optionals_for(len(own)):
                with tf.init_scope(), tf.device(device):
                    copies = UninitializedVariable(dtype=tf.variant, shape=(), trainable=False)
                kept.append((copies, own[held]))
        return kept

    def _guarded(
        self,
        function: Callable[[tf.Tensor, Sequence[tf.Tensor]], None],
        kept: Iterable[tuple[tf.Variable, Sequence[tf.Tensor]]],
    ) -> Callable:
        """`function` of what each server has `kept`, as a function of a graph."""

        def guarded(generation: tf.Tensor) -> None:
            for copies, handles in kept:
                with tf.device(copies.device):
                    function(copies.handle, handles)
            self._fence.guard(tf.compat.v1.get_default_graph(), generation)

        return tf.function(guarded, autograph=False)


def _nothing(generation: tf.Tensor) -> None:
    del generation


def _keep(copies: tf.Tensor, handles: Sequence[tf.Tensor]) -> None:
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype_behind(h)) for h in handles]
    tf.raw_ops.AssignVariableOp(
        resource=copies, value=tf.raw_ops.OptionalFromValue(components=values)
    )


def _put_back(copies: tf.Tensor, handles: Sequence[tf.Tensor]) -> None:
    values = tf.raw_ops.OptionalGetValue(
        optional=tf.raw_ops.ReadVariableOp(resource=copies, dtype=tf.variant),
        output_types=[dtype_behind(handle) for handle in handles],
        output_shapes=[tf.TensorShape(None)] * len(handles),
    )
    for handle, value in zip(handles, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
