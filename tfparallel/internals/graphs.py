"""Graphs of TensorFlow under construction: functions, order, devices, gradients between graphs."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FrameType

import tensorflow as tf

# The attributes of a function, and what it is made of.
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

# A device's name in full.
from tensorflow.python.distribute import device_util

# Who knows functions.
from tensorflow.python.eager import context

# Functions of graphs. A stage's passes are functions of ours, as those of `tf.function` are inlined
# once for every microbatch; numbers make their names unique.
from tensorflow.python.eager.polymorphic_function import atomic_function, polymorphic_function

# Which of a function's inputs it only reads.
from tensorflow.python.framework import auto_control_deps_utils, ops

# The graph of a `tf.function` that is being traced.
from tensorflow.python.framework.func_graph import FuncGraph

# The gradient of one graph built in another; what is known of a variable behind its handle; what a
# branch of `tf.cond` is traced in.
from tensorflow.python.ops import (
    control_flow_v2_func_graphs,
    gradients_util,
    handle_data_util,
)

from tfparallel.internals.running_call import RunningCall

__all__ = [
    "FuncGraph",
    "RemoteFunction",
    "add_function",
    "branches_of",
    "call_one_branch",
    "call_that_traces",
    "call_with_captures",
    "captures_through",
    "changed_variables",
    "dtype_behind",
    "function_of_graph",
    "functions_of",
    "gradients_in_graph",
    "is_branch",
    "is_stateful",
    "never_bypass",
    "on_other_devices",
    "only_wait_for",
    "place",
    "run_after",
    "run_independently",
    "take_instead",
    "unique_number",
    "with_body",
]


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


def function_of_graph(
    name: str, graph: FuncGraph, operations: Sequence[tf.Operation] | None = None
) -> atomic_function.AtomicFunction:
    """`graph`, or these `operations` of it, as a function; no call of it is inlined.

    Its `ends` are what it takes and returns: `graph` may be made another function of later.
    """
    own = graph.get_operations() if operations is None else list(operations)
    attributes = {"_noinline": attr_value_pb2.AttrValue(b=True)}
    # TensorFlow makes a function of all operations, also of placeholders that nobody fills.
    graph.get_operations = lambda: own
    try:
        function = atomic_function.from_func_graph(name, graph, attributes)
    finally:
        del graph.get_operations
    function.ends = list(graph.inputs), list(graph.outputs)
    return function


class MovedFunction(atomic_function.AtomicFunction):
    """A copy of a function on other devices, which nobody has traced.

    Its `graph` is the original's, with the original's devices.

    Attributes:
        devices: for each device in the graph the one that does here what it does there. What takes
            a variable of the caller is where that is, whatever the graph says.
    """

    def __init__(
        self,
        original: atomic_function.AtomicFunction,
        name: str,
        children: Sequence[atomic_function.AtomicFunction],
        devices: Mapping[str, str],
    ):
        kind, options = original.function_type, original.call_options
        super().__init__(name, context.context(), kind, list(children), options, original.graph)
        graph = original.graph
        self.devices = devices
        self.ends = getattr(original, "ends", (graph.inputs, graph.outputs))  # a program's has none


def on_other_devices(
    function: atomic_function.AtomicFunction, devices: Mapping[str, str]
) -> MovedFunction:
    """`function`, and all that it calls, with other devices written into it.

    Args:
        function: to be copied.
        devices: full names, as `MovedFunction` has them.
    """
    every = [*function.children, function]
    names = {each.name.decode(): f"{each.name.decode()}_{ops.uid()}" for each in every}
    copies: list[MovedFunction] = []
    for each in every:  # itself last
        definition = each.definition
        definition.signature.name = name = names[each.name.decode()]
        kind, inputs = tf.resource.as_datatype_enum, definition.signature.input_arg
        resources = {argument.name for argument in inputs if argument.type == kind}
        for node in definition.node_def:
            _move(node, devices, names, resources)
        context.context().add_function_def(definition)
        copies.append(MovedFunction(each, name, copies, devices))
    return copies[-1]


def _move(
    node: node_def_pb2.NodeDef,
    devices: Mapping[str, str],
    names: Mapping[str, str],
    resources: Container[str],
) -> None:
    called = [own for x in node.attr.values() for own in (x.func, *x.list.func) if own.name]
    for each in called:
        each.name = names.get(each.name, each.name)
    is_of_variable = not called and any(name in resources for name in node.input)
    node.device = "" if is_of_variable else devices.get(node.device, node.device)


class RemoteFunction:
    """A function, to be called on devices by their names.

    `RemoteCall` and not `PartitionedCall`: a function called by the latter shares its caller's
    cancellation, so that an error in it cancels the caller before the caller has heard of it, and
    the caller reports "RecvAsync is cancelled" instead of the error.

    A pipeline calls a function for every microbatch: what its calls share is worked out once.
    """

    def __init__(self, function: atomic_function.AtomicFunction):
        self._function = function
        self._dtypes = [output.dtype for output in function.function_type.flat_outputs]
        self._name = function.name.decode()
        graph = function.graph
        # As TensorFlow does for its own calls: those that only read a variable need no order.
        indices = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
        read_only = [1 + index for index in indices]  # behind the name of the device
        name = attr_value_pb2.NameAttrList(name=function.name)
        integers = attr_value_pb2.AttrValue.ListValue(i=read_only)
        self._attributes = {
            "f": attr_value_pb2.AttrValue(func=name),
            "Tin": _type_list([tensor.dtype for tensor in graph.inputs]),
            "Tout": _type_list(self._dtypes),
            auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR: attr_value_pb2.AttrValue(
                list=integers
            ),
        }

    def __call__(self, device: str, arguments: Sequence) -> list:
        """Adds a call on `device`, a full name, to the graph under construction."""
        graph = ops.get_default_graph()
        graph._add_function_recursive(self._function)
        arguments = [x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x) for x in arguments]
        with tf.device(device):
            operation = graph._create_op_internal(
                "RemoteCall",
                [_device_name_in(graph, device), *arguments],
                self._dtypes,
                name=self._name,
                attrs=self._attributes,
            )
        for output, like in zip(operation.outputs, self._function.graph.outputs, strict=True):
            if like.shape.rank is not None:
                output.set_shape(like.shape)
            if like.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(like, output)
        return list(operation.outputs)


def _device_name_in(graph: ops.Graph, device: str) -> tf.Tensor:
    """A constant of `graph` beside the device that it names: GPUs have no strings."""
    names = getattr(graph, "_tfparallel_device_names", None)
    if names is None:
        names = graph._tfparallel_device_names = {}
    if device not in names:
        host = device_util.canonicalize("/device:CPU:0", device)
        with graph.as_default(), tf.device(host), tf.control_dependencies(None):
            names[device] = tf.constant(device)
    return names[device]


def _type_list(dtypes: Iterable) -> attr_value_pb2.AttrValue:
    types = [dtype.as_datatype_enum for dtype in dtypes]
    return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(type=types))


def unique_number() -> int:
    """A number that no other function's name ends with."""
    return ops.uid()
