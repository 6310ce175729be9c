"""Graphs of TensorFlow under construction: order, devices, branches, gradients between graphs."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import FrameType

import tensorflow as tf

# The attributes of an operation.
from tensorflow.core.framework import attr_value_pb2

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
    "called_graphs",
    "call_that_traces",
    "call_with_captures",
    "captures_through",
    "changed_variables",
    "dtype_behind",
    "functions_of",
    "gradients_in_graph",
    "is_branch",
    "is_stateful",
    "never_bypass",
    "only_wait_for",
    "place",
    "run_after",
    "run_independently",
    "take_instead",
    "with_body",
]


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
    """The graphs of functions, branches and loops that `operation` runs, and what each takes.

    TensorFlow keeps no graph of its oldest functions, of which `tf.nn.ctc_loss` has loops.
    """
    names = []
    for attribute in operation.node_def.attr.values():
        names += [each.name for each in (attribute.func, *attribute.list.func) if each.name]
    given = list(operation.inputs)
    given = given[1:] if operation.type in CHOICES else given
    known = [operation.graph._get_function(name) for name in names]
    graphs = [each.graph for each in known if hasattr(each, "graph")]
    return [(graph, given) for graph in graphs if len(graph.inputs) == len(given)]


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
    with tf.device(None), _without_gradients_of_others(source, xs):
        return gradients_util._GradientsHelper(
            ys, xs, grad_ys=dys, colocate_gradients_with_ops=is_spread, src_graph=source
        )


@contextlib.contextmanager
def _without_gradients_of_others(graph: FuncGraph, xs: Sequence) -> Iterator[None]:
    """Within it, gradients of an operation are of what `xs` lead to among its inputs, only.

    A tape tells operations so; TensorFlow's `gradients` does not. It then makes what nobody reads,
    of a constant factor, say, and an RNN keeps int32 of each turn for the gradient of its data.
    A `StopGradient` leads nowhere.
    """
    reached, told = set(map(id, xs)), []
    for operation in graph.get_operations():
        others = [i for i, x in enumerate(operation.inputs) if id(x) not in reached]
        if len(others) < len(operation.inputs) and operation.type != "StopGradient":
            reached.update(map(id, operation.outputs))
            operation.skip_input_indices = tuple(others)
            told.append(operation)
    try:
        yield
    finally:
        for operation in told:
            del operation.skip_input_indices
