"""Graphs of TensorFlow under construction: order, devices, branches, gradients between graphs."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import FrameType

import tensorflow as tf

# The attributes of an operation.
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

# Who traces a `tf.function`.
from tensorflow.python.eager.polymorphic_function import polymorphic_function

# Which of a function's inputs it only reads.
from tensorflow.python.framework import auto_control_deps_utils

# The graph of a `tf.function` that is being traced.
from tensorflow.python.framework.func_graph import FuncGraph

# What a branch of `tf.cond` is traced in; the gradient of one graph built in another.
from tensorflow.python.ops import control_flow_v2_func_graphs, gradients_util

from tfparallel.internals.running_call import RunningCall

__all__ = [
    "CHOICES",
    "FuncGraph",
    "add_function",
    "branches_of",
    "call_one_branch",
    "called_graphs",
    "call_that_traces",
    "call_with_captures",
    "captures_through",
    "changed_variables",
    "computed_from",
    "draws_otherwise",
    "dtype_behind",
    "functions_of",
    "gradients_in_graph",
    "is_branch",
    "is_stateful",
    "never_bypass",
    "only_wait_for",
    "place",
    "read_as_assigned",
    "run_after",
    "run_independently",
    "take_instead",
    "with_body",
]


# Operations that draw floating-point numbers of a shape, which comes first.
_OF_FLOATS_DRAWN = (
    *("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"),
    *("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal"),
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal"),
)
_NUMBER_DRAWN = 0.9  # above most rates of Dropout, which keeps all then

CHOICES = "If", "StatelessIf", "Case", "StatelessCase"  # their first input chooses


def call_with_captures(
    concrete: tf.types.experimental.ConcreteFunction, inputs: Sequence, captures: Sequence
) -> list[tf.Tensor]:
    """`concrete(*inputs)`, with other tensors in the place of those that it has captured."""
    return concrete._call_flat(list(inputs), captured_inputs=list(captures))


def run_after(operation: tf.Operation, before: tf.Operation) -> None:
    """Has `operation`, which exists, wait for `before`; they are of one graph."""
    operation._add_control_input(before)


def only_wait_for(operation: tf.Operation, others: Container[tf.Operation]) -> None:
    """Has `operation`, which exists, wait for none but `others`, beside what it takes."""
    before = operation.control_inputs
    kept = [each for each in before if each in others]
    if len(kept) < len(before):
        operation._remove_all_control_inputs()
        operation._add_control_inputs(kept)


def take_instead(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Has `operation`, which exists, take `tensor` of the same graph as its input at `index`."""
    operation._update_input(index, tensor)


def place(operation: tf.Operation, device: str) -> None:
    """Puts `operation`, which exists, on `device`."""
    operation._set_device(device)


def never_bypass(operation: tf.Operation) -> None:
    """Has TensorFlow run `operation`, a copy to another device, though it comes back from there.

    Its optimizer takes such copies for detours, and has what reads the copy read the original.
    """
    operation._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))


def call_one_branch(branch_index: tf.Tensor, branches: Sequence[Callable]) -> object:
    """`tf.switch_case` whose branches are functions that are called, not laid out in the graph.

    TensorFlow lays them out, and then skips the operations of all the others one by one, in each
    step. What it calls has to be on one device, so that where there are GPUs they are laid out.
    Of what is called, only functions that it calls in turn get oneDNN's kernels: without them a
    product of matrices takes six times as long.
    """
    is_called = tf.inside_function() and not tf.config.list_logical_devices("GPU")
    if is_called:
        branches = [tf.function(branch, autograph=False) for branch in branches]
    results = tf.switch_case(branch_index, branches)
    if is_called:
        operation = tf.nest.flatten(results)[0].op
        while operation.type == "Identity":
            operation = operation.inputs[0].op
        operation._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))
    return results


def is_stateful(operation: tf.Operation) -> bool:
    """Whether `operation` may give another result when it runs again."""
    return operation._is_stateful


def is_branch(graph: tf.Graph) -> bool:
    """Whether `graph` is traced for a branch of `tf.cond`."""
    return isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def branches_of(operation: tf.Operation) -> tuple[FuncGraph, ...]:
    """The graphs of what `tf.cond` runs one of, which take its inputs but the first; else none."""
    if operation.type not in ("If", "StatelessIf"):
        return ()
    return operation._true_graph, operation._false_graph


def called_graphs(operation: tf.Operation) -> list[tuple[FuncGraph, list[tf.Tensor]]]:
    """The graphs of functions, branches and loops that `operation` runs, and what each takes."""
    names = []
    for attribute in operation.node_def.attr.values():
        names += [each.name for each in (attribute.func, *attribute.list.func) if each.name]
    given = list(operation.inputs)
    given = given[1:] if operation.type in CHOICES else given
    known = [operation.graph._get_function(name) for name in names]
    return [(each.graph, given) for each in known if len(each.graph.inputs) == len(given)]


