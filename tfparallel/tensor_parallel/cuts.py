"""Along what a layer can be cut, by its type: the words in which a layout is found.

column    each device computes its share of the outputs
row       each device takes its share of the inputs; products are added up
heads     columns, then rows, within one attention layer
tokens    rows of an embedding's table
aligned   each device takes its share of the features, and computes those: as its input is in parts
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from tfparallel.internals.keras_layers import projections_of
from tfparallel.tensor_parallel.rules.declared_attention import HeadsOf, heads_dim, heads_of
from tfparallel.tensor_parallel.rules.recurrent import has_units
from tfparallel.tensor_parallel.split_variable import split_of

Shapes = Sequence[Sequence[int | None]]  # of the tensors of a call, `[batch, ...]` each


@dataclass(frozen=True)
class Cut:
    """One way to cut a layer.

    Attributes:
        size: how many indices are shared out; the fewest, where several weights are cut.
        dims: of the weights that are cut, with the weight, a Keras variable.
        tensor_dim: of the output (column) or the input (row), which is in parts; else None.
    """

    size: int
    dims: tuple[tuple[Any, int], ...]
    tensor_dim: int | None = None


@dataclass(frozen=True)
class Cuts:
    """The ways to cut a layer, and what one call of it computes.

    Attributes:
        ways: by name, of those above.
        flops: multiplications and additions for one row of the batch; unknown dims count as 1.
    """

    ways: Mapping[str, Cut]
    flops: int = 0


def cuts_of(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    """How a built layer can be cut; None where it cannot.

    Args:
        layer: of any type.
        inputs, outputs: of a call of it.
    """
    declared = heads_of(layer)
    if declared is not None:
        return _declared_attention(layer, declared, outputs)
    of_type = next((f for types, f in _CUTS if isinstance(layer, types)), None)
    return of_type(layer, inputs, outputs) if of_type and inputs and outputs else None


def is_cut_by_type(layer: keras.Layer) -> bool:
    """Whether layers of this type can be cut, as a rule."""
    return heads_of(layer) is not None or any(isinstance(layer, types) for types, _ in _CUTS)


def numbers_of(shape: Sequence[int | None]) -> int:
    """Of a tensor `[batch, ...]`, for one row of the batch."""
    return math.prod(size or 1 for size in list(shape)[1:])


def _with_bias(layer: keras.Layer, kernel_dim: int, bias_dim: int | None) -> tuple:
    dims: tuple[tuple[Any, int], ...] = ((layer.kernel, kernel_dim),)
    if getattr(layer, "bias", None) is not None and bias_dim is not None:
        dims += ((layer.bias, bias_dim),)
    return dims


def _is_one_variable(layer: keras.Layer) -> bool:
    return isinstance(getattr(layer, "kernel", None), keras.Variable)  # not of LoRA


def _dense(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    if not _is_one_variable(layer):
        return None
    features, units = layer.kernel.shape
    last = len(inputs[0]) - 1
    ways = {
        "column": Cut(units, _with_bias(layer, 1, 0), last),
        "row": Cut(features, _with_bias(layer, 0, None), last),
    }
    return Cuts(ways, 2 * features * numbers_of(outputs[0]))


def _convolution(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    if not _is_one_variable(layer) or layer.groups != 1:
        return None
    *window, channels, filters = layer.kernel.shape
    dim = len(inputs[0]) - 1 if layer.data_format == "channels_last" else 1
    ways = {
        "column": Cut(filters, _with_bias(layer, layer.rank + 1, 0), dim),
        "row": Cut(channels, _with_bias(layer, layer.rank, None), dim),
    }
    return Cuts(ways, 2 * math.prod(window) * channels * numbers_of(outputs[0]))


def _transposed_convolution(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    del outputs
    if not _is_one_variable(layer):
        return None
    *window, filters, channels = layer.kernel.shape
    dim = len(inputs[0]) - 1 if layer.data_format == "channels_last" else 1
    ways = {
        "column": Cut(filters, _with_bias(layer, layer.rank, 0), dim),
        "row": Cut(channels, _with_bias(layer, layer.rank + 1, None), dim),
    }
    return Cuts(ways, 2 * math.prod(window) * filters * numbers_of(inputs[0]))


def _depthwise_convolution(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    if not _is_one_variable(layer):
        return None
    *window, channels, filters = layer.kernel.shape
    dim = len(inputs[0]) - 1 if layer.data_format == "channels_last" else 1
    bias_dim = 0 if filters == 1 else None
    ways = {"aligned": Cut(channels, _with_bias(layer, layer.rank, bias_dim), dim)}
    return Cuts(ways, 2 * math.prod(window) * numbers_of(outputs[0]))


def _separable_convolution(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
    if not isinstance(pointwise, keras.Variable):
        return None
    *window, channels, of_channel = depthwise.shape
    dim = len(inputs[0]) - 1 if layer.data_format == "channels_last" else 1
    bias = ((layer.bias, 0),) if layer.use_bias else ()
    ways = {"column": Cut(pointwise.shape[-1], ((pointwise, layer.rank + 1), *bias), dim)}
    if of_channel == 1:
        ways["row"] = Cut(channels, ((pointwise, layer.rank), (depthwise, layer.rank)), dim)
    products = math.prod(window) * channels * of_channel + math.prod(pointwise.shape)
    return Cuts(ways, 2 * products * numbers_of(outputs[0]) // pointwise.shape[-1])


def _normalization(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    del inputs, outputs
    names = ("gamma", "beta", "scale")
    weights = [x for x in (getattr(layer, n, None) for n in names) if isinstance(x, keras.Variable)]
    if not weights or len(weights[0].shape) != 1:
        return None
    return Cuts({"aligned": Cut(weights[0].shape[0], tuple((weight, 0) for weight in weights))})


def _einsum(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    """By the last letter of the output that is new, or the last of the input that is summed.

    A kernel that is in parts already is in parts along any letter: then by that one.
    """
    if not _is_one_variable(layer):
        return None
    terms, output = layer.equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    new = [x for x in right if x in output and x not in left]
    summed = [x for x in right if x in left and x not in output]
    ways = {}
    own = _letter_in_parts(layer, right)
    if new:
        letter = own if own in new else new[-1]
        ways["column"] = _of_letter(layer, right, letter, output, len(outputs[0]))
    if summed:
        letter = own if own in summed else summed[-1]
        ways["row"] = _of_letter(layer, right, letter, left, len(inputs[0]))
    sizes = dict(zip(right, layer.kernel.shape, strict=True))
    products = math.prod(sizes[x] for x in summed)
    return Cuts(ways, 2 * products * numbers_of(outputs[0]))


def _letter_in_parts(layer: keras.Layer, right: str) -> str:
    split = split_of(layer.kernel)
    return "" if split is None else right[split.rows.dim]


def _of_letter(layer: keras.Layer, right: str, letter: str, term: str, rank: int) -> Cut:
    dim = right.index(letter)
    from_end = len(term) - term.index(letter)
    bias_dim = None
    if layer.bias is not None and term == layer.equation.replace(" ", "").split("->")[1]:
        of_bias = len(layer.bias.shape) - from_end
        is_there = of_bias >= 0 and layer.bias.shape[of_bias] == layer.kernel.shape[dim]
        bias_dim = of_bias if is_there else None
    return Cut(layer.kernel.shape[dim], _with_bias(layer, dim, bias_dim), rank - from_end)


def _embedding(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    table = layer.embeddings
    if not isinstance(table, keras.Variable):
        return None
    vector = len(outputs[0]) - 1
    if len(inputs[0]) == len(outputs[0]):
        return _reversed_embedding(layer, table, outputs)
    return Cuts(
        {
            "tokens": Cut(table.shape[0], ((table, 0),)),
            "column": Cut(table.shape[1], ((table, 1),), vector),
        }
    )


def _reversed_embedding(layer: keras.Layer, table: keras.Variable, outputs: Shapes) -> Cuts:
    """Of a tied table, or of the one beside it: logits by columns."""
    kernel, dim = (table, 0) if layer.tie_weights else (layer.reverse_embeddings, 1)
    column = Cut(kernel.shape[dim], ((kernel, dim),), len(outputs[0]) - 1)
    flops = 2 * kernel.shape[1 - dim] * numbers_of(outputs[0])
    return Cuts({"column": column, "tokens": column}, flops)


def _recurrent(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    """By units; states that are returned, too, are of another rank than outputs."""
    if not has_units(layer) or not _is_one_variable(layer.cell) or len(inputs[0]) != 3:
        return None
    cell = layer.cell
    weights = [cell.kernel, cell.recurrent_kernel, *([] if cell.bias is None else [cell.bias])]
    dims = tuple((weight, len(weight.shape) - 1) for weight in weights)
    dim = len(outputs[0]) - 1 if len(outputs) == 1 else None
    products = math.prod(cell.kernel.shape) + math.prod(cell.recurrent_kernel.shape)
    return Cuts({"column": Cut(cell.units, dims, dim)}, 2 * products * (inputs[0][1] or 1))


def _attention(layer: keras.Layer, inputs: Shapes, outputs: Shapes) -> Cuts | None:
    *to_heads, from_heads = projections_of(layer)
    if not all(_is_one_variable(each) for each in (*to_heads, from_heads)):
        return None
    dims = [cut for each in to_heads for cut in _with_bias(each, 1, 0)]
    dims += _with_bias(from_heads, 0, None)
    size = min(variable.shape[dim] for variable, dim in dims)
    query, key = inputs[0], inputs[1] if len(inputs) > 1 else inputs[0]
    return Cuts({"heads": Cut(size, tuple(dims))}, _flops_of_attention(to_heads, query, key))


def _declared_attention(layer: keras.Layer, heads: HeadsOf, outputs: Shapes) -> Cuts | None:
    """The output's kernel, which is by heads under any layout, comes first."""
    to_heads, from_heads = heads.to_heads(layer), getattr(layer, heads.output)
    if not outputs or not all(_is_one_variable(each) for each in (*to_heads, from_heads)):
        return None
    dims: list[tuple[Any, int]] = [(from_heads.kernel, heads_dim(from_heads, True))]
    for each in to_heads:
        dims.append((each.kernel, heads_dim(each, False)))
        if each.bias is not None:
            dims.append((each.bias, 0))
    size = min(variable.shape[dim] for variable, dim in dims)
    positions = math.prod(n or 1 for n in outputs[0][1:-1])
    kernels = [math.prod(each.kernel.shape) for each in (*to_heads, from_heads)]
    of_heads = kernels[-1] // (outputs[0][-1] or 1)
    flops = 2 * positions * sum(kernels) + 4 * positions**2 * of_heads
    return Cuts({"heads": Cut(size, tuple(dims))}, flops)


