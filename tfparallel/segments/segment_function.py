"""One stage's computation as functions: forward, and backward from what forward has kept.

    forward    inputs, weights                  ->  outputs, stash
    backward   gradients of outputs, stash      ->  gradients of inputs and weights

    or backward in two halves, of which only the first is on the way to the stage before:

    backward_input    gradients of outputs, stash          ->  gradients of inputs, what is left
    backward_weight   gradients of outputs, stash, left    ->  gradients of weights

Each is called for every microbatch and never inlined, so that TensorFlow traces and optimises it
once. The stash is all that a microbatch holds between its two passes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.internals import FuncGraph
from tfparallel.segments.graph_copy import GraphCopy, GraphFunction, Places, depended_on
from tfparallel.segments.graph_gradients import GraphGradients, placeholder_like
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
        gradients = GraphGradients(
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
        self._used = self._handles_needed()
        with gradients.graph.as_default():
            self._taken = self._taken_here()
            gradients.take(self._taken.needed)

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
        return self._filled(called.values, arguments), _operations(backward=called)

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
        return self._filled({**second.values, **first.values}, arguments), calls

    def _given(self, stash: Sequence, output_gradients: Sequence) -> list:
        return [*(tf.convert_to_tensor(output_gradients[i]) for i in self._differentiable), *stash]

    def _handles_of(self, arguments: Sequence) -> list:
        return [arguments[i] for i in self._handles]

    def _filled(self, values: Mapping[int, tf.Tensor], arguments: Sequence) -> list:
        gradients, found = [None] * len(arguments), self._gradients.filled(values, arguments)
        for i, gradient in zip(self._watched, found, strict=True):
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
        name, gradients, left = f"{self._name}_{kind}", self._gradients, Stash(takes)
        is_copy = bool(self._passes)  # the first pass is the graph of the gradients itself
        graph = FuncGraph(name) if is_copy else gradients.graph
        with graph.as_default():
            dys, taken, values, returned = gradients.dys, self._taken, list(leaves), list(returns)
            left_over = [tf.compat.v1.placeholder(dtype, []) for dtype in left.packed_types]
            if is_copy:
                dys = [placeholder_like(self._outputs[i]) for i in self._differentiable]
                taken = self._taken_here()
                known = dict(zip(map(id, takes), left.unpack(left_over), strict=True))
                copy = gradients.copy(dys, taken.needed, known)
                values, returned = copy.tensors(leaves), copy.tensors(returns)
            elsewhere = LeftOnDevices(values, self._left_on, are_read_once=True)
            outputs = widened([values[i] for i in elsewhere.others])
            outputs += Stash(returns).pack(returned)
            new = elsewhere.placeholders()
            outputs += elsewhere.write(new, values)
            others = gradients.captured_elsewhere
            inputs = [*dys, *taken.inputs, *left_over, *map(graph.capture, others), *new]
            closed = self._left.close(taken.arrays, taken.read) if is_last else []
        if not outputs:
            return _Pass(None, [], [], others, elsewhere, self._places)
        function = GraphFunction(name, graph, inputs, outputs, self._places, closed)
        return _Pass(function, leaves, self._used, others, elsewhere, self._places)

    def _handles_needed(self) -> list[int]:
        """The numbers of the handles that what gradients need is computed from again."""
        given = {*map(id, self.kept), *map(id, self._handle_tensors)}
        missing = [x for x in self._gradients.needed if id(x) not in given]
        again = depended_on(missing, lambda x: id(x) in given)
        taken = {id(x) for x in [*self._gradients.needed, *(x for op in again for x in op.inputs)]}
        return [i for i, handle in enumerate(self._handle_tensors) if id(handle) in taken]

    def _taken_here(self) -> "_Taken":
        """In the graph under construction."""
        graph = tf.compat.v1.get_default_graph()
        packed = [placeholder_like(tensor) for tensor in self._packed]
        count = self._left.num_arrays
        middle, end = self.num_activations, len(packed) - 2 * count
        values = self._stashes[0].unpack(packed[:middle])
        values += self._stashes[1].unpack(packed[middle:end])
        written, arrays = packed[end : end + count], packed[end + count :]
        read = self._left.read(arrays, written)
        kept = {**read, **dict(zip(self._left.others, values, strict=True))}
        used = [self._handle_tensors[i] for i in self._used]
        handles = [graph.capture(handle) for handle in used]
        given = {id(self.kept[i]): tensor for i, tensor in kept.items()}
        given |= zip(map(id, used), handles, strict=True)
        needed = GraphCopy(self._graph, given).tensors(self._gradients.needed)
        return _Taken([*packed, *handles], needed, arrays, read)


class _Taken(NamedTuple):
    """What a pass takes beside the gradients of outputs.

    Attributes:
        inputs: placeholders for the stash and for handles.
        needed: made of them, what gradients are computed from.
        arrays: placeholders, among the inputs, of what is left on devices.
        read: from these arrays, by number.
    """

    inputs: list
    needed: list
    arrays: list
    read: dict[int, tf.Tensor]


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
        read = self._elsewhere.read_by_calls(arrays, flat[end:], moves)
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
