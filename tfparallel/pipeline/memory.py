"""How many bytes the variables of a stage take on its device."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import behind

_GRADIENTS = 2  # a microbatch's, and the sum


def parameter_bytes(variables: Iterable) -> int:
    """Bytes of Keras variables, of two gradients of those that train, and of optimizer slots."""
    return sum(_bytes_with_company(variable) for variable in variables)


def trained_bytes(variables: Iterable) -> int:
    """Bytes of those of Keras variables that train."""
    return sum(_bytes(variable) for variable in variables if variable.trainable)


def _bytes_with_company(variable: keras.Variable) -> int:
    copies = 1 + _GRADIENTS * bool(variable.trainable)
    slots = getattr(behind(variable), "_followers", ())
    return copies * _bytes(variable) + sum(_bytes(slot) for slot in slots)


def num_values(variable: keras.Variable | tf.Variable) -> int:
    """How many numbers a variable holds."""
    return int(tf.TensorShape(variable.shape).num_elements() or 0)


def _bytes(variable: keras.Variable | tf.Variable) -> int:
    return num_values(variable) * tf.as_dtype(variable.dtype).size
