"""How parts of tensors are in pieces, one for each of some processes, and how these are sent.

    two parts of a matrix, over two processes

    part 0 = pieces 0, 1        rank 0 has pieces 0 and 2
    part 1 = pieces 2, 3        rank 1 has pieces 1 and 3

Collectives are of pieces of one size: smaller ones are filled up with zeros.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.communication.bucketing import SENT_BUCKET_BYTES, plan_buckets
from tfparallel.communication.collectives import Collectives
from tfparallel.tensor_parallel.known_parts import cut_apart, put_together
from tfparallel.tensor_parallel.rows import Rows


class PiecesOfParts:
    """Those of one tensor: plain numbers.

    Args:
        rows: of the parts.
        count: of pieces of a part, one for each process.
        index: of this process among them.

    Attributes:
        every: all pieces, those of part 0 first.
        own: this process's, one of each part.
    """

    def __init__(self, rows: Rows, count: int, index: int):
        self.count, self.index = count, index
        self.every = rows.cut(count)
        self.own = Rows(rows.dim, self.every.sizes[index::count], rows.blocks, rows.first)

    def of_part(self, part: int) -> Rows:
        """The pieces of a part, within it."""
        first = part * self.count
        return Rows(self.own.dim, self.every.sizes[first : first + self.count], self.own.blocks)

    def own_of(self, part: int, value: tf.Tensor) -> tf.Tensor:
        """This process's piece of the value of a part."""
        return cut_apart(value, self.of_part(part))[self.index]


class PlaceOfPart(NamedTuple):
    """A part of a tensor: which one of how many pieces."""

    cut: PiecesOfParts
    part: int

    @property
    def rows(self) -> Rows:
        """Its pieces."""
        return self.cut.of_part(self.part)


def gathered(
    collectives: Collectives, places: Sequence[PlaceOfPart], pieces: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Parts, of the pieces that all processes have of them; all make the same call.

    Args:
        places: of the parts.
        pieces: of each this process's one.
    """
    padded = [_padded(piece, place.rows) for place, piece in zip(places, pieces, strict=True)]
    flat = _in_buckets(padded, collectives.all_gather_each)
    return [
        _joined(of_all, place.rows, piece.shape.as_list())
        for of_all, place, piece in zip(flat, places, pieces, strict=True)
    ]


def summed_and_scattered(
    collectives: Collectives, places: Sequence[PlaceOfPart], parts: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """This process's pieces of the sums of all processes' `parts`; all make the same call."""

    def scattered(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        own = collectives.reduce_scatter(tf.concat(rows, 1))
        return tf.split(own, [each.shape[1] for each in rows])

    rows = [_rows_of_processes(part, place) for part, place in zip(parts, places, strict=True)]
    pieces = []
    for flat, part, place in zip(_in_buckets(rows, scattered), parts, places, strict=True):
        shape = _with_size(part.shape.as_list(), place.rows, place.cut.index)
        pieces.append(_unpadded(flat, shape))
    return pieces


def _in_buckets(tensors: Sequence[tf.Tensor], collective: Callable) -> list[tf.Tensor]:
    """What `collective` makes of tensors, of so many at once as are sent together."""
    sizes = [each.shape.num_elements() * each.dtype.size for each in tensors]
    results: dict = {}
    for bucket in plan_buckets(sizes, [each.dtype for each in tensors], SENT_BUCKET_BYTES):
        results.update(zip(bucket, collective([tensors[k] for k in bucket]), strict=True))
    return [results[k] for k in range(len(tensors))]


def _rows_of_processes(part: tf.Tensor, place: PlaceOfPart) -> tf.Tensor:
    """A part as `[processes, length]`."""
    return tf.stack([_padded(piece, place.rows) for piece in cut_apart(part, place.rows)])


def _padded(piece: tf.Tensor, rows: Rows) -> tf.Tensor:
    """One of the pieces along `rows`, flat, with zeros up to the size of the largest."""
    size = piece.shape.num_elements()
    missing = size // piece.shape[rows.dim] * max(rows.sizes) - size
    return tf.pad(tf.reshape(piece, [size]), [[0, missing]])


def _unpadded(flat: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    return tf.reshape(flat[: math.prod(shape)], shape)


def _joined(of_all: tf.Tensor, rows: Rows, shape: Sequence[int]) -> tf.Tensor:
    """The part whose pieces along `rows`, `_padded`, are one behind the other.

    Args:
        shape: of any piece.
    """
    pieces = [
        _unpadded(flat, _with_size(shape, rows, k))
        for k, flat in enumerate(tf.split(of_all, len(rows.sizes)))
    ]
    return put_together(pieces, rows)


def _with_size(shape: Sequence[int], rows: Rows, piece: int) -> list[int]:
    return [*shape[: rows.dim], rows.sizes[piece], *shape[rows.dim + 1 :]]
