"""Floating-point operations of a training step of a model, counted from its graph.

Products and convolutions count, forward and backward, two operations for each multiplication with
its addition; what is elementwise does not, nor what rematerialisation does again, nor the loss: the
operations that the model needs, as in Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals.graphs import functions_of


def flops_of_step(model: keras.Model, inputs: object) -> int:
    """Of a forward and a backward pass.

    Args:
        model: built; nothing of it is run or changed.
        inputs: a nest of `tf.TensorSpec` of whole shapes, `[rows, ...]`.

    Raises:
        ValueError: where the graph does not tell how large something is.
    """
    weights = [_spec(variable) for variable in model.trainable_variables]
    states = [_spec(variable) for variable in model.non_trainable_variables]

    @tf.function(autograph=False)
    def passes(weights: list, states: list, inputs: object) -> list:
        outputs, _ = model.stateless_call(weights, states, inputs, training=True)
        floats = [y for y in keras.tree.flatten(outputs) if y.dtype.is_floating]
        return [*floats, *(g for g in tf.gradients(floats, weights) if g is not None)]

    return flops_of_graph(passes.get_concrete_function(weights, states, inputs).graph)


def _spec(variable: keras.Variable) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)


def flops_of_graph(graph: object) -> int:
    """Of all operations of a `FuncGraph`, and of the functions that they call.

    Raises:
        ValueError: for shapes that are not known, and loops that do not tell how often they run.
    """
    functions: dict[str, Any] = {}
    return _Count(functions).of(graph)


_SAME = ("Cast", "Identity", "Max")  # of a scalar


class _Count:
    """Counts graphs whose functions may be in the graphs around them.

    Args:
        functions: known so far, by name.
    """

    def __init__(self, functions: Mapping[str, tf.types.experimental.ConcreteFunction]):
        self._functions = dict(functions)

    def of(self, graph: object) -> int:
        for each in functions_of(graph):
            name = each.name.decode() if isinstance(each.name, bytes) else each.name
            self._functions[name] = each
        return sum(self._of_operation(operation) for operation in _needed(graph))

    def _of_operation(self, operation: tf.Operation) -> int:
        if operation.type in _COUNTS:
            return _COUNTS[operation.type](operation)
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            return self._of_function(operation.get_attr("f"))
        if operation.type in ("While", "StatelessWhile"):
            each = self._of_function(operation.get_attr("body"))
            return each * _times(operation) if each else 0
        if operation.type in ("If", "StatelessIf"):
            branches = (operation.get_attr(name) for name in ("then_branch", "else_branch"))
            return max(self._of_function(each) for each in branches)
        return 0

    def _of_function(self, attribute: Any) -> int:
        function = self._functions.get(attribute.name)
        return 0 if function is None else _Count(self._functions).of(function.graph)


def _needed(graph: tf.Graph) -> set[tf.Operation]:
    """What the outputs are made of: gradients that nobody takes are in a graph, too."""
    waiting = [tensor.op for tensor in graph.outputs]
    found: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [*operation.control_inputs, *(each.op for each in operation.inputs)]
    return found


def _times(loop: tf.Operation) -> int:
    """How often a loop runs: its bound is its second input; that of its gradient is its own end."""
    bound = loop.inputs[1]
    if bound.op.type in ("While", "StatelessWhile"):
        return _times(bound.op)
    while (times := tf.get_static_value(bound)) is None and bound.op.type in _SAME:
        bound = bound.op.inputs[0]
    if times is None or times < 0:
        raise ValueError(
            "Operations are counted from a graph whose loops say how often they run. Received: "
            f"{loop.name} with an unknown number of rounds. Give inputs a fixed length."
        )
    return int(times)


def _size(tensor: tf.Tensor) -> int:
    return math.prod(_shape(tensor))


def _shape(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            "Operations are counted from a graph whose shapes are known. Received: "
            f"{tensor.name} of shape {tensor.shape}. Give inputs a fixed shape."
        )
    return tensor.shape.as_list()


def _product(operation: tf.Operation, transposed: str) -> int:
    """`[..., m, k] x [..., k, n]`: 2 m n k."""
    left = _shape(operation.inputs[0])
    inner = left[-2] if operation.get_attr(transposed) else left[-1]
    return 2 * _size(operation.outputs[0]) * inner


def _einsum(operation: tf.Operation) -> int:
    """A sum over all labels of two operands."""
    if len(operation.inputs) != 2:
        return 0
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.split("->")[0].split(","), operation.inputs, strict=True):
        shape = _shape(tensor)
        before, dots, after = labels.partition("...")
        named = [*before, *(f".{i}" for i in range(len(shape) - len(before) - len(after)))]
        names = [*named, *after] if dots else [*labels]
        sizes.update(zip(names, shape, strict=True))
    return 2 * math.prod(sizes.values())


def _convolution(operation: tf.Operation, image: int, kernel: int | None) -> int:
    """Each place of the smaller image meets the kernel, of `[*places, inputs, outputs]`.

    Args:
        operation: any of the three products of a convolution.
        image: which input is the output's image, or its gradient; -1 is the output itself.
        kernel: which input the kernel is; None is the output itself.
    """
    places = _size(operation.outputs[0] if image < 0 else operation.inputs[image])
    shape = _shape(operation.outputs[0] if kernel is None else operation.inputs[kernel])
    return 2 * places * math.prod(shape[:-1])


def _depthwise(operation: tf.Operation, image: int, kernel: int | None) -> int:
    """As a convolution whose outputs see one channel each."""
    places = _size(operation.outputs[0] if image < 0 else operation.inputs[image])
    shape = _shape(operation.outputs[0] if kernel is None else operation.inputs[kernel])
    return 2 * places * math.prod(shape[:-2])


_part = functools.partial
_COUNTS: Mapping[str, Callable[[tf.Operation], int]] = {
    "MatMul": _part(_product, transposed="transpose_a"),
    "BatchMatMul": _part(_product, transposed="adj_x"),
    "BatchMatMulV2": _part(_product, transposed="adj_x"),
    "BatchMatMulV3": _part(_product, transposed="adj_x"),
    "Einsum": _einsum,
    **{
        f"Conv{dims}D{suffix}": _part(_convolution, image=image, kernel=kernel)
        for dims, version in ((2, ""), (3, "V2"))
        for suffix, image, kernel in (
            ("", -1, 1),
            (f"BackpropInput{version}", 2, 1),
            (f"BackpropFilter{version}", 2, None),
        )
    },
    "DepthwiseConv2dNative": _part(_depthwise, image=-1, kernel=1),
    "DepthwiseConv2dNativeBackpropInput": _part(_depthwise, image=2, kernel=1),
    "DepthwiseConv2dNativeBackpropFilter": _part(_depthwise, image=2, kernel=None),
}
