"""Where the operations of a step are, as TensorFlow has divided its graph between devices."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.ran_operations import Node, collected_graphs
from tfparallel.selftest.contenders import IN_ONE_PROCESS
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, compiled_model, data_of
from tfparallel.selftest.verdicts import CheckFailedError, Passed

# Those whose variables are on their devices.
_STRATEGIES = ("one_device", "mirrored", "sharded", "tensor_parallel", "pipeline_1f1b", "hybrid")
_TRIALS = [Trial(model, "uneven") for model in ("mlp", "convolutions", "gpt")]
_HOST = "/device:CPU:0"
_BACKWARD = "gradient_tape"  # the scope of what a tape adds
_NUMBER = re.compile(r"(_\d+)+$")
# The host's part in sending, wherever it is asked for.
_MOVES = {
    *("Const", "_EagerConst", "HostConst", "Identity", "IdentityN", "Snapshot", "NoOp"),
    *("_Arg", "_DeviceArg", "_Retval", "_DeviceRetval", "_Send", "_HostSend", "_Recv", "_HostRecv"),
    *("ReadVariableOp", "VarHandleOp", "PartitionedCall", "StatefulPartitionedCall", "RemoteCall"),
}
# Whether tokens and labels are in range (TensorParallelStrategy looks where they come from).
_CHECKS = {"Assert", "All", "GreaterEqual", "Greater", "Less", "LessEqual", "LogicalAnd"}
_CLOCK = {"Timestamp"}  # between the layers that a pipeline times
# The batch, its cut into rows of replicas, how many there are, and counters: beside the model.
_OF_ROWS = {
    *("Shape", "Size", "StridedSlice", "Slice", "Split", "SplitV", "ExpandDims", "Squeeze"),
    *("Pack", "Unpack", "ConcatV2", "GatherV2", "Range", "Reshape", "Cast", "AssignAddVariableOp"),
    *("Minimum", "Maximum", "AddV2", "Add", "AddN", "Sub", "Mul", "Sum", "FloorDiv", "FloorMod"),
    *("RealDiv", "DivNoNan", "SelectV2", "Equal", "NotEqual", "LogicalNot", "Any"),
}
_OF_DATA = re.compile(r".*(Dataset(V\d)?|Iterator(V\d)?|IteratorGetNext)|Optional.*")


def look_at_placement(bench: Bench) -> Passed:
    """The host has nothing of forward pass, backward pass and update but what it has to send."""
    open_devices()
    found = {
        f"{name}, {trial.model}": operations_on_host(name, trial, bench.devices)
        for name in _STRATEGIES
        for trial in _TRIALS
    }
    return judge_placement(found)


def judge_placement(on_host: Mapping[str, Sequence[str]]) -> Passed:
    """Whether no step has operations on the host that belong on a device.

    Args:
        on_host: such operations, by strategy and model.

    Raises:
        CheckFailedError: naming some of each.
    """
    wrong = [f"{name}: {', '.join(found[:4])}" for name, found in on_host.items() if found]
    if wrong:
        raise CheckFailedError(f"on the host: {'; '.join(wrong)}")
    return Passed(f"{len(on_host)} steps: the host cuts batches, counts, and computes nothing else")


def operations_on_host(strategy: str, trial: Trial, devices: Sequence[str]) -> list[str]:
    """What a step has on the host that belongs on one of its devices; names and types.

    Raises:
        CheckFailedError: if TensorFlow tells of no step on these devices.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with IN_ONE_PROCESS[strategy](devices).scope():
        model = compiled_model(trial)
    x, y, batch = data_of(trial)
    with collected_graphs() as nodes:
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    if not any("MatMul" in node.operation and _HOST not in node.device for node in nodes.values()):
        raise CheckFailedError(f"TensorFlow shows no step of {strategy} on {', '.join(devices)}")
    return list(misplaced(nodes, _scopes_of(model)))


def misplaced(nodes: Mapping[str, Node], scopes: Collection[str]) -> Iterator[str]:
    """Operations of the host that send nothing, check nothing and count no rows.

    Args:
        nodes: of graphs that were divided between devices, by name.
        scopes: of a model's layers, gradients and updates, without numbers behind them.
    """
    for name, node in nodes.items():
        if _HOST not in node.device or node.operation in _MOVES | _CHECKS | _CLOCK:
            continue
        of_model = {_NUMBER.sub("", part) for part in name.split("/")[:-1]} & set(scopes)
        of_batch = node.operation in _OF_ROWS or _OF_DATA.fullmatch(node.operation)
        if of_model or not of_batch:
            yield f"{node.operation} ({name})"


def _scopes_of(model: keras.Model) -> set[str]:
    named: Iterable[keras.layers.Layer | keras.Optimizer | tf.Module]
    named = (model, *layers_of(model), model.optimizer)
    return {_BACKWARD, *(_NUMBER.sub("", each.name) for each in named)}
