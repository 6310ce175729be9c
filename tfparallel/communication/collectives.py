"""The collectives between the places of one axis: what a strategy holds, whatever carries them.

a strategy of several workers holds      our ring's           `RingCollectives`
                                         TensorFlow's         `StockCollectives`
                                         Horovod's            `HorovodCollectives`
replicas of one process have             the step's graph     `GraphCollectives`

Ranks of one model trace wholes that nobody reads, and order the others afterwards: they need what a
graph may leave out, `LeftOutIfUnread`, which a ring and Horovod have.
"""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfparallel.internals import ResourceVariable


class Collectives(Protocol):
    """Collectives on tensors of any numeric dtype, in the graph of a step.

    All places make the same calls, in the same order, of equal dtypes. A sum of booleans is whether
    any is true, and integers wrap.

    Attributes:
        size: how many places the axis has.
        index: which of them the caller is.
    """

    @property
    def size(self) -> int:
        """How many places the axis has."""

    @property
    def index(self) -> int:
        """Which of them the caller is."""

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of all places' tensors of one shape."""

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """This place's row of the sum of all places' `[size, length]`; half of an all-reduce."""

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """All places' `[rows, ...]`, one after the other; only the number of rows may differ."""

    def all_gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Of each `[length]`, known and equal everywhere, all places' one after the other."""

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """`[size, ...]`: row j goes to place j, row i came from place i."""

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of place 0, of one shape everywhere."""


class LeftOutIfUnread(Protocol):
    """Collectives that the caller may order."""

    @property
    def order(self) -> ResourceVariable:
        """What keeps calls in the program's order, of all that have it."""

    def sum_of(self, tensor: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """The sum of all places' tensors of one shape.

        Args:
            unordered: for an operation that is left out where nothing reads it, and to which the
                caller gives its place in the order of calls: any number that is not known before
                the graph runs, so that TensorFlow does not compute a sum of constants beforehand.
        """

    def gather_rows(self, rows: tf.Tensor, unordered: tf.Tensor | None = None) -> tf.Tensor:
        """All places' `[rows, ...]`, one after the other; only the number of rows may differ.

        Args:
            unordered: as of `sum_of`.
        """
