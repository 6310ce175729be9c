"""What is Keras's code: a method, or all that a model's call runs."""

import functools
import itertools
from collections.abc import Iterator

import keras

from tfparallel.internals import Functional
from tfparallel.internals.keras_layers import layers_of

_MODULES = "keras.src.", "tensorflow.", "tfparallel.", "builtins"


def is_code_of_keras(model: keras.Model) -> bool:
    """Whether no class or function in the call of `model` is a user's or another library's.

    A Lambda layer runs another function; so does a layer with an activation of one's own.
    """
    return all(_is_of_keras(each) for each in _parts_of(model))


def is_method_of_keras(kind: type, name: str) -> bool:
    """Whether a class has the method from Keras: no subclass of a user's overrides it."""
    return _is_of_keras(getattr(kind, name))


def _parts_of(model: keras.Model) -> Iterator[object]:
    for layer in layers_of(model):
        yield layer
        if isinstance(layer, Functional):
            yield from layer.operations
        for value in vars(layer).values():
            items = value if isinstance(value, list | tuple) else (value,)
            yield from itertools.filterfalse(_is_of_data, items)


def _is_of_data(value: object) -> bool:
    """Whether a layer cannot call `value`; a layer in it is one of `layers_of` itself."""
    return not callable(value) or isinstance(value, keras.Layer)


def _is_of_keras(value: object) -> bool:
    while isinstance(value, functools.partial) or hasattr(value, "__wrapped__"):
        value = value.func if isinstance(value, functools.partial) else value.__wrapped__
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.".startswith(_MODULES)
