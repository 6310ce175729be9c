"""One stage's computation as functions: forward, and backward from what forward has kept.

    forward    inputs, weights                  ->  outputs, stash
    backward   gradients of outputs, stash      ->  gradients of inputs and weights

    or backward in two halves, of which only the first is on the way to the stage before:

    backward_input    gradients of outputs, stash          ->  gradients of inputs, what is left
    backward_weight   gradients of outputs, stash, left    ->  gradients of weights

Each is called for every microbatch and never inlined, so that TensorFlow traces and optimises it
once. The stash is all that a microbatch holds between its two passes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.internals import FuncGraph, gradients_in_graph
from tfparallel.replicas.repeated_rows import is_of_no_row
from tfparallel.segments.graph_copy import GraphCopy, GraphFunction, Places, depended_on
from tfparallel.segments.kept_tensors import is_differentiable, is_weight, kept_for
from tfparallel.segments.left_on_devices import LeftOnDevices
from tfparallel.segments.stash import Stash
from tfparallel.segments.wide_integers import narrowed, widened


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
        places: where it is computed, as `GraphFunction` has it.
        left_on: devices in `concrete` that keep what they have made, and leave gradients where they
            make them, for who takes them there. Default: all goes through the calls' device.

    Attributes:
        kept: the tensors of the computation that the forward pass keeps.
        num_activations: how many tensors of the stash, the first ones, hold what this microbatch
            has made, the others being weights, and what is left on devices.
    """

    def __init__(
        self,
        name: str,
        concrete: tf.types.experimental.ConcreteFunction,
        watched: Sequence[bool],
        recomputes: Callable[[tf.Operation], bool] = lambda operation: False,
        places: Places = lambda device: {},
        left_on: Collection[str] = (),
    ):
        graph: FuncGraph = concrete.graph
        inputs, outputs = list(graph.inputs), list(graph.outputs)
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
        kept = kept_for(gradients.needed, handles, recomputes)
        kept.sort(key=is_weight)
        self.kept = kept
        left = LeftOnDevices(kept, left_on, {id(x): y for y, x in graph.captures})
        own = [kept[i] for i in left.others]
        activations = [x for x in own if not is_weight(x)]
        stashes = [Stash(activations), Stash(own[len(activations) :])]
        with graph.as_default():
            packed = stashes[0].pack(activations)
            self.num_activations = len(packed)
            packed += stashes[1].pack(own[len(activations) :])
            arrays = left.placeholders()
            packed += left.write(arrays, kept)
        self._forward = GraphFunction(name, graph, [*inputs, *arrays], [*outputs, *packed], places)
        # The graph is the computation's, and may be used again.
        graph.inputs, graph.outputs = inputs, outputs

        self._gradients, self._stashes, self._handle_tensors = gradients, stashes, handles
        self._name, self._graph, self._outputs = name, graph, outputs
        self._packed, self._left, self._left_on = [*packed, *arrays], left, left_on
        self._num_inputs = len(graph.inputs) - len(concrete.captured_inputs)
        self._places = places
        self._passes: dict[str, Any] = {}

    def forward(self, device: str, arguments: Sequence) -> tuple[list, list]:
        """The outputs for `arguments`, computed on `device`, and the stash."""
        arrays = self._left.new_arrays(self._places(device))
        results = self._forward(device, [*arguments, *arrays])
        return results[: self._num_outputs], [*results[self._num_outputs :], *arrays]

    def backward(
        self, device: str, arguments: Sequence, stash: Sequence, output_gradients: Sequence
    ) -> tuple[list, dict[str, tf.Operation]]:
        """The gradient of every argument; None where none is wanted or there is none.

        Args:
            device: computes it.
            arguments: of the forward pass.
            stash: from the forward pass.
            output_gradients: of every output; those of outputs without gradients do not matter.

        Returns:
            The gradients, and the call as `{"backward": operation}`; nothing without a gradient.
        """
        leaves = self._gradients.leaves(range(len(self._watched)))
        call = self._pass("backward", leaves)
        given = self._given(stash, output_gradients)
        called = call(device, given, self._handles_of(arguments), [])
        return self._filled(called.values, len(arguments)), _operations(backward=called)

    def backward_halves(
        self, device: str, arguments: Sequence, stash: Sequence, output_gradients: Sequence
    ) -> tuple[list, dict[str, tf.Operation]]:
        """As `backward`, in two calls: "backward_input" and "backward_weight".

        The second takes from the first what both need of the way back through the layers.
        """
        gradients = self._gradients
        is_input = [self._watched[i] < self._num_inputs for i in range(len(self._watched))]
        of_inputs = gradients.leaves(i for i, own in enumerate(is_input) if own)
        of_weights = gradients.leaves(i for i, own in enumerate(is_input) if not own)
        left = gradients.made_on_the_way(of_inputs, of_weights)
        given, handles = self._given(stash, output_gradients), self._handles_of(arguments)
        of_input = self._pass("backward_input", of_inputs, returns=left, is_last=not of_weights)
        first = of_input(device, given, handles, [])
        of_weight = self._pass("backward_weight", of_weights, takes=left)
        second = of_weight(device, given, handles, first.left_over)
        calls = _operations(backward_input=first, backward_weight=second)
        return self._filled({**second.values, **first.values}, len(arguments)), calls

    def _given(self, stash: Sequence, output_gradients: Sequence) -> list:
        return [*(tf.convert_to_tensor(output_gradients[i]) for i in self._differentiable), *stash]

    def _handles_of(self, arguments: Sequence) -> list:
        return [arguments[i] for i in self._handles]

    def _filled(self, values: Mapping[int, tf.Tensor], num_arguments: int) -> list:
        gradients: list = [None] * num_arguments
        for i, gradient in zip(self._watched, self._gradients.filled(values), strict=True):
            gradients[i] = gradient
        return gradients

    def _pass(
        self,
        kind: str,
        leaves: Sequence,
        returns: Sequence = (),
        takes: Sequence = (),
        is_last: bool = True,
    ) -> "_Pass":
        if kind not in self._passes:
            self._passes[kind] = self._defined(kind, leaves, returns, takes, is_last)
        return self._passes[kind]

    def _defined(
        self, kind: str, leaves: Sequence, returns: Sequence, takes: Sequence, is_last: bool
    ) -> "_Pass":
        """A function of output gradients, stash and handles that computes `leaves`.

        Args:
            kind: of the pass.
            leaves: tensors of the gradients' graph.
            returns: tensors of it that are returned too, packed.
            takes: tensors of it that are given, packed.
            is_last: whether nothing is computed from the stash behind it.
        """
        graph = FuncGraph(f"{self._name}_{kind}")
        with graph.as_default():
            dys = [_placeholder_like(self._outputs[i]) for i in self._differentiable]
            packed = [_placeholder_like(tensor) for tensor in self._packed]
            handles = [graph.capture(handle) for handle in self._handle_tensors]
            left = Stash(takes)
            taken = [tf.compat.v1.placeholder(dtype, []) for dtype in left.packed_types]
            given = self._unpacked(packed, is_last)
            given |= zip(map(id, self._handle_tensors), handles, strict=True)
            needed = GraphCopy(self._graph, given).tensors(self._gradients.needed)
            known = dict(zip(map(id, takes), left.unpack(taken), strict=True))
            copy = self._gradients.copy(dys, needed, known)
            values = copy.tensors(leaves)
            elsewhere = LeftOnDevices(values, self._left_on, are_read_once=True)
            outputs = widened([values[i] for i in elsewhere.others])
            outputs += Stash(returns).pack(copy.tensors(returns))
            new = elsewhere.placeholders()
            outputs += elsewhere.write(new, values)
            others = self._gradients.captured_elsewhere
            used = [i for i, handle in enumerate(handles) if handle.consumers()]  # most are not
            inputs = [*dys, *packed, *(handles[i] for i in used), *taken]
            inputs += [*map(graph.capture, others), *new]
        if not outputs:
            return _Pass(None, [], [], others, elsewhere, self._places)
        function = GraphFunction(graph.name, graph, inputs, outputs, self._places)
        return _Pass(function, leaves, used, others, elsewhere, self._places)

    def _unpacked(self, packed: Sequence, is_last: bool) -> dict[int, tf.Tensor]:
        """What was kept, by `id`, in the graph under construction; `is_last` as of `_defined`."""
        count = self._left.num_arrays
        middle, end = self.num_activations, len(packed) - 2 * count
        values = self._stashes[0].unpack(packed[:middle])
        values += self._stashes[1].unpack(packed[middle:end])
        written, arrays = packed[end : end + count], packed[end + count :]
        left = self._left.read(arrays, written)
        if is_last:
            tf.compat.v1.get_default_graph().control_outputs += self._left.close(arrays, left)
        left |= zip(self._left.others, values, strict=True)
        return {id(self.kept[i]): tensor for i, tensor in left.items()}


