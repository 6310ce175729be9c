"""What Keras keeps for each thread: who creates a variable, masks, scopes, the global seed."""

import sys
from types import FrameType
from typing import Any

import keras

# Keras keeps the name scopes that are open, with the object that opened each, in its global state.
# It is how a variable under creation finds the layer, metric or optimizer that owns it.
from keras.src.backend.common import global_state

# A layer's mask travels as an attribute of its output, which a `tf.function` in between would lose.
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

# Whether Keras has layers compute with values of its own in the place of their variables.
from keras.src.backend.common.stateless_scope import in_stateless_scope

# Whether Keras computes shapes only.
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

# The dtype to which Keras casts values of variables where its layers read them.
from keras.src.backend.common.variables import get_autocast_scope

# The class of Keras's variables, to recognise one that is created late.
from keras.src.backend.tensorflow import core as keras_core
from keras.src.backend.tensorflow import trainer as keras_trainer

# The class of all layers, to know them among the objects whose name scopes are open.
from keras.src.layers.layer import Layer

# The seed generator of `keras.random.normal(shape)`, which Keras keeps for each thread.
from keras.src.random.seed_generator import global_seed_generator

__all__ = [
    "GLOBAL_SEED_GENERATOR",
    "autocast",
    "enclosing_layers",
    "get_keras_mask",
    "global_seed_generator",
    "global_state",
    "in_stateless_scope",
    "in_symbolic_scope",
    "layer_of_late_variable",
    "owner_of_new_variable",
    "set_keras_mask",
    "shape_of_new",
    "variable_under_creation",
]

GLOBAL_SEED_GENERATOR = "global_seed_generator"  # its name there; a constant since Keras 3.13

_SYMBOLIC_BUILD = keras_trainer.TensorFlowTrainer._symbolic_build.__code__
_INITIALIZE = keras_core.Variable._initialize.__code__
_DEFERRED_INITIALIZE = keras_core.Variable._deferred_initialize.__code__


def owner_of_new_variable() -> object:
    """The Keras object (layer, metric, optimizer, seed generator) that is creating a variable.

    What layers in a layer without a `build` have is created in the name of the outermost of them,
    all at once, when they hold it already: then it is the layer that holds it.
    """
    stack = global_state.get_global_attribute("name_scope_stack")
    caller = stack[-1].caller if stack else None
    if not isinstance(caller, Layer):
        return caller
    return _holder(caller, variable_under_creation()) or caller


def layer_of_late_variable() -> object:
    """The layer of a variable that Keras creates late; None for any other variable.

    Building a model from its first batch, Keras creates all variables at once, outside of their
    layers, which hold them already:
    `Model._symbolic_build -> ... -> Variable._deferred_initialize -> ... -> the strategy`.
    """
    variable: Any = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SYMBOLIC_BUILD:
        if frame.f_code is _DEFERRED_INITIALIZE:
            variable = frame.f_locals["self"]
        frame = frame.f_back
    if variable is None or frame is None:
        return None
    return _holder(frame.f_locals["self"], variable)


def _holder(layer: Layer, variable: object) -> Layer | None:
    """Which of `layer` and the layers in it has `variable`."""
    for each in layer._flatten_layers():
        own = each._trainable_variables + each._non_trainable_variables
        if any(x is variable for x in own):
            return each
    return None


def enclosing_layers() -> list:
    """The Keras layers whose calls surround the caller, the outermost first."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    callers = (scope.caller for scope in stack)
    return [each for each in callers if isinstance(each, Layer)]


def variable_under_creation() -> keras.Variable | None:
    """The Keras variable whose `tf.Variable` is made right now, on which Keras says its path."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _INITIALIZE:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def shape_of_new(variable: keras.Variable) -> tuple[int, ...] | None:
    """The shape of a Keras variable under creation; None where it is that of a value given."""
    return variable._shape


def autocast(variable: keras.Variable, value: object) -> object:
    """`value`, a part of a Keras variable's, in the dtype in which a layer would read it."""
    scope = get_autocast_scope()
    return scope.maybe_cast(value) if variable._autocast and scope is not None else value
