"""The gradient of a variable in parts, as an optimizer gets it: it computes part by part.

Between `apply` and the update Keras divides gradients by a loss scale, adds what was accumulated,
and divides by the number of steps. Of a tensor that stands for its parts that would be the whole.

    (g + accumulated) / steps       device 0    (g0 + accumulated0) / steps
                                    device 1    (g1 + accumulated1) / steps

A sparse gradient, of an Embedding, keeps its rows in one place, equal tokens apart: a norm is of
those, as one device takes it. Where one device makes it dense, each part becomes dense where it is.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.segments.tensor_notes import PARTS
from tfparallel.tensor_parallel.known_parts import known_parts, put_together
from tfparallel.tensor_parallel.split_variable import SplitVariable, split_of


class GradientInParts:
    """Stands for a gradient in arithmetic of Keras's optimizers; whatever else reads the whole.

    Args:
        variable: whose gradient it is.
        parts: of what the caller's copy stores, each on the device of its part; None where sparse.
        slices: the sparse gradient of the whole; else None.
    """

    def __init__(
        self,
        variable: SplitVariable,
        parts: list[tf.Tensor] | None = None,
        slices: tf.IndexedSlices | None = None,
    ):
        self.variable, self.slices = variable, slices
        self._parts = parts
        if parts is not None:
            setattr(self, PARTS, (variable.stored, parts))

    def dense(self) -> "GradientInParts":
        """The same, of which every part is dense."""
        if self._parts is not None:
            return self
        parts = []
        pieces = self.variable.pieces(self.slices)
        for piece, own in zip(pieces, self.variable.own_parts(), strict=True):
            with tf.device(own.device):
                parts.append(tf.convert_to_tensor(piece))
        return GradientInParts(self.variable, parts)

    def numbers(self) -> list[tf.Tensor]:
        """All that is in it: the parts, or the values of its rows."""
        return [self.slices.values] if self._parts is None else self._parts  # type: ignore[union-attr]

    def mapped(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "GradientInParts":
        """What `function`, of single numbers, makes of it, where it is."""
        results = []
        for numbers in self.numbers():
            with tf.device(numbers.device):
                results.append(function(numbers))
        if self._parts is not None:
            return GradientInParts(self.variable, results)
        slices: Any = self.slices
        values = tf.IndexedSlices(results[0], slices.indices, slices.dense_shape)
        return GradientInParts(self.variable, slices=values)

    def pieces(self) -> list:
        """An argument of an update, for each part: a tensor, or rows of it."""
        return self.variable.pieces(self.slices) if self._parts is None else self._parts

    def __truediv__(self, number: tf.Tensor | float) -> "GradientInParts":
        return self.mapped(lambda numbers: numbers / number)

    def __add__(self, accumulated: keras.Variable) -> "GradientInParts":
        split = split_of(accumulated)
        if split is None or split.stored != self.variable.stored:
            raise TypeError(
                f"Expected a slot in the parts of '{self.variable.name}', {self.variable.stored}, "
                f"to add to its gradient. Received: {accumulated!r}. Compute with "
                "tf.convert_to_tensor of both."
            )
        sums = []
        for part, before in zip(self.dense().numbers(), split.own_parts(), strict=True):
            with tf.device(before.device):
                sums.append(part + before.read_value())
        return GradientInParts(self.variable, sums)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        if self._parts is None:
            return tf.convert_to_tensor(self.slices, dtype, name=name)
        return tf.convert_to_tensor(
            put_together(self._parts, self.variable.stored), dtype, name=name
        )


def for_optimizer(
    gradient: Gradient | None, variable: keras.Variable
) -> "Gradient | GradientInParts | None":
    """A gradient as an optimizer gets it that treats every number alike.

    Args:
        gradient: of the Keras variable `variable`, of all rows; None for none.
    """
    split = split_of(variable)
    overwrites = getattr(variable, "overwrite_with_gradient", False)
    if gradient is None or split is None or overwrites:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return GradientInParts(split, slices=gradient)
    known = known_parts(gradient)
    if known is None or known[0] != split.stored:
        return gradient
    return GradientInParts(split, [known[1][i] for i in split.here])
