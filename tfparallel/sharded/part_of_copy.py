"""A replica's part of a variable that it keeps whole: what its optimizer updates."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import ResourceVariable


class PartOfCopy:
    """Some of the numbers of a variable; acts as a variable.

    It is there during an update only, in memory of its own (`take`), until the parts of all
    replicas have become the new copy (`leave`). To write into the copy in place would be dear:
    from then on TensorFlow copies it whenever it is read.

    Args:
        copy: of which it is a part.
        container: the distributed variable that `copy` belongs to, by which optimizers know it.
        cut: gives the part of the value of `copy`.
        shape: of the part.
        device: where the part is during an update.
    """

    def __init__(
        self,
        copy: tf.Variable,
        container: tf.Variable,
        cut: Callable[[tf.Tensor], tf.Tensor],
        shape: Sequence[int],
        device: str,
    ):
        self._copy, self._container, self.device = copy, container, device
        self._cut, self.shape = cut, tf.TensorShape(shape)
        with tf.init_scope(), tf.device(device):
            any_shape = tf.TensorShape([None] * len(shape))
            self._own = ResourceVariable(self._nothing(), trainable=False, shape=any_shape)

    def _nothing(self) -> tf.Tensor:
        return tf.zeros([0] * len(self.shape), self.dtype)

    dtype = property(lambda self: self._copy.dtype)
    name = property(lambda self: self._container.name)
    handle = property(lambda self: self._own.handle)

    def _distributed_container(self) -> tf.Variable:
        return self._container

    def take(self) -> None:
        """Begins an update: the part is what it is in the copy."""
        with tf.device(self._copy.device):
            part = self._cut(self._copy.read_value())
        with tf.device(self.device):
            self._own.assign(part)

    def leave(self) -> None:
        """Ends an update: the part is in the copy, and takes no memory of its own."""
        with tf.device(self.device):
            self._own.assign(self._nothing())

    def read_value(self) -> tf.Tensor:
        """Of `shape`."""
        return tf.ensure_shape(self._own.read_value(), self.shape)

    def __tf_tensor__(self, dtype: object = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __mul__(self, other: object) -> tf.Tensor:
        return self.read_value() * other

    def __add__(self, other: object) -> tf.Tensor:
        return self.read_value() + other

    def assign(self, value: object) -> "PartOfCopy":
        """Writes the part."""
        self._own.assign(tf.convert_to_tensor(value, self.dtype))
        return self

    def assign_add(self, delta: tf.Tensor | float) -> "PartOfCopy":
        return self.assign(self + delta)

    def assign_sub(self, delta: tf.Tensor | float) -> "PartOfCopy":
        return self.assign(self.read_value() - delta)

    def scatter_add(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        places = rows.indices[:, tf.newaxis]
        return self.assign(tf.tensor_scatter_nd_add(self.read_value(), places, rows.values))

    def scatter_sub(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        return self.scatter_add(tf.IndexedSlices(-rows.values, rows.indices, rows.dense_shape))

    def scatter_update(self, rows: tf.IndexedSlices) -> "PartOfCopy":
        places = rows.indices[:, tf.newaxis]
        return self.assign(tf.tensor_scatter_nd_update(self.read_value(), places, rows.values))


def part_of_flat(
    copy: tf.Variable, container: tf.Variable, begin: int, length: int, device: str
) -> PartOfCopy:
    """The numbers from `begin` on, `length` of them, of a flat `copy`."""
    return PartOfCopy(copy, container, lambda flat: flat[begin : begin + length], [length], device)
