"""What Keras's initialisers draw, and how they are asked."""

import types
from collections.abc import Callable

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


def asked_of(initial_value: object) -> tuple[Callable, tuple[int, ...], str] | None:
    """The initialiser, shape and dtype that Keras's variable will ask with.

    Args:
        initial_value: of TensorFlow's variable under creation.

    Returns:
        None for any other value than Keras's function that asks an initialiser.
    """
    if not isinstance(initial_value, types.FunctionType):
        return None
    code, closure = initial_value.__code__, initial_value.__closure__ or ()
    if code not in _ASKS.co_consts:
        return None
    cells = zip(code.co_freevars, closure, strict=True)
    inside = {name: cell.cell_contents for name, cell in cells}
    variable = inside["self"]
    return inside["initializer"], tuple(variable._shape), variable.dtype


def drawing_by(initializer: object, draws: object) -> Callable | None:
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


def is_filling(initializer: object) -> bool:
    """Whether all numbers of its value are the same, where its own one is one number."""
    return any(type(initializer).__call__ is known.__call__ for known in _FILLING)
