"""Gradients of one graph in another, which is a function of what it takes from the first.

    graph         xs -> h -> ys
    gradients     dys, h -> dxs

`h` are captures at first, which say what has to be kept. What is kept takes their place then, so
that the graph is written once: it is the backward pass. Another pass copies what it does of it.
"""

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals import FuncGraph, gradients_in_graph
from tfparallel.internals.graphs import take_instead
from tfparallel.internals.shared_constants import constants_shared
from tfparallel.replicas.repeated_rows import is_of_no_row, known_length
from tfparallel.segments.graph_copy import GraphCopy, depended_on


class GraphGradients:
    """The gradients of a graph's `ys` with respect to its `xs`, in a graph of their own.

    Attributes:
        graph: their own.
        dys: placeholders for the gradients of `ys`.
        needed: the tensors of the other graph that they are computed from.
        captured_elsewhere: tensors of no graph, or of one around it, that they need too.
    """

    def __init__(self, graph: FuncGraph, ys: Sequence, xs: Sequence):
        self.graph, self._of_ys = FuncGraph("gradients"), graph
        with self.graph.as_default(), constants_shared(self.graph):
            self.dys = [placeholder_like(y) for y in ys]
            self._gradients = gradients_in_graph(ys, xs, self.dys, graph)
        inside = [getattr(outer, "graph", None) is graph for outer, _ in self.graph.captures]
        pairs = list(zip(inside, self.graph.captures, strict=True))
        self.needed = [outer for is_inside, (outer, _) in pairs if is_inside]
        self.captured_elsewhere = [outer for is_inside, (outer, _) in pairs if not is_inside]
        self._inner = [inner for is_inside, (_, inner) in pairs if is_inside]
        self._inner_elsewhere = [inner for is_inside, (_, inner) in pairs if not is_inside]

    def take(self, needed: Sequence) -> None:
        """Has them be computed from these tensors of `graph`, not from what it has captured."""
        for captured, own in zip(self._inner, needed, strict=True):
            for operation in captured.consumers() if own is not captured else ():
                for index, tensor in enumerate(operation.inputs):
                    if tensor is captured:
                        take_instead(operation, index, own)
        instead = dict(zip(map(id, self._inner), needed, strict=True))
        leaves = tf.nest.flatten(self._gradients, expand_composites=True)
        self._inner, self._leaves = list(needed), [instead.get(id(leaf), leaf) for leaf in leaves]
        self._gradients = tf.nest.pack_sequence_as(
            self._gradients, self._leaves, expand_composites=True
        )
        slices = [each for each in self._gradients if isinstance(each, tf.IndexedSlices)]
        outer = dict(zip(map(id, self._inner), self.needed, strict=True))
        self._of_no_row = [each.indices for each in slices if is_of_no_row(each.indices, outer)]
        shapes = [(each.dense_shape, tf.get_static_value(each.dense_shape)) for each in slices]
        self._known_shapes = [(x, value) for x, value in shapes if value is not None]

    def leaves(self, positions: Iterable[int]) -> list[tf.Tensor]:
        """The different tensors that the gradients of the `xs` at `positions` are made of."""
        chosen = tf.nest.flatten([self._gradients[i] for i in positions], expand_composites=True)
        return list({id(leaf): leaf for leaf in chosen if leaf is not None}.values())

    def made_on_the_way(self, first: Sequence, second: Sequence) -> list[tf.Tensor]:
        """What the leaves `second` need, and is made for the leaves `first` anyway."""
        own = set(map(id, [*self.dys, *self._inner, *self._inner_elsewhere]))

        def is_given(tensor: tf.Tensor) -> bool:
            return id(tensor) in own

        def operations(tensors: Sequence) -> dict[tf.Operation, None]:
            missing = [tensor for tensor in tensors if not is_given(tensor)]
            return dict.fromkeys(depended_on(missing, is_given))

        made = {op for op in operations(first) if op.type != "Const"}
        others = [op for op in operations(second) if op not in made]
        wanted = [x for op in others for x in op.inputs] + list(second)
        return list({id(x): x for x in wanted if not is_given(x) and x.op in made}.values())

    def copy(self, dys: Sequence, needed: Sequence, known: Mapping[int, tf.Tensor]) -> GraphCopy:
        """Copies to the graph under construction, from these values and those `known` by `id`."""
        given = dict(zip(map(id, self.dys), dys, strict=True))
        given |= zip(map(id, self._inner), needed, strict=True)
        graph = tf.compat.v1.get_default_graph()
        for inner, outer in zip(self._inner_elsewhere, self.captured_elsewhere, strict=True):
            given[id(inner)] = graph.capture(outer)
        return GraphCopy(self.graph, {**given, **known})

    def filled(self, values: Mapping[int, tf.Tensor], arguments: Sequence) -> list:
        """One tensor, IndexedSlices or None for each x, of the values of leaves by `id`.

        Args:
            values: in the graph under construction.
            arguments: there, of the function whose graph that of `ys` is.

        Indices that no row of the batch decides on are made where they are used: whoever adds up
        sees that they are alike. So are shapes, which a GPU would send to the host.
        """
        values = {**values, **{id(x): tf.constant(of, x.dtype) for x, of in self._known_shapes}}
        if self._of_no_row:
            values = {**values, **self._made_here(self._of_no_row, arguments)}
        leaves = [None if leaf is None else values[id(leaf)] for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._gradients, leaves, expand_composites=True)

    def _made_here(self, tensors: Sequence, arguments: Sequence) -> dict[int, tf.Tensor]:
        """Copies, in the graph under construction, of what needs lengths of arguments alone."""
        asked = set(depended_on(tensors, lambda _: False))
        pairs = zip(self._inner, self.needed, strict=True)
        given = {id(inner): outer for inner, outer in pairs if inner.op in asked}
        lengths = {
            id(operation.outputs[0]): tf.constant(size, operation.outputs[0].dtype)
            for operation in depended_on(given.values(), lambda _: False)
            if (size := known_length(operation)) is not None
        }
        known = dict(zip(map(id, self._of_ys.inputs), arguments, strict=True)) | lengths
        copies = GraphCopy(self._of_ys, known).tensors(given.values())
        copy = GraphCopy(self.graph, dict(zip(given, copies, strict=True)))
        return dict(zip(map(id, tensors), copy.tensors(tensors), strict=True))


def placeholder_like(tensor: tf.Tensor) -> tf.Tensor:
    """A placeholder for a tensor of this type and shape, in the graph under construction."""
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
