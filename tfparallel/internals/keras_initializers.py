"""What Keras's initialisers draw, and how they are asked."""

import types
from collections.abc import Callable
from typing import Any

import keras

# Keras's random numbers, whose names initialisers ask for.
from keras.src.backend.tensorflow import core as keras_core

# The seed of a draw, from what an initialiser was given: a number, or a generator that moves on.
from keras.src.random.seed_generator import draw_seed

__all__ = ["asked_of", "draw_seed", "drawing_by", "is_filling"]

_ASKS = keras_core.Variable._initialize_with_initializer.__code__
_DRAWING = (
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,
)
_FILLING = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


def asked_of(initial_value: Any) -> tuple[Any, tuple[int, ...], str] | None:
    """The initialiser, shape and dtype that Keras's variable will ask with.

    Args:
        initial_value: of TensorFlow's variable under creation.

    Returns:
        None for any other value than Keras's function that asks an initialiser.
    """
    code = getattr(initial_value, "__code__", None)
    if code is None or code not in _ASKS.co_consts:
        return None
    cells = zip(code.co_freevars, initial_value.__closure__, strict=True)
    inside = {name: cell.cell_contents for name, cell in cells}
    variable = inside["self"]
    return inside["initializer"], tuple(variable._shape), variable.dtype


def drawing_by(initializer: Any, draws: Any) -> Callable | None:
    """What `initializer` computes when it is called, with other draws than Keras's.

    Args:
        draws: has `normal`, `uniform` and `truncated_normal`, called as those of `keras.random`.

    Returns:
        None if its class computes in a way of its own.
    """
    call = type(initializer).__call__
    if not any(call is known.__call__ for known in _DRAWING):
        return None
    named = {**call.__globals__, "random": draws}
    own = types.FunctionType(call.__code__, named, call.__name__, call.__defaults__)
    return types.MethodType(own, initializer)


def is_filling(initializer: Any) -> bool:
    """Whether all numbers of its value are the same, where its own one is one number."""
    return any(type(initializer).__call__ is known.__call__ for known in _FILLING)
