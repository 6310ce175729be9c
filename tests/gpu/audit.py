"""What a traced step does on GPUs, found without one: kernels, places in memory, copies.

Logical CPUs stand in for GPUs: CPU:1 is GPU:0, CPU:2 is GPU:1, and CPU:0 is the host. Every
operation is looked up in the kernels of TensorFlow's CUDA wheel (`kernels_2.21.json.gz`, a dump of
its registry), which say whether there is one for a GPU, and which of its arguments and results are
in the host's memory. A tensor that is wanted in another memory is a copy, one for each memory
however many operations there want it, as TensorFlow sends it.

The graph is read as it is traced. What TensorFlow folds before it runs, constants and what is
computed of them and of known shapes (`folding.py`), is in every memory that wants it. Of a graph
that several functions are made of, as a stage's, each has a part: only what its results need.
"""

import collections
import functools
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf

from tests.gpu.folding import Folded

_KERNELS = Path(__file__).with_name("kernels_2.21.json.gz")
_FUNCTIONAL = {
    *("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
}
_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
# Built with NCCL; of the rest `splits` and `received_splits` alone are on the host (mpi_ops.cc).
_OF_HOROVOD = {
    *("HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodGroupedAllgather"),
    *("HorovodBroadcast", "HorovodReducescatter", "HorovodAlltoall"),
}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}  # whose first input is the condition
_IN_HOST_MEMORY = {tf.string, tf.resource}
DIRECTIONS = ("to_device", "to_host", "between_devices")
HOST = "HOST"
GPU_0 = "/job:localhost/replica:0/task:0/device:CPU:1"


@dataclass
class Audit:
    """What was found.

    Attributes:
        copies: by direction (`to_device`, `to_host`, `between_devices`) and edge (types of both
            operations, type of the tensor), how many.
        without_kernel: operations asked for on a GPU that have no kernel there, with types.
        waits: operations of the host that come behind one of a GPU, with types: TensorFlow sends
            nothing from there, and waits for all that the GPU was given (`gpu_util.cc`).
        python_calls: operations that run Python.
        narrow_remote_calls: int32 arguments and results of `RemoteCall`s on GPUs.
        collectives: of each kind, its device and hint.
    """

    copies: dict[str, collections.Counter] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    without_kernel: collections.Counter = field(default_factory=collections.Counter)
    waits: collections.Counter = field(default_factory=collections.Counter)
    python_calls: list = field(default_factory=list)
    narrow_remote_calls: list = field(default_factory=list)
    collectives: collections.Counter = field(default_factory=collections.Counter)

    def totals(self) -> dict[str, int]:
        """The number of copies in each direction."""
        return {direction: self.copies[direction].total() for direction in DIRECTIONS}

    def row(self) -> dict:
        """What the committed table says of a step: its copies, and its collectives if it has any.

        A collective is named with its device and hint.
        """
        row: dict = self.totals()
        return {**row, "collectives": dict(self.collectives)} if self.collectives else row

    def faults(self) -> dict[str, list]:
        """What no step may have, by what it does on a GPU."""
        found = {
            "int32 through a RemoteCall, a crash": self.narrow_remote_calls,
            "no kernel on a GPU, where it is asked for": list(self.without_kernel),
            "runs Python": self.python_calls,
        }
        return {what: operations for what, operations in found.items() if operations}


def audit(
    graph: tf.Graph, placed: Mapping[tf.Operation, str] | None = None, default: str = GPU_0
) -> Audit:
    """The audit of a step's graph, and of all functions that it calls.

    Args:
        graph: of the step, whose arguments are on the host.
        placed: arguments that are on devices already, with their devices.
        default: where TensorFlow puts what nobody has placed.
    """
    result = Audit()
    _audit_graph(graph, default, dict(placed or {}), result, is_step=True)
    return result


def _audit_graph(
    graph, default: str, given: dict, result: Audit, is_step: bool = False, is_part: bool = False
) -> None:
    devices = _places(graph, default, given, result)
    on_host = {each for each in graph.get_operations() if is_step and each not in given}
    memory, folded, sent = functools.partial(_memory, devices, on_host), Folded(), set()
    operations = _needed(graph) if is_part else graph.get_operations()
    for operation in operations:
        _look_at_operation(operation, devices[operation], result)
        if folded.is_constant(operation):
            continue
        constants = [x.op for x in operation.inputs if folded.is_constant(x.op)]
        for before in [x for each in (operation, *constants) for x in each.control_inputs]:
            if is_stand_in(devices[before]) and not is_stand_in(devices[operation]):
                result.waits[f"{before.type} -> {operation.type}"] += 1
        for i, tensor in enumerate(operation.inputs):
            source = memory(tensor.op, tensor.value_index, False)
            target = memory(operation, i, True)
            is_copy = source != target and not folded.is_constant(tensor.op)
            if is_copy and (tensor.ref(), target) not in sent:
                sent.add((tensor.ref(), target))
                edge = f"{tensor.op.type} -> {operation.type} ({tensor.dtype.name})"
                result.copies[_direction(source, target)][edge] += 1
    for operation, called, inputs in _calls(graph, operations):
        pairs = zip(inputs, called.graph.inputs, strict=False)
        handles = {b.op: devices[a.op] for a, b in pairs if a.dtype == tf.resource}
        is_of_part = is_part or hasattr(called, "ends")  # by `function_of_graph`
        _audit_graph(called.graph, devices[operation], handles, result, is_part=is_of_part)


