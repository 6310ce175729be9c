"""`Dense` by columns or rows, and `EinsumDense` along any letter of its kernel."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.rules.linear import Linear, compute_linear, is_variable


@layer_rule(keras.layers.Dense)
def dense(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    inputs: tf.Tensor,
    training: bool | None = None,
) -> tf.Tensor:
    """`Dense.call`; kernel `[inputs, units]`."""
    del original, training
    kernel = layer.kernel
    rows = group.rows(kernel) if is_variable(kernel) and is_plain_tensor(inputs) else None
    if rows is None:
        return NotImplemented
    last = inputs.shape.rank - 1
    is_column = rows.dim == 1
    return compute_linear(
        group,
        inputs,
        Linear(
            keras.ops.matmul,
            kernel,
            layer.bias,
            layer.activation,
            input_dim=None if is_column else last,
            output_dim=last if is_column else None,
            bias_dim=0 if is_column else None,
        ),
    )


@layer_rule(keras.layers.EinsumDense)
def einsum_dense(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    inputs: tf.Tensor,
    training: bool | None = None,
) -> tf.Tensor:
    """`EinsumDense.call`, along the letter of the kernel's dim that is in parts."""
    del original, training
    kernel = layer.kernel
    rows = group.rows(kernel) if is_variable(kernel) and is_plain_tensor(inputs) else None
    if rows is None:
        return NotImplemented
    terms, output = layer.equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    letter = right[rows.dim]
    rank = inputs.shape.rank
    ellipsis = rank - (len(left) - 3) if "..." in left else 0  # dims that "..." stands for
    bias_dim = None
    if layer.bias is not None and letter in output:
        bias_dim = _dim_of_bias(output, letter, layer.bias.shape)
    return compute_linear(
        group,
        inputs,
        Linear(
            lambda x, w: keras.ops.einsum(layer.equation, x, w),
            kernel,
            layer.bias,
            layer.activation,
            input_dim=_dim(left, letter, ellipsis),
            output_dim=_dim(output, letter, ellipsis),
            bias_dim=bias_dim,
        ),
    )


def _dim(term: str, letter: str, ellipsis: int) -> int | None:
    """Where `letter` is among the dims of a term; "..." stands for `ellipsis` of them."""
    if letter not in term:
        return None
    before = term.split(letter)[0]
    return len(before) - 3 + ellipsis if "..." in before else len(before)


def _dim_of_bias(output: str, letter: str, shape: tuple) -> int | None:
    """The bias's dim for `letter`; its shape is that of the output's last dims, or 1."""
    from_end = len(output) - output.index(letter)
    dim = len(shape) - from_end
    return dim if dim >= 0 and shape[dim] != 1 else None
