"""Parts of a tensor with what their neighbours have of it, too: halos.

parts      [ a b c | d e f ]
regions    [ a b c d ]  [ c d e f ]         backward: what was sent is added where it came from
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.tensor_parallel.rows import Rows


def regions(
    parts: Sequence[tf.Tensor], rows: Rows, spans: Sequence[tuple[int, int]], devices: Sequence[str]
) -> list[tf.Tensor]:
    """What each device needs of a tensor in parts, on that device.

    Args:
        parts: on the devices, as `rows` says.
        rows: of the whole.
        spans: for each device the first index along the dim, and that behind the last.
        devices: of the group.
    """
    with record.stop_recording():
        results = []
        for device, (start, end) in zip(devices, spans, strict=True):
            with tf.device(device):
                results.append(_between(parts, rows, start, end))

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        totals = []
        for j, device in enumerate(devices):
            with tf.device(device):
                totals.append(_of_part(gradients, rows, spans, j))
        return totals

    record.record_operation("Halo", results, list(parts), backward)
    return results


def _between(parts: Sequence[tf.Tensor], rows: Rows, start: int, end: int) -> tf.Tensor:
    pieces = []
    for part, first, size in zip(parts, rows.starts, rows.sizes, strict=True):
        low, high = max(start, first), min(end, first + size)
        if low < high:
            pieces.append(_slice(part, rows.dim, low - first, high - first))
    if not pieces:
        return _slice(parts[0], rows.dim, 0, 0)
    return tf.concat(pieces, rows.dim) if len(pieces) > 1 else tf.identity(pieces[0])


def _of_part(
    gradients: Sequence[tf.Tensor], rows: Rows, spans: Sequence[tuple[int, int]], j: int
) -> tf.Tensor:
    """What all devices say of part number `j`."""
    first, size = rows.starts[j], rows.sizes[j]
    pieces = []
    for gradient, (start, end) in zip(gradients, spans, strict=True):
        low, high = max(start, first), min(end, first + size)
        if low < high:
            piece = _slice(gradient, rows.dim, low - start, high - start)
            pieces.append(_padded(piece, rows.dim, low - first, first + size - high))
    if not pieces:  # a stride leaves it out
        shape = tf.tensor_scatter_nd_update(tf.shape(gradients[0]), [[rows.dim]], [size])
        return tf.zeros(shape, gradients[0].dtype)
    return sum_in_order(pieces)


def _slice(tensor: tf.Tensor, dim: int, start: int, end: int) -> tf.Tensor:
    whole = [slice(None)] * len(tensor.shape)
    whole[dim] = slice(start, end)
    return tensor[tuple(whole)]


def _padded(tensor: tf.Tensor, dim: int, before: int, after: int) -> tf.Tensor:
    if not before and not after:
        return tensor
    dims = range(len(tensor.shape))
    return tf.pad(tensor, [[before, after] if i == dim else [0, 0] for i in dims])