def _flops_of_attention(to_heads: Sequence, query: Sequence, key: Sequence) -> int:
    """Of four projections, the scores, and the values that they weigh."""
    positions = math.prod(size or 1 for size in query[1:-1])
    others = math.prod(size or 1 for size in key[1:-1])
    by_query, by_key = to_heads[0].kernel.shape, to_heads[1].kernel.shape
    projections = 2 * positions * math.prod(by_query) + 2 * others * math.prod(by_key)
    return 2 * projections + 4 * positions * others * math.prod(by_query[1:])


_CUTS: tuple[tuple[Any, Callable], ...] = (
    (layers.Dense, _dense),
    (layers.EinsumDense, _einsum),
    ((layers.Conv1D, layers.Conv2D, layers.Conv3D), _convolution),
    (
        (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
        _transposed_convolution,
    ),
    ((layers.DepthwiseConv1D, layers.DepthwiseConv2D), _depthwise_convolution),
    ((layers.SeparableConv1D, layers.SeparableConv2D), _separable_convolution),
    (
        (layers.LayerNormalization, layers.RMSNormalization, layers.BatchNormalization),
        _normalization,
    ),
    (layers.Embedding, _embedding),
    ((layers.MultiHeadAttention, layers.GroupQueryAttention), _attention),
    (layers.RNN, _recurrent),
)