class _Called(NamedTuple):
    """What a call of a pass gives.

    Attributes:
        values: of the leaves by their `id`.
        left_over: for another pass.
        operation: the call; None where there is nothing to compute.
    """

    values: dict[int, tf.Tensor]
    left_over: list
    operation: tf.Operation | None


class _Pass:
    """A function of a pass, of what is given, some handles, what is left over, and captures.

    Args:
        function: None where there is nothing to compute.
        leaves: that it computes.
        used: the numbers of the handles.
        others: captures.
        elsewhere: which leaves are left where they are made.
        places: as of `StageFunction`.
    """

    def __init__(
        self,
        function: GraphFunction | None,
        leaves: Sequence,
        used: Sequence,
        others: Sequence,
        elsewhere: LeftOnDevices,
        places: Places,
    ):
        self._function, self._leaves, self._used, self._others = function, leaves, used, others
        self._elsewhere, self._places = elsewhere, places

    def __call__(self, device: str, given: Sequence, handles: Sequence, left: Sequence) -> _Called:
        if self._function is None:
            return _Called({}, [], None)
        moves = self._places(device)
        used, arrays = [handles[i] for i in self._used], self._elsewhere.new_arrays(moves)
        flat = self._function(device, [*given, *used, *left, *self._others, *arrays])
        own = [self._leaves[i] for i in self._elsewhere.others]
        count, end = len(own), len(flat) - len(arrays)
        values = dict(
            zip(map(id, own), narrowed(flat[:count], [x.dtype for x in own]), strict=True)
        )
        read = self._elsewhere.read(arrays, flat[end:], moves)
        values |= {id(self._leaves[i]): gradient for i, gradient in read.items()}
        return _Called(values, flat[count:end], flat[0].op)


