"""A tensor in parts on several devices, for which the whole stands in the program.

`joined` makes the whole and remembers its parts on it; `parts_of` takes them from there. A whole
that nobody reads is pruned by TensorFlow. So a layer that gives parts and one that takes them never
gather in between, and neither do their gradients:

    forward    y0 y1 -- joined --> y -- parts_of --> y0 y1         y is not computed
    backward   d0 d1 <-- parts_of -- d <-- joined -- d0 d1         d is not computed

For a gradient tape there are only wholes, so that a user's tape sees an output as any other.

Note: gradients are recorded, and not functions with a gradient
---------------------------------------------------------------
`tf.custom_gradient` in a graph passes inputs and outputs through operations that would compute
every whole. What is recorded on tapes is unknown to the gradient of a graph, such as the body of
a loop: there, layers compute with wholes (`loops.py`).
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.probabilities import noted_origin_of, with_origin
from tfparallel.segments.tensor_notes import PARTS
from tfparallel.tensor_parallel.ranks import ranks_of_caller
from tfparallel.tensor_parallel.rows import Rows


def known_parts(tensor: tf.Tensor | tf.IndexedSlices) -> tuple[Rows, list] | None:
    """How `tensor` is divided, and its parts, if it was made by `joined`."""
    return getattr(tensor, PARTS, None)


def rows_of(parts: Sequence[tf.Tensor], dim: int, blocks: int = 1) -> Rows:
    """How the whole of `parts` is divided; `dim` may count from the end."""
    return Rows(dim % len(parts[0].shape), tuple(part.shape[dim] for part in parts), blocks)


def cut_apart(tensor: tf.Tensor, rows: Rows) -> list[tf.Tensor]:
    """The parts of a tensor, computed now."""
    sizes = [size // rows.blocks for size in rows.sizes]
    if rows.blocks == 1:
        return tf.split(tensor, sizes, rows.dim)
    pieces = [tf.split(x, sizes, rows.dim) for x in tf.split(tensor, rows.blocks, rows.dim)]
    return [tf.concat(of_part, rows.dim) for of_part in zip(*pieces, strict=True)]


def put_together(parts: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor:
    """The whole, computed now; of ranks, gathered from them."""
    ranks = ranks_of_caller()
    if ranks is not None and rows.is_cut:
        parts = ranks.whole(parts, rows)
    if rows.blocks == 1:
        return tf.concat(list(parts), rows.dim)
    pieces = [tf.split(part, rows.blocks, rows.dim) for part in parts]
    in_order = [piece for of_block in zip(*pieces, strict=True) for piece in of_block]
    return tf.concat(in_order, rows.dim)


def joined(parts: Sequence[tf.Tensor], dim: int, blocks: int = 1) -> tf.Tensor:
    """The whole of `parts` along `dim`, computed only if something reads it."""
    return joined_as(parts, rows_of(list(parts), dim, blocks))


def joined_as(parts: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor:
    """`joined`, where it is known how the whole is divided, though TensorFlow may not know it."""
    parts = list(parts)
    with record.stop_recording():
        whole = put_together(parts, rows)
    setattr(whole, PARTS, (rows, parts))
    record.record_operation("Join", [whole], parts, lambda gradient: parts_of(gradient, rows))
    origins = [noted_origin_of(part) for part in parts]
    logits = [origin.logits for origin in origins if origin is not None]
    if len(logits) < len(parts):
        return whole
    return with_origin(whole, origins[0], joined_as(logits, rows))


def parts_of(tensor: tf.Tensor, rows: Rows) -> list[tf.Tensor]:
    """The parts of `tensor`: those that it was made of, or slices."""
    tensor = tf.convert_to_tensor(tensor)
    with record.stop_recording():
        parts = _parts(tensor, rows)
    record.record_operation(
        "Part", parts, [tensor], lambda *gradients: [joined_as(gradients, rows)]
    )
    return parts


def _parts(tensor: tf.Tensor, rows: Rows) -> list[tf.Tensor]:
    known = known_parts(tensor)
    if known is None or known[0] != rows:
        return cut_apart(tensor, rows)
    parts = []
    for part in known[1]:
        with tf.device(part.device):
            parts.append(tf.identity(part))  # a tensor of its own, for the tape
    return parts


def on_device(device: str, function: Callable, *inputs: tf.Tensor) -> tf.Tensor:
    """`function(*inputs)`, a tensor, computed on `device`, and its gradient too.

    A tape leaves the backward pass to the device of whoever asks for it.
    """
    with tf.device(device):
        if not record.could_possibly_record():
            return function(*inputs)
        copies = [tf.identity(x) for x in inputs]
        floating = [i for i, x in enumerate(copies) if x.dtype.is_floating]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([copies[i] for i in floating])
            output = function(*copies)

    def told(target: tf.Tensor) -> tf.Tensor:
        with tf.device(device), record.stop_recording():
            result = tf.identity(target)

        def backward(gradient: tf.Tensor) -> list:
            with tf.device(device):
                return tape.gradient(target, [copies[i] for i in floating], gradient)

        record.record_operation("OnDevice", [result], [inputs[i] for i in floating], backward)
        return result

    origin = noted_origin_of(output)
    return with_origin(told(output), origin, None if origin is None else told(origin.logits))
