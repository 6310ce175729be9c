"""What segments of a step keep, on the host from their forward to their backward passes.

    forward    x -> [layer] -> y               x, y -> host
    backward   the gradient of the layer behind is there: host -> x, y; dy, x, y -> [layer] -> dx

Each tensor goes to the host once, as soon as it is there, and comes back for each segment that
takes it. Nothing else on the device has it then, so that TensorFlow frees it.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design", https://arxiv.org/abs/1602.08124
"""

from collections.abc import Collection, Sequence

import tensorflow as tf

from tfparallel.internals import device_util
from tfparallel.replicas.device_names import hosts_of
from tfparallel.segments.graph_copy import GraphCopy
from tfparallel.segments.offload import from_host, to_host

ASKS_SHAPE = frozenset({"Shape", "ShapeN", "Size", "Rank"})  # as soon as the tensor is there
SHARES_MEMORY = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"})
# Sizes and such are on the host anyway; a list of tensors, of a loop, is no tensor to copy.
_STAYS = frozenset({tf.int32, tf.resource, tf.string, tf.variant})


class HostCopies:
    """Those of one step.

    Args:
        graph: of the step, traced to its end.
        staying: operations whose results stay on the device: weights, and what is made of them.
    """

    def __init__(self, graph: tf.Graph, staying: Collection[tf.Operation]):
        self._graph, self._staying = graph, staying
        self._on_host: dict[int, tf.Tensor] = {}
        self._fetched: dict[tuple[int, frozenset[int]], tf.Tensor] = {}

    @property
    def made(self) -> list[tf.Operation]:
        """What has copied tensors to the host so far."""
        return [copy.op for copy in self._on_host.values()]

    def holds(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` goes to the host: numbers of a device that is not the host itself."""
        is_single = tensor.shape.rank == 0
        if tensor.dtype in _STAYS or is_single or tensor.op.type == "Const":
            return False
        if not tensor.device or tensor.op in self._staying:
            return False
        return _host_of(tensor) != device_util.canonicalize(tensor.device)

    def fetched(self, tensor: tf.Tensor, gate: Sequence[tf.Tensor]) -> tf.Tensor:
        """`tensor` on its device, brought back from the host once `gate` is there."""
        key = (id(tensor), frozenset(map(id, gate)))
        if key not in self._fetched:
            self._fetched[key] = self._brought(tensor, gate)
        return self._fetched[key]

    def _brought(self, tensor: tf.Tensor, gate: Sequence[tf.Tensor]) -> tf.Tensor:
        if tensor.op.type in SHARES_MEMORY and self._shares(tensor):
            whole, *others = tensor.op.inputs
            given = {id(whole): self.fetched(whole, gate), **{id(x): x for x in others}}
            with self._graph.as_default():
                (again,) = GraphCopy(self._graph, given).tensors([tensor])
            return again
        with self._graph.as_default():
            if id(tensor) not in self._on_host:
                with tf.control_dependencies(None):  # at once, not when a backward pass begins
                    (self._on_host[id(tensor)],) = to_host([tensor], _host_of(tensor))
            with tf.device(tensor.device), tf.control_dependencies(gate):
                (fetched,), _ = from_host([self._on_host[id(tensor)]])
                return fetched

    def _shares(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is in the memory of what it is made of, which goes to the host."""
        whole = tensor.op.inputs[0]
        return whole.device == tensor.device and self.holds(whole)


def of_backward(
    operations: Sequence[tf.Operation], gates: Collection[tf.Tensor]
) -> set[tf.Operation]:
    """Those that gradients go through, and what is made for these: not metrics, traced later.

    Args:
        operations: in the order in which they were traced.
        gates: gradients.
    """
    known = set(map(id, gates))
    through: set[tf.Operation] = set()
    for operation in operations:
        if any(id(x) in known or x.op in through for x in operation.inputs):
            through.add(operation)
    own = set(through)
    for operation in reversed(operations):
        if any(each in own for y in operation.outputs for each in y.consumers()):
            own.add(operation)
    return own


def _host_of(tensor: tf.Tensor) -> str:
    return hosts_of([tensor.device])[0]
