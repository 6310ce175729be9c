"""Pieces of an initial value along one dim: each is drawn alone, or cut of the whole.

A piece is some runs of the flat value: one for each index of the dims before, and for each block.

    [4, 6] along dim 1, piece 0 of 2        x x x . . .      four runs of three numbers
                                            x x x . . .
                                            x x x . . .
                                            x x x . . .

Few runs are drawn one by one. Of many, what is between them is drawn too, some rows of the whole at
a time, and left out: the bits are those of the whole, and the whole is nowhere.
"""

import math
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.replicas.drawn_values import Drawn
from tfparallel.tensor_parallel.known_parts import cut_apart
from tfparallel.tensor_parallel.rows import Rows

_FEW_RUNS = 64
_NUMBERS_AT_A_TIME = 1 << 16


class NewPieces:
    """What the pieces of a variable under creation begin with.

    Args:
        value: of the whole: a tensor, or what is known of it before it is drawn.
        rows: how it is in pieces.
    """

    def __init__(self, value: tf.Tensor | Drawn, rows: Rows):
        self._value, self._rows = value, rows
        self._cut = [] if isinstance(value, Drawn) else cut_apart(value, rows)

    def piece(self, index: int, device: str) -> tf.Tensor:
        """Piece number `index`, those of several copies one behind the other, on `device`."""
        index %= len(self._rows.sizes)
        if isinstance(self._value, Drawn):
            with tf.init_scope(), tf.device(device):
                return drawn_piece(self._value, self._rows, index)
        return tf.raw_ops.DeepCopy(x=self._cut[index])  # a piece is a view, which keeps all alive


def drawn_piece(drawn: Drawn, rows: Rows, index: int) -> tf.Tensor:
    """Piece number `index` of a value, of which no more is in memory than twice that piece."""
    shape, dim = drawn.shape.as_list(), rows.dim
    length, start = (each // rows.blocks for each in (rows.sizes[index], rows.starts[index]))
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    runs, of_block = before * rows.blocks, shape[dim] // rows.blocks
    if runs <= _FEW_RUNS:
        firsts = [(run * of_block + start) * after for run in range(runs)]
        drawn_runs = [
            drawn.numbers_from(begin, count)
            for first in firsts
            for begin, count in _at_a_time(first, length * after, 1)
        ]
        flat = tf.concat(drawn_runs, 0)
    else:
        flat = tf.concat(
            [
                _own(drawn.numbers_from(begin, count), [-1, of_block, after], start, length)
                for begin, count in _at_a_time(0, runs * of_block * after, of_block * after)
            ],
            0,
        )
    return tf.reshape(flat, [*shape[:dim], rows.sizes[index], *shape[dim + 1 :]])


def _at_a_time(first: int, size: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Where to begin and how many numbers to draw, for `size` of them, in multiples of a number."""
    step = max(1, _NUMBERS_AT_A_TIME // multiple) * multiple
    for begin in range(0, size, step):
        yield first + begin, min(step, size - begin)


def _own(flat: tf.Tensor, shape: list[int], start: int, length: int) -> tf.Tensor:
    """Of `[runs, of_block, after]` the runs of a piece, flat."""
    return tf.reshape(tf.reshape(flat, shape)[:, start : start + length], [-1])
