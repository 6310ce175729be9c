"""Values of a graph that is not run: computed for other inputs, as an assignment leaves them."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

# An operation of a graph as it is written down.
from tensorflow.core.framework import node_def_pb2

from tfparallel.internals.graphs import FuncGraph, called_graphs, take_instead

__all__ = [
    "computed_from",
    "draws",
    "draws_otherwise",
    "read_as_assigned",
    "rows_drawn_behind",
    "state_of_later_behind",
]

# Operations that draw floating-point numbers of a shape, which comes first.
_OF_FLOATS_DRAWN = (
    *("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"),
    *("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal"),
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal"),
)
_SHUFFLED = "RandomShuffle", "StatelessShuffle"
_NUMBER_DRAWN = 0.9  # above most rates of Dropout, which keeps all then
_STEPS, _RATE = 999_983, 0.7  # a prime number, so that no other step is meant


def computed_from(
    graph: FuncGraph,
    inputs: Sequence[tf.Tensor],
    value: tf.Tensor,
    state: Mapping[str, float] | None = None,
) -> Callable:
    """What computes `value` of `graph` of other tensors for `inputs`, and changes nothing.

    Random numbers are all one number there, so that they do not depend on how many are drawn.

    Args:
        graph: which is not a function yet, of variables from outside.
        inputs: placeholders of it, which are computed for other numbers of rows, too.
        value: which no branch, loop or function holds.
        state: scalars of `graph`, by their names, that are taken for these numbers.

    Returns:
        A function of a list of tensors.
    """
    needed = {operation.name for operation in _operations_behind(value)}
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in needed]
    for node in nodes:  # what only has to have happened before is left out
        node.input[:] = [name for name in node.input if not name.startswith("^")]
        if "_class" in node.attr:  # beside what, maybe, is left out
            del node.attr["_class"]
    nodes += [_without_chance(node) for node in nodes if node.op in _OF_FLOATS_DRAWN]
    kept = type(definition)(node=nodes, library=definition.library, versions=definition.versions)
    captured = [(inner, outer) for outer, inner in graph.captures]
    inner_of_calls, of_calls = graph.deferred_internal_captures, graph.deferred_external_captures

    def compute(tensors: Sequence) -> tf.Tensor:
        pairs = [*zip(inputs, tensors, strict=True), *captured]
        into = tf.compat.v1.get_default_graph()
        given = {inner.name: into.capture(x) for inner, x in pairs if inner.op.name in needed}
        for name, number in (state or {}).items():
            given[name] = tf.constant(number, graph.get_tensor_by_name(name).dtype)
        for inner, of_call in zip(inner_of_calls, of_calls, strict=True):  # keys of collectives
            if inner.op.name in needed:
                spec = tf.TensorSpec(inner.shape, inner.dtype)
                given[inner.name] = into.capture_call_time_value(_only_of(of_call), spec)
        return tf.import_graph_def(kept, given, [value.name])[0]

    specs = [tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else [], x.dtype) for x in inputs]
    return tf.function(compute, [specs], autograph=False)


def state_of_later_behind(value: tf.Tensor) -> dict[str, float]:
    """By names what scalar variables, as `value` is computed of them, may be in later steps.

    Counters begin at 0, as what is annealed does.
    """
    reads = (x.outputs[0] for x in _operations_behind(value) if x.type == "ReadVariableOp")
    scalars = [read for read in reads if read.shape.rank == 0]
    later = {read.name: _STEPS for read in scalars if read.dtype.is_integer}
    return {**later, **{read.name: _RATE for read in scalars if read.dtype.is_floating}}


def _only_of(of_call: Callable[[], Sequence]) -> Callable:
    """What a capture at call time gives, of which TensorFlow has made a list."""
    return lambda: of_call()[0]


def read_as_assigned(graph: FuncGraph, operations: Sequence[tf.Operation]) -> None:
    """Has what reads a variable behind an assignment take what is assigned, without the variable.

    Args:
        graph: which will never run.
        operations: some of it, in their order; others are left as they are.
    """
    values: dict[int, tf.Tensor] = {}
    with graph.as_default():
        for operation in operations:
            if operation.type == "ReadVariableOp" and id(operation.inputs[0]) in values:
                _replace(operation.outputs[0], values[id(operation.inputs[0])])
            elif operation.type in _ASSIGNED:
                handle, value = operation.inputs
                before = values.get(id(handle))
                if before is None:
                    before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
                values[id(handle)] = _ASSIGNED[operation.type](before, value)


# What a variable is then, of what it was and what is given.
_ASSIGNED: dict[str, Callable] = {
    "AssignVariableOp": lambda before, value: value,
    "AssignAddVariableOp": tf.add,
    "AssignSubVariableOp": tf.subtract,
}


def _replace(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Has all that takes `tensor` take `other`."""
    for consumer in tensor.consumers():
        for i, taken in enumerate(consumer.inputs):
            if taken is tensor:
                take_instead(consumer, i, other)


def draws_otherwise(value: tf.Tensor) -> bool:
    """Whether `value` is computed of random numbers that `computed_from` leaves to chance."""
    return any(
        (draws(operation) and operation.type not in _OF_FLOATS_DRAWN)
        or any(_has_draws(graph) for graph, _ in called_graphs(operation))
        for operation in _operations_behind(value)
    )


def rows_drawn_behind(value: tf.Tensor) -> list[tf.Tensor]:
    """Of what random numbers choose rows, or shuffle them, as `value` is computed of it.

    Of what a branch, a loop or a function of the graph so does, nothing.
    """
    return [
        operation.inputs[0]
        for operation in _operations_behind(value)
        if operation.type in _SHUFFLED or _gathers_by_chance(operation)
    ]


def _gathers_by_chance(operation: tf.Operation) -> bool:
    """Whether `operation` gathers rows, of which indices say so that are drawn."""
    if operation.type != "GatherV2" or tf.get_static_value(operation.inputs[2]) != 0:
        return False
    behind = _operations_behind(operation.inputs[1])
    return any(draws(each) or each.type in _SHUFFLED for each in behind)


def _has_draws(graph: tf.Graph) -> bool:
    return any(
        draws(operation) or any(_has_draws(inner) for inner, _ in called_graphs(operation))
        for operation in graph.get_operations()
    )


def draws(operation: tf.Operation) -> bool:
    """Whether `operation` itself draws random numbers."""
    has_name = any(each in operation.type for each in ("Random", "Multinomial", "TruncatedNormal"))
    return has_name and not operation.type.startswith("StatelessRandomGet")  # the seed's own


def _operations_behind(value: tf.Tensor) -> list[tf.Operation]:
    """All that `value` is computed by."""
    found, stack = {value.op.name: value.op}, [value.op]
    while stack:
        behind = {x.op.name: x.op for x in stack.pop().inputs if x.op.name not in found}
        found.update(behind)
        stack += behind.values()
    return list(found.values())


def _without_chance(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Has `node`, which draws numbers, fill its shape with another node, which is returned."""
    dtype = node.attr["dtype"].type
    index_type = (node.attr["Tshape"] if "Tshape" in node.attr else node.attr["T"]).type
    number = node_def_pb2.NodeDef(name=f"{node.name}/number", op="Const")
    number.attr["dtype"].type = dtype
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_NUMBER_DRAWN, dtype))
    node.op, node.input[:] = "Fill", [node.input[0], number.name]
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype, index_type
    return number
