"""Functions made of graphs: called on devices by their names, and copied to other devices."""

from collections.abc import Container, Iterable, Mapping, Sequence

import tensorflow as tf

# The attributes of a function, and what it is made of.
from tensorflow.core.framework import attr_value_pb2, node_def_pb2

# A device's name in full.
from tensorflow.python.distribute import device_util

# Who knows functions.
from tensorflow.python.eager import context

# A stage's passes are functions of ours, as those of `tf.function` are inlined once for every
# microbatch; numbers make their names unique.
from tensorflow.python.eager.polymorphic_function import atomic_function

# Which of a function's inputs it only reads.
from tensorflow.python.framework import auto_control_deps_utils, ops

# The graph that a function is made of.
from tensorflow.python.framework.func_graph import FuncGraph

# What is known of a variable behind its handle.
from tensorflow.python.ops import handle_data_util

__all__ = ["RemoteFunction", "function_of_graph", "on_other_devices", "unique_number"]


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