def computed_from(graph: FuncGraph, inputs: Sequence[tf.Tensor], value: tf.Tensor) -> Callable:
    """What computes `value` of `graph` of other tensors for `inputs`, and changes nothing.

    Random numbers are all one number there, so that they do not depend on how many are drawn.

    Args:
        graph: which is not a function yet, of variables from outside.
        inputs: placeholders of it, which are computed for other numbers of rows, too.
        value: which no branch, loop or function holds.

    Returns:
        A function of a list of tensors.
    """
    needed = {operation.name for operation in _operations_behind(value)}
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in needed]
    for node in nodes:  # what only has to have happened before is left out
        node.input[:] = [name for name in node.input if not name.startswith("^")]
    nodes += [_without_chance(node) for node in nodes if node.op in _OF_FLOATS_DRAWN]
    kept = type(definition)(node=nodes, library=definition.library, versions=definition.versions)
    captured = [(inner, outer) for outer, inner in graph.captures]
    inner_of_calls, of_calls = graph.deferred_internal_captures, graph.deferred_external_captures

    def compute(tensors: Sequence) -> tf.Tensor:
        pairs = [*zip(inputs, tensors, strict=True), *captured]
        into = tf.compat.v1.get_default_graph()
        given = {inner.name: into.capture(x) for inner, x in pairs if inner.op.name in needed}
        for inner, of_call in zip(inner_of_calls, of_calls, strict=True):  # keys of collectives
            if inner.op.name in needed:
                spec = tf.TensorSpec(inner.shape, inner.dtype)
                given[inner.name] = into.capture_call_time_value(_only_of(of_call), spec)
        return tf.import_graph_def(kept, given, [value.name])[0]

    specs = [tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else [], x.dtype) for x in inputs]
    return tf.function(compute, [specs], autograph=False)


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
        (_draws(operation) and operation.type not in _OF_FLOATS_DRAWN)
        or any(_has_draws(graph) for graph, _ in called_graphs(operation))
        for operation in _operations_behind(value)
    )


def _has_draws(graph: tf.Graph) -> bool:
    return any(
        _draws(operation) or any(_has_draws(inner) for inner, _ in called_graphs(operation))
        for operation in graph.get_operations()
    )


def _draws(operation: tf.Operation) -> bool:
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


def functions_of(graph: tf.Graph) -> list:
    """The functions that are known to `graph`."""
    return list(graph._functions.values())


def add_function(graph: tf.Graph, function: object) -> None:
    """Makes a function, and all that it calls, known to `graph`."""
    graph._add_function_recursive(function)


def dtype_behind(handle: tf.Tensor) -> tf.DType | None:
    """Of the variable behind a resource; None for resources that are no variables."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


class UnconvertedError(RuntimeError):
    """What AutoGraph raises as it is; of a class that it does not know it makes another error."""

    ag_pass_through = True


def with_body(
    function: tf.types.experimental.PolymorphicFunction, body: Callable, signature: Sequence | None
) -> object:
    """`function`, a `tf.function`, with all its options but another body and input signature."""
    return polymorphic_function.Function(
        python_function=body,
        name=function._name,
        input_signature=signature,
        autograph=function._autograph,
        jit_compile=function._jit_compile,
        reduce_retracing=function._reduce_retracing,
        experimental_attributes=function._attributes,
        experimental_autograph_options=function._experimental_autograph_options,
    )


@contextlib.contextmanager
def captures_through(graph: FuncGraph, hook: Callable) -> Iterator[None]:
    """Within it, what `graph` takes from outside goes through `hook(capture, tensor, *args)`.

    A graph has no `__dict__`, so that this is no hook as `hooks.py` makes them.
    """
    graph.capture = functools.partial(hook, graph.capture)
    try:
        yield
    finally:
        del graph.capture


def call_that_traces() -> RunningCall | None:
    """The outermost call of a `tf.function` that this thread is in; None if there is none.

    It is traced, optimised, and run.
    """
    outermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else RunningCall(outermost)


_CALL = inspect.unwrap(polymorphic_function.Function.__call__).__code__


def run_independently(graph: FuncGraph, operations: Iterable) -> None:
    """Lets stateful `operations` of a function under construction run in any order.

    TensorFlow would make operations without a resource follow one another as they were traced. Who
    builds a function's control dependencies is known only to the frame that traces it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        manager = frame.f_locals.get("deps_control_manager")
        if frame.f_locals.get("func_graph") is graph and manager is not None:
            for operation in operations:
                manager.run_independently(operation)
            return
        frame = frame.f_back


def changed_variables(graph: FuncGraph) -> list[tuple[tf.Tensor, tf.DType]]:
    """Handle and type of each variable that a function takes from outside and may assign."""
    outside = {id(inner): outer for outer, inner in graph.captures if inner.dtype == tf.resource}
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    inputs = [x for i, x in enumerate(graph.inputs) if id(x) in outside and i not in read_only]
    handles = [outside[id(x)] for x in inputs]
    kinds = [handle._handle_data.shape_and_type for handle in handles]
    pairs = zip(handles, kinds, strict=True)
    return [(x, tf.as_dtype(kind[0].dtype)) for x, kind in pairs if kind]  # a table has none


def gradients_in_graph(ys: Sequence, xs: Sequence, dys: Sequence, source: FuncGraph) -> list:
    """Gradients of `ys` with respect to `xs`, both of `source`, in the graph under construction.

    Where `source` is on several devices, the gradient of an operation is on the operation's.
    """
    is_spread = len({op.device for op in source.get_operations()} - {""}) > 1
    with tf.device(None), _loops_without_gradients_of_others(source, xs):
        return gradients_util._GradientsHelper(
            ys, xs, grad_ys=dys, colocate_gradients_with_ops=is_spread, src_graph=source
        )


@contextlib.contextmanager
def _loops_without_gradients_of_others(graph: FuncGraph, xs: Sequence) -> Iterator[None]:
    """Within it, the gradient of a loop is of what `xs` lead to among what the loop takes, only.

    A tape tells the loop so; TensorFlow's `gradients` does not, and an RNN then keeps int32 of each
    turn for the gradient of its data.
    """
    reached, loops = set(map(id, xs)), []
    for operation in graph.get_operations():
        others = [i for i, x in enumerate(operation.inputs) if id(x) not in reached]
        if len(others) < len(operation.inputs):
            reached.update(map(id, operation.outputs))
        if operation.type in ("While", "StatelessWhile"):
            operation.skip_input_indices = tuple(others)
            loops.append(operation)
    try:
        yield
    finally:
        for operation in loops:
            del operation.skip_input_indices