def _needed(graph) -> list[tf.Operation]:
    """The operations that results need, and those with effects: TensorFlow prunes others."""
    todo = [*(x.op for x in graph.outputs), *graph.control_outputs]
    todo += [each for each in graph.get_operations() if each.op_def.is_stateful]
    found = set(todo)
    while todo:
        operation = todo.pop()
        before = {*(x.op for x in operation.inputs), *operation.control_inputs} - found
        found |= before
        todo += before
    return [each for each in graph.get_operations() if each in found]


def _places(graph, default: str, given: dict, result: Audit) -> dict:
    """The device of each operation: those of a resource are where it is."""
    captures = [(a, b) for a, b in getattr(graph, "captures", []) if b.dtype == tf.resource]
    fixed = {b.op: a.device for a, b in captures if a.device} | given
    devices: dict = {}
    for operation in graph.get_operations():
        device = fixed.get(operation, operation.device)
        if operation.type not in _FUNCTIONAL | {"RemoteCall"}:
            handles = [x.op for x in operation.inputs if x.dtype == tf.resource and x.op in fixed]
            device = fixed[handles[0]] if handles else device
        device = device if tf.DeviceSpec.from_string(device).device_type else default
        if is_stand_in(device) and _host_arguments(operation) is None:
            types = {x.dtype.name for x in [*operation.inputs, *operation.outputs]}
            result.without_kernel[f"{operation.type}({', '.join(sorted(types))})"] += 1
            device = "/device:CPU:0"
        devices[operation] = device
    return devices


def _look_at_operation(operation, device: str, result: Audit) -> None:
    if operation.type in _PYTHON:
        result.python_calls.append(operation.name)
    if "Collective" in operation.type or operation.type in _OF_HOROVOD:
        is_stock = "Collective" in operation.type
        hint = operation.get_attr("communication_hint").decode() if is_stock else "horovod"
        result.collectives[f"{operation.type} on {_name(device)}, {hint}"] += 1
    if operation.type == "RemoteCall" and is_stand_in(device):
        tensors = [*operation.inputs[1:], *operation.outputs]
        result.narrow_remote_calls += [x.name for x in tensors if x.dtype == tf.int32]


def _memory(devices: dict, on_host: set, operation, index: int, is_input: bool) -> str:
    """Where an argument or a result of an operation is: the host, or a GPU's name."""
    device = devices[operation]
    dtype = (operation.inputs if is_input else operation.outputs)[index].dtype
    if not is_stand_in(device) or dtype in _IN_HOST_MEMORY:
        return HOST
    if operation.type == "Placeholder":
        return HOST if operation in on_host or dtype == tf.int32 else _name(device)
    if operation.type in _FUNCTIONAL:
        return HOST if dtype == tf.int32 else _name(device)
    names = _argument_names(operation, is_input)
    return HOST if names[index] in (_host_arguments(operation) or ()) else _name(device)


def _argument_names(operation, is_input: bool) -> list[str]:
    definition = operation.op_def
    names = []
    for argument in definition.input_arg if is_input else definition.output_arg:
        attributes = operation.node_def.attr
        count = attributes[argument.number_attr].i if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(attributes[argument.type_list_attr].list.type)
        names += [argument.name] * count
    return names


def _host_arguments(operation) -> list[str] | None:
    """Names of the arguments in the host's memory of the GPU's kernel; None without a kernel."""
    if operation.type in _FUNCTIONAL | {"Placeholder", "NoOp", "RemoteCall"}:
        return []
    if operation.type in _OF_HOROVOD:
        return ["splits", "received_splits"]
    known = _kernels().get(operation.type, ())
    for wanted in ("GPU", "DEFAULT"):
        for device, constraints, host_arguments, _ in known:
            if device == wanted and _is_met(operation, constraints):
                return host_arguments
    return None


def _is_met(operation, constraints: dict[str, list[str]]) -> bool:
    for name, allowed in constraints.items():
        if not allowed:  # of something else than a type, which the dump does not tell
            continue
        value = operation.node_def.attr[name]
        types = value.list.type if value.WhichOneof("value") == "list" else [value.type]
        if not {tf.as_dtype(each).name for each in types} <= set(allowed):
            return False
    return True


def _calls(graph, operations: Sequence) -> Iterator[tuple]:
    """Each operation that calls a function, the function, and what it is given."""
    functions = {function.name: function for function in graph._functions.values()}
    for operation in operations:
        if operation.type not in _FUNCTIONAL | {"RemoteCall"}:
            continue
        has_first = operation.type in _BRANCHES or operation.type == "RemoteCall"
        inputs = list(operation.inputs)[1 if has_first else 0 :]
        for attribute in operation.node_def.attr.values():
            own = [attribute.func.name] if attribute.HasField("func") else []
            own += [each.name for each in attribute.list.func]
            for name in own:
                yield operation, functions[name.encode()], inputs


@functools.cache
def _kernels() -> dict:
    return json.loads(gzip.decompress(_KERNELS.read_bytes()))


def is_stand_in(device: str) -> bool:
    """Whether a device stands in for a GPU."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type == "CPU" and (spec.device_index or 0) > 0


def _name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return f"GPU:{spec.device_index - 1}" if is_stand_in(device) else HOST


def _direction(source: str, target: str) -> str:
    if source == HOST:
        return "to_device"
    return "to_host" if target == HOST else "between_devices"
