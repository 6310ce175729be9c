"""One stage's computation as functions: forward, and backward from what forward has kept.

    forward    inputs, weights                  ->  outputs, stash
    backward   gradients of outputs, stash      ->  gradients of inputs and weights

Each is called for every microbatch and never inlined, so that TensorFlow traces and optimises it
once. The stash is all that a microbatch holds between its two passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.pipeline.graph_copy import GraphCopy, GraphFunction
from tfparallel.pipeline.stash import Stash
from tfparallel.tf_internals import FuncGraph, gradients_in_graph


class StageFunction:
    """The passes of a traced computation.

    Args:
        name: of the functions.
        concrete: the computation, of flat tensors to flat tensors.
        watched: for each of its arguments (inputs, then captured tensors), whether its gradient is
            wanted.
        recomputes: whether the results of an operation are computed again in the backward pass
            instead of kept. What has effects or draws random numbers is kept anyway, so that both
            computations give the same bits. Default: all that the gradient needs is kept.
    """

    def __init__(
        self,
        name: str,
        concrete: Any,
        watched: Sequence[bool],
        recomputes: Callable[[tf.Operation], bool] = lambda operation: False,
    ):
        graph: FuncGraph = concrete.graph
        outputs = list(graph.outputs)
        self._num_outputs = len(outputs)
        self._differentiable = [i for i, y in enumerate(outputs) if is_differentiable(y)]
        self._watched = [i for i, is_watched in enumerate(watched) if is_watched]
        gradients = _Gradients(
            graph,
            [outputs[i] for i in self._differentiable],
            [graph.inputs[i] for i in self._watched],
        )
        self._handles = [i for i, x in enumerate(graph.inputs) if x.dtype == tf.resource]
        handles = [graph.inputs[i] for i in self._handles]
        kept = _kept(gradients.needed, handles, recomputes)
        stash = Stash(kept)
        with graph.as_default():
            packed = stash.pack(kept)
        self._forward = GraphFunction(name, graph, graph.inputs, [*outputs, *packed])
        graph.outputs = outputs  # the graph is the computation's, and may be used again

        backward = FuncGraph(f"{name}_backward")
        with backward.as_default():
            dys = [_placeholder_like(outputs[i]) for i in self._differentiable]
            own_packed = [_placeholder_like(tensor) for tensor in packed]
            own_handles = [backward.capture(handle) for handle in handles]
            given = dict(zip(map(id, kept), stash.unpack(own_packed), strict=True))
            given |= zip(map(id, handles), own_handles, strict=True)
            flat = gradients.copied(dys, GraphCopy(graph, given).tensors(gradients.needed))
            self._others = gradients.captured_elsewhere
            inputs = [*dys, *own_packed, *own_handles, *map(backward.capture, self._others)]
        self._gradients = gradients
        self._backward = GraphFunction(backward.name, backward, inputs, flat)

    def forward(self, device: str, arguments: Sequence) -> tuple[list, list]:
        """The outputs for `arguments`, computed on `device`, and the stash."""
        results = self._forward(device, arguments)
        return results[: self._num_outputs], results[self._num_outputs :]

    def backward(
        self, device: str, arguments: Sequence, stash: Sequence, output_gradients: Sequence
    ) -> list:
        """The gradient of every argument; None where none is wanted or there is none.

        Args:
            device: computes it.
            arguments: of the forward pass.
            stash: from the forward pass.
            output_gradients: of every output; those of outputs without gradients do not matter.
        """
        dys = [tf.convert_to_tensor(output_gradients[i]) for i in self._differentiable]
        handles = [arguments[i] for i in self._handles]
        flat = self._backward(device, [*dys, *stash, *handles, *self._others])
        gradients: list = [None] * len(arguments)
        for i, gradient in zip(self._watched, self._gradients.filled(flat), strict=True):
            gradients[i] = gradient
        return gradients


def inference_function(name: str, concrete: Any) -> GraphFunction:
    """A traced computation as a function that keeps nothing for gradients."""
    return GraphFunction(name, concrete.graph, concrete.graph.inputs, concrete.graph.outputs)


class _Gradients:
    """The gradients of a graph's `ys` with respect to its `xs`, in a graph of their own.

    Attributes:
        needed: the tensors of the graph that they are computed from.
        captured_elsewhere: tensors of no graph, or of one around it, that they need too.
    """

    def __init__(self, graph: FuncGraph, ys: Sequence, xs: Sequence):
        self._graph = FuncGraph("gradients")
        with self._graph.as_default():
            self._dys = [_placeholder_like(y) for y in ys]
            self._gradients = gradients_in_graph(ys, xs, self._dys, graph)
        inside = [getattr(outer, "graph", None) is graph for outer, _ in self._graph.captures]
        pairs = list(zip(inside, self._graph.captures, strict=True))
        self.needed = [outer for is_inside, (outer, _) in pairs if is_inside]
        self.captured_elsewhere = [outer for is_inside, (outer, _) in pairs if not is_inside]
        self._inner = [inner for is_inside, (_, inner) in pairs if is_inside]
        self._inner_elsewhere = [inner for is_inside, (_, inner) in pairs if not is_inside]
        leaves = tf.nest.flatten(self._gradients, expand_composites=True)
        self._at = [i for i, leaf in enumerate(leaves) if leaf is not None]
        self._leaves = leaves

    def copied(self, dys: Sequence, needed: Sequence) -> list[tf.Tensor]:
        """The gradients' tensors in the graph under construction, from these values."""
        given = dict(zip(map(id, self._dys), dys, strict=True))
        given |= zip(map(id, self._inner), needed, strict=True)
        graph = tf.compat.v1.get_default_graph()
        for inner, outer in zip(self._inner_elsewhere, self.captured_elsewhere, strict=True):
            given[id(inner)] = graph.capture(outer)
        return GraphCopy(self._graph, given).tensors(self._leaves[i] for i in self._at)

    def filled(self, flat: Sequence) -> list:
        """One tensor, IndexedSlices or None for each x: the tensors `flat` in their places."""
        leaves: list = [None] * len(self._leaves)
        for i, tensor in zip(self._at, flat, strict=True):
            leaves[i] = tensor
        return tf.nest.pack_sequence_as(self._gradients, leaves, expand_composites=True)


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _kept(
    needed: Sequence, handles: Sequence, recomputes: Callable[[tf.Operation], bool]
) -> list[tf.Tensor]:
    """What has to be kept for `needed` to be there, or be computed, in the backward pass."""
    kept: dict[int, tf.Tensor] = {}
    without = {id(handle) for handle in handles}
    visited = list(needed)
    seen = set(map(id, needed))
    for tensor in visited:  # grows
        operation = tensor.op
        if id(tensor) in without or operation.type == "Const":
            continue
        is_argument = operation.type == "Placeholder"
        if is_argument or operation._is_stateful or not recomputes(operation):
            kept[id(tensor)] = tensor
            continue
        new = [x for x in operation.inputs if id(x) not in seen]
        seen.update(map(id, new))
        visited += new
    return list(kept.values())


def _placeholder_like(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
