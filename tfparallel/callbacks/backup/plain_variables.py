"""TensorFlow's own variables in attributes of a model and its layers, which Keras does not list."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.internals import SyncOnReadVariable
from tfparallel.internals.keras_layers import behind, layers_of

_OF_TRACKING = "_self_"  # what TensorFlow's tracking keeps of the same attributes


def plain_variables(model: keras.Model) -> dict[str, tf.Variable]:
    """Each once, by where it was found first: in an attribute, a list, a dict or a `tf.Module`.

    Without those that have a term on each replica: `unsaved_variables`.
    """
    found = _found(model)
    return {path: v for path, v in found.items() if not isinstance(v, SyncOnReadVariable)}


def unsaved_variables(model: keras.Model) -> list[str]:
    """Where those are that a backup does not hold."""
    return [path for path, v in _found(model).items() if isinstance(v, SyncOnReadVariable)]


def _found(model: keras.Model) -> dict[str, tf.Variable]:
    known = {id(behind(v)) for v in model.variables}
    found: dict[str, tf.Variable] = {}
    for layer in layers_of(model):
        for name, value in vars(layer).items():
            if name.startswith(_OF_TRACKING):
                continue
            for path, variable in _variables_in(value, f"{layer.path}/{name}"):
                if id(variable) not in known:
                    known.add(id(variable))
                    found[path] = variable
    return found


def _variables_in(value: object, path: str) -> Iterator[tuple[str, tf.Variable]]:
    if isinstance(value, tf.Variable):
        yield path, value
    elif isinstance(value, tf.Module):
        for number, variable in enumerate(value.variables):
            yield f"{path}/{number}", variable
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _variables_in(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _variables_in(item, f"{path}/{number}")
