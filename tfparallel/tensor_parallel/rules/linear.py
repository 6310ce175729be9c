"""Any layer that is linear in a kernel, in parts along one dim of that kernel.

    column    the dim is one of the outputs: each device computes its outputs from the whole input
    row       the dim is summed over: each device takes its inputs, and their products are added up
    aligned   the dim is one of both: each device takes its inputs and computes its outputs

Source: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.rows import Rows

_activations = keras.activations
_ELEMENTWISE = {
    _activations.celu,
    _activations.elu,
    _activations.exponential,
    _activations.gelu,
    _activations.hard_sigmoid,
    _activations.hard_silu,
    _activations.leaky_relu,
    _activations.linear,
    _activations.log_sigmoid,
    _activations.mish,
    _activations.relu,
    _activations.relu6,
    _activations.selu,
    _activations.sigmoid,
    _activations.silu,
    _activations.softplus,
    _activations.softsign,
    _activations.tanh,
}


@dataclass(frozen=True)
class Linear:
    """One call of a linear layer.

    Attributes:
        compute: of the input and the kernel, or parts of both.
        kernel, bias: Keras variables; None for no bias.
        activation: a function, or None.
        input_dim: of the input, that goes with the kernel's dim that is in parts; None for none.
        output_dim: of the output, likewise. Both count from the front.
        bias_dim: of the bias, likewise; None where the bias is the same for all parts.
        shaped: makes a bias, or a part of it, broadcast over the output.
        outputs_of_index: how many outputs, and numbers of a bias in parts, go with one index of the
            kernel's dim.
    """

    compute: Callable
    kernel: Any
    bias: Any
    activation: Any
    input_dim: int | None
    output_dim: int | None
    bias_dim: int | None
    shaped: Callable = tf.identity
    outputs_of_index: int = 1


def is_elementwise_function(activation: object) -> bool:
    """Whether an activation treats every number alike, whatever stands beside it."""
    return activation is None or any(activation is each for each in _ELEMENTWISE)


def is_variable(weight: keras.Variable) -> bool:
    """Whether a layer's weight is the variable itself, and not one made of several (LoRA)."""
    return isinstance(weight, keras.Variable)


def compute_linear(group: Group, inputs: tf.Tensor, layer: Linear) -> tf.Tensor:
    """The layer's output, computed by `group`."""
    sizes = group.rows(layer.kernel).sizes  # type: ignore[union-attr]
    kernels = group.read(layer.kernel)
    given: Any = inputs
    if layer.input_dim is not None:
        given = group.parts(inputs, Rows(layer.input_dim, sizes))
    else:
        given = group.on_each(inputs)
    if layer.output_dim is None:
        return _sum(group, layer, group.compute(layer.compute, given, kernels))
    own = is_elementwise_function(layer.activation)

    def outputs(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = layer.compute(x, kernel)
        y = keras.ops.add(y, layer.shaped(bias[0])) if bias else y
        return layer.activation(y) if own and layer.activation is not None else y

    biases = [] if layer.bias is None else [_bias_parts(group, layer, sizes)]
    parts = group.compute(outputs, given, kernels, *biases)
    whole = group.joined(parts, layer.output_dim)
    return whole if own else layer.activation(whole)


def _sum(group: Group, layer: Linear, products: list[tf.Tensor]) -> tf.Tensor:
    """Of what all devices have, on the first one, or in parts along positions."""
    rows = group.rows_of_sequence(products[0].shape)
    is_plain = layer.bias is None or (len(layer.bias.shape) == 1 and layer.shaped is tf.identity)
    if rows is None or not is_plain or not is_elementwise_function(layer.activation):
        return _finished(layer, group.summed(products))
    bias = [] if layer.bias is None else [tf.convert_to_tensor(layer.bias)]

    def finished(y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = keras.ops.add(y, bias[0]) if bias else y
        return y if layer.activation is None else layer.activation(y)

    whole = group.scattered(products, rows)
    if layer.bias is None and layer.activation is None:
        return whole
    return group.joined(group.compute(finished, group.parts(whole, rows), *bias), rows.dim)


def compute_whole(inputs: tf.Tensor, layer: Linear) -> tf.Tensor:
    """The layer's output from the whole kernel, read here.

    Keras computes some of them in a `tf.function`, in which parts cannot be read.
    """
    return _finished(layer, layer.compute(inputs, tf.convert_to_tensor(layer.kernel)))


def _bias_parts(group: Group, layer: Linear, sizes: tuple) -> object:
    if layer.bias_dim is None:
        return tf.convert_to_tensor(layer.bias)
    of_bias = tuple(size * layer.outputs_of_index for size in sizes)
    return group.read_or_slice(layer.bias, Rows(layer.bias_dim, of_bias))


def _finished(layer: Linear, y: tf.Tensor) -> tf.Tensor:
    if layer.bias is not None:
        y = keras.ops.add(y, layer.shaped(tf.convert_to_tensor(layer.bias)))
    return y if layer.activation is None else layer.activation(y)
