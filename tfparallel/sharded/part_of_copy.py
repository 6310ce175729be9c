"""A replica's part of a variable that it keeps whole: what its optimizer updates."""

from typing import Any

import tensorflow as tf


class PartOfCopy:
    """The numbers from `begin` on, `length` of them, of a flat variable; acts as a variable.

    Args:
        copy: `[...]`, one dim.
        container: the distributed variable that `copy` belongs to, by which optimizers know it.
        begin, length: of the part.
    """

    def __init__(self, copy: tf.Variable, container: tf.Variable, begin: int, length: int):
        self._copy, self._container = copy, container
        self._begin, self._end = begin, begin + length
        self.shape = tf.TensorShape([length])

    dtype = property(lambda self: self._copy.dtype)
    device = property(lambda self: self._copy.device)
    name = property(lambda self: self._container.name)

    def _distributed_container(self) -> tf.Variable:
        return self._container

    def read_value(self) -> tf.Tensor:
        """`[length]`."""
        return self._copy.read_value()[self._begin : self._end]

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __mul__(self, other: Any) -> tf.Tensor:
        return self.read_value() * other

    def __add__(self, other: Any) -> tf.Tensor:
        return self.read_value() + other

    def assign(self, value: Any) -> "PartOfCopy":
        """Writes the part; the rest of the copy stays."""
        self._copy[self._begin : self._end].assign(tf.convert_to_tensor(value, self.dtype))
        return self

    def assign_add(self, delta: Any) -> "PartOfCopy":
        return self.assign(self + delta)

    def assign_sub(self, delta: Any) -> "PartOfCopy":
        return self.assign(self.read_value() - delta)

    def scatter_add(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        places = rows.indices[:, tf.newaxis]
        return self.assign(tf.tensor_scatter_nd_add(self.read_value(), places, rows.values))

    def scatter_sub(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        return self.scatter_add(tf.IndexedSlices(-rows.values, rows.indices, rows.dense_shape))

    def scatter_update(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        places = rows.indices[:, tf.newaxis]
        return self.assign(tf.tensor_scatter_nd_update(self.read_value(), places, rows.values))
