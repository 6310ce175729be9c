"""`LSTM`, `GRU`, `SimpleRNN`, and `RNN` of their cells, by units.

A cell's kernels `[features, gates * units]` are in parts by units: a device has all gates of its
units. It multiplies the input of all steps at once, then goes through the steps; after each of them
devices exchange their units of h. A mask drops what one device drops.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfparallel.tensor_parallel.blocks import blocks_of
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import is_plain_tensor, layer_rule
from tfparallel.tensor_parallel.recurrence import Recurrence
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.linear import is_elementwise_function, is_variable

_CELLS = (layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell)


def has_units(layer: keras.Layer) -> bool:
    """Whether a layer is an RNN that can be computed by units."""
    cell: Any = getattr(layer, "cell", None)
    if not isinstance(layer, layers.RNN) or type(cell) not in _CELLS:
        return False
    functions = (cell.activation, getattr(cell, "recurrent_activation", None))
    # What a GRU resets before it multiplies would have to be exchanged in the middle of a step.
    return all(map(is_elementwise_function, functions)) and getattr(cell, "reset_after", True)


@layer_rule(layers.RNN, "inner_loop")
@layer_rule(layers.LSTM, "inner_loop")
@layer_rule(layers.GRU, "inner_loop")
def recurrent(
    group: Group,
    layer: keras.Layer,
    original: Callable,
    sequences: object,
    initial_state: object,
    mask: object,
    training: object = False,
) -> object:
    """`RNN.inner_loop`: the last output, those of all steps, and the last states."""
    del original
    rows = _rows(group, layer) if is_plain_tensor(sequences) else None
    if rows is None or group.is_of_ranks or (training and _drops_all(layer.cell)):
        return NotImplemented
    cell, units = layer.cell, tuple(size // rows.blocks for size in rows.sizes)
    mask = None if mask is None else _by_steps(mask, layer.go_backwards)
    xs, biases = _products_of_input(group, layer, sequences, rows, bool(training))
    drops = _of_training(training, cell.get_recurrent_dropout_mask(_first(initial_state)))
    states = [group.parts(x, Rows(1, units)) for x in keras.tree.flatten(initial_state)]
    recurrence = Recurrence(group.devices, units, _gates(cell), drops, mask)
    kernels = group.read_or_slice(cell.recurrent_kernel, rows)
    outputs, ends = recurrence.run(
        xs, kernels, biases, [list(x) for x in zip(*states, strict=True)]
    )
    *last_states, last = [group.joined(parts, 1) for parts in zip(*ends, strict=True)]
    if mask is None:
        last = last_states[0]
    elif getattr(layer, "zero_output_for_mask", False):
        outputs = group.compute(_zeroed, outputs, mask)
        last = group.joined(group.compute(_zeroed, [each[-1] for each in ends], mask[-1]), 1)
    rows_first = group.compute(lambda x: tf.transpose(x, [1, 0, 2]), outputs)
    return last, group.joined(rows_first, 2), last_states


@layer_rule(layers.LSTMCell)
@layer_rule(layers.GRUCell)
@layer_rule(layers.SimpleRNNCell)
def cell(
    group: Group, layer: keras.Layer, original: Callable, *args: object, **kwargs: object
) -> object:
    """A cell by itself: it reads the whole. The RNN around it computes in parts."""
    del group, layer, original, args, kwargs
    return NotImplemented


def _rows(group: Group, layer: keras.Layer) -> Rows | None:
    """How the gates are in parts, by units; None where they are not."""
    if not has_units(layer):
        return None
    kernels = (layer.cell.recurrent_kernel, layer.cell.kernel)
    found = [group.rows(kernel) for kernel in kernels if is_variable(kernel)]
    rows = next((each for each in found if each is not None and each.dim == 1), None)
    return rows if rows is not None and rows.blocks == blocks_of(layer.cell) else None


def _drops_all(cell: keras.Layer) -> bool:
    return 1.0 in (cell.dropout, cell.recurrent_dropout)


def _by_steps(mask: object, go_backwards: bool) -> tf.Tensor:
    """A mask `[rows, steps]` as `[steps, rows, 1]`, in the order of steps."""
    kept = tf.cast(keras.tree.flatten(mask)[0], tf.bool)
    kept = tf.transpose(kept if len(kept.shape) == 3 else kept[..., None], [1, 0, 2])
    return tf.reverse(kept, [0]) if go_backwards else kept


def _of_training(training: object, masks: object) -> list[tf.Tensor]:
    """What a cell drops, for all gates or for each; nothing where it does not train."""
    if not training or masks is None:
        return []
    return [tf.stop_gradient(x) for x in (masks if isinstance(masks, list) else [masks])]


def _products_of_input(
    group: Group, layer: keras.Layer, sequences: tf.Tensor, rows: Rows, training: bool
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Of all steps, `[steps, rows, gates * own units]`, with their bias; and the bias of h's."""
    cell = layer.cell
    masks = _of_training(training, cell.get_dropout_mask(sequences[:, 0, :]))
    dropped = [sequences * mask[:, None, :] for mask in masks] or [sequences]

    def product(kernel: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        kernels = tf.split(kernel, len(inputs), 1) if len(inputs) > 1 else [kernel]
        gates = [tf.matmul(x, k) for x, k in zip(inputs, kernels, strict=True)]
        y = tf.transpose(tf.concat(gates, -1), [1, 0, 2])
        return tf.reverse(y, [0]) if layer.go_backwards else y

    kernels = group.read_or_slice(cell.kernel, rows)
    xs = group.compute(product, kernels, *dropped)
    if cell.bias is None:
        return xs, group.compute(lambda kernel: tf.zeros_like(kernel[0]), kernels)
    both = len(cell.bias.shape) == 2  # a GRU's of the input, and of h
    own = group.read_or_slice(cell.bias, Rows(int(both), rows.sizes, rows.blocks))
    of_input = group.compute(lambda b: b[0], own) if both else own
    of_h = group.compute((lambda b: b[1]) if both else tf.zeros_like, own)
    return group.compute(tf.add, xs, of_input), of_h


def _gates(cell: keras.Layer) -> Callable:
    """What a step makes of single units, `(x, r, states) -> states`."""
    if isinstance(cell, layers.LSTMCell):
        return lambda x, r, states: _lstm(cell, x + r, *states)
    if isinstance(cell, layers.GRUCell):
        return lambda x, r, states: _gru(cell, x, r, *states)
    return lambda x, r, states: [_activated(cell, x + r)]


def _lstm(cell: keras.Layer, z: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> list[tf.Tensor]:
    del h
    i, f, g, o = tf.split(z, 4, -1)
    gate = cell.recurrent_activation
    c = gate(f) * c + gate(i) * cell.activation(g)
    return [gate(o) * cell.activation(c), c]


def _gru(cell: keras.Layer, x: tf.Tensor, r: tf.Tensor, h: tf.Tensor) -> list[tf.Tensor]:
    (x_z, x_r, x_h), (r_z, r_r, r_h) = tf.split(x, 3, -1), tf.split(r, 3, -1)
    update = cell.recurrent_activation(x_z + r_z)
    reset = cell.recurrent_activation(x_r + r_r)
    return [update * h + (1 - update) * cell.activation(x_h + reset * r_h)]


def _activated(cell: keras.Layer, x: tf.Tensor) -> tf.Tensor:
    return x if cell.activation is None else cell.activation(x)


def _zeroed(output: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    return tf.where(mask, output, tf.zeros_like(output))


def _first(states: object) -> tf.Tensor:
    return keras.tree.flatten(states)[0]
