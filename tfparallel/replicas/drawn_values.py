"""Initial values of which a part is drawn alone, with the bits that it has in the whole.

    whole    draw(seed) [0 .. n]  * scale + shift
    part     draw(seed) [b .. e]  * scale + shift        (`replicas/row_draws.py`)

Keras's initialisers that fill, or draw each number for itself, are known: so a weight larger than a
device is made of its parts. Others (Orthogonal, Identity, a user's function) need the whole, one
variable at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals.keras_initializers import asked_of, draw_seed, drawing_by, is_filling
from tfparallel.replicas.row_draws import (
    normal_of_rows,
    seed_as_drawn,
    truncated_normal_of_rows,
    uniform_of_rows,
)


def _ones(shape: Sequence[int], first: object, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    del first, seed
    return tf.ones(shape, dtype)


_DRAWS: Mapping[str, Callable] = {
    "fill": _ones,
    "normal": normal_of_rows,
    "truncated_normal": truncated_normal_of_rows,
    "uniform": uniform_of_rows,
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A value before it is drawn.

    Attributes:
        kind: of the draw, a key of `_DRAWS`.
        shape: of the whole.
        dtype: of it.
        numbers: float64 `[4]`, that say all else: a seed's two, which are whole numbers, and what
            is drawn is scaled by, and moved by, which are numbers of `dtype`.
    """

    kind: str
    shape: tf.TensorShape
    dtype: tf.DType
    numbers: tf.Tensor

    def agreed(self, numbers: tf.Tensor) -> "Drawn":
        """The same with the `numbers` that all workers have agreed on."""
        return dataclasses.replace(self, numbers=numbers)

    def announced(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """What a creator gets, of the few numbers that workers agree on in the place of the value.

        Args:
            kwargs: what it gets of the value.
        """
        what = f"{self.dtype.name}{self.shape.as_list()} of a {self.kind} draw"
        name, numbers = f"{kwargs.get('name')} {what}", self.numbers
        return {**kwargs, "initial_value": numbers, "name": name, "dtype": numbers.dtype}

    def numbers_from(self, begin: int, count: int) -> tf.Tensor:
        """So many numbers of the flat value, from number `begin` on."""
        scale, shift = (tf.cast(number, self.dtype) for number in tf.unstack(self.numbers[2:]))
        seed = tf.cast(self.numbers[:2], tf.int32)
        return _DRAWS[self.kind]([count], begin, seed, self.dtype) * scale + shift

    def padded_part(self, begin: int, end: int) -> tf.Tensor:
        """Numbers `begin` to `end` of the flat value, and zeros where it has ended."""
        inside = [min(place, self.shape.num_elements()) for place in (begin, end)]
        count = inside[1] - inside[0]
        return tf.pad(self.numbers_from(inside[0], count), [[0, end - begin - count]])


def drawn_value(initial_value: object) -> Drawn | None:
    """What a variable of Keras begins with, if parts of it can be drawn; its seed is taken then.

    Args:
        initial_value: what a variable creator gets.
    """
    asked = asked_of(initial_value)
    if asked is None:
        return None
    initializer, shape, dtype = asked
    if is_filling(initializer):
        value = tf.convert_to_tensor(initializer((), dtype))
        is_number = value.shape.rank == 0  # a negative zero moves nothing, not even its like
        return _noted("fill", shape, dtype, [0, 0], value, -0.0) if is_number else None
    call = drawing_by(initializer, _Noting)
    return None if call is None else call(shape, dtype)


def form_of(initial_value: object) -> tuple[tf.TensorShape, tf.DType] | None:
    """The shape and dtype that an initialiser will be asked for; None for any other value."""
    asked = asked_of(initial_value)
    return None if asked is None else (tf.TensorShape(asked[1]), tf.as_dtype(asked[2]))


class _Noting:
    """Stands for `keras.random` in an initialiser: notes what is drawn, in the place of drawing."""

    @staticmethod
    def normal(
        shape: Sequence[int], mean: float, stddev: float, dtype: tf.DType | str, seed: object
    ) -> Drawn | None:
        return _drawn("normal", shape, dtype, seed, stddev, mean)

    @staticmethod
    def truncated_normal(
        shape: Sequence[int], mean: float, stddev: float, dtype: tf.DType | str, seed: object
    ) -> Drawn | None:
        return _drawn("truncated_normal", shape, dtype, seed, stddev, mean)

    @staticmethod
    def uniform(
        shape: Sequence[int], minval: float, maxval: float, dtype: tf.DType | str, seed: object
    ) -> Drawn | None:
        low, high = (tf.cast(each, dtype) for each in (minval, maxval))
        return _drawn("uniform", shape, dtype, seed, high - low, low)


def _drawn(
    kind: str,
    shape: Sequence[int],
    dtype: tf.DType | str,
    seed: object,
    scale: tf.Tensor | float,
    shift: tf.Tensor | float,
) -> Drawn | None:
    scale, shift = (tf.convert_to_tensor(each, dtype) for each in (scale, shift))
    if scale.shape.rank or shift.shape.rank:
        return None
    return _noted(kind, shape, dtype, seed_as_drawn(draw_seed(seed)), scale, shift)


def _noted(
    kind: str,
    shape: Sequence[int],
    dtype: tf.DType | str,
    seed: object,
    scale: tf.Tensor | float,
    shift: tf.Tensor | float,
) -> Drawn:
    numbers = [tf.cast(number, tf.float64) for number in (scale, shift)]
    numbers = tf.concat([tf.cast(seed, tf.float64), numbers], 0)
    return Drawn(kind, tf.TensorShape(shape), tf.as_dtype(dtype), numbers)