def _operations(**calls: _Called) -> dict[str, tf.Operation]:
    return {kind: call.operation for kind, call in calls.items() if call.values and call.operation}


def inference_function(
    name: str,
    concrete: tf.types.experimental.ConcreteFunction,
    places: Places = lambda device: {},
) -> GraphFunction:
    """A traced computation as a function that keeps nothing for gradients.

    It returns what the computation does, or one number where that is nothing: a call needs a
    result.
    """
    graph: FuncGraph = concrete.graph
    outputs = list(graph.outputs)
    with graph.as_default():
        function = GraphFunction(name, graph, graph.inputs, outputs or [tf.constant(0.0)], places)
    graph.outputs = outputs  # the graph is the computation's
    return function


class _Gradients:
    """The gradients of a graph's `ys` with respect to its `xs`, in a graph of their own.

    Attributes:
        needed: the tensors of the graph that they are computed from.
        captured_elsewhere: tensors of no graph, or of one around it, that they need too.
    """

    def __init__(self, graph: FuncGraph, ys: Sequence, xs: Sequence):
        self._graph, self._of_ys = FuncGraph("gradients"), graph
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
        self._leaves = leaves
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
        own = set(map(id, [*self._dys, *self._inner, *self._inner_elsewhere]))

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
        given = dict(zip(map(id, self._dys), dys, strict=True))
        given |= zip(map(id, self._inner), needed, strict=True)
        graph = tf.compat.v1.get_default_graph()
        for inner, outer in zip(self._inner_elsewhere, self.captured_elsewhere, strict=True):
            given[id(inner)] = graph.capture(outer)
        return GraphCopy(self._graph, {**given, **known})

    def filled(self, values: Mapping[int, tf.Tensor]) -> list:
        """One tensor, IndexedSlices or None for each x, of the values of leaves by `id`.

        Indices that no row of the batch decides on are made where they are used: whoever adds up
        sees that they are alike. So are shapes, which a GPU would send to the host.
        """
        values = {**values, **{id(x): tf.constant(of, x.dtype) for x, of in self._known_shapes}}
        if self._of_no_row:
            values = {**values, **self._made_here(self._of_no_row)}
        leaves = [None if leaf is None else values[id(leaf)] for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._gradients, leaves, expand_composites=True)

    def _made_here(self, tensors: Sequence) -> dict[int, tf.Tensor]:
        """Copies, in the graph under construction, of what needs no arguments; by `id`."""
        asked = set(depended_on(tensors, lambda _: False))
        pairs = zip(self._inner, self.needed, strict=True)
        given = {id(inner): outer for inner, outer in pairs if inner.op in asked}
        copies = GraphCopy(self._of_ys, {}).tensors(given.values())
        copy = GraphCopy(self._graph, dict(zip(given, copies, strict=True)))
        return dict(zip(map(id, tensors), copy.tensors(tensors), strict=True))


def _placeholder_like(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
