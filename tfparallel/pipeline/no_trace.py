"""Running a model without a trace: what a run changes is kept apart, or put back.

what a run changes                         what becomes of it
-----------------------------------------  -----------------------------------------------------
Keras variables (weights, metrics inside   never assigned: a `keras.StatelessScope` keeps the new
layers, seeds), losses added               values, where they are read as long as it lasts
`tf.Variable`s of layers                   put back
attributes of layers and metrics, and      put back
what lists, dicts, sets and arrays hold
Keras's global state: names, the global    put back
generator of seeds
random numbers of Python and NumPy         put back
seeds that TensorFlow gives eager          drawn from a generator of the run's own
operations

Other objects that a layer holds, and what is outside of the process, are left as the run leaves
them.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import changed_variables, global_state, own_eager_seeds
from tfparallel.internals.keras_layers import behind, layers_of
from tfparallel.replicas.local_copies import copies_here

_PLAIN = frozenset({type(None), bool, int, float, str})  # what most attributes are
_OBJECTS = (tf.__internal__.tracking.AutoTrackable, keras.Operation, keras.Metric)


@contextlib.contextmanager
def without_trace(model: keras.Model) -> Iterator[None]:
    """Within it, `model` and its layers, which are built, can be called eagerly."""
    with python_as_it_was(model) as variables:
        copies = [copy for each in variables for copy in copies_here(each)]
        before = [copy.read_value() for copy in copies]
        try:
            with ValuesApart(collect_losses=True, initialize_variables=False):
                yield
        finally:
            for copy, value in zip(copies, before, strict=True):
                copy.assign(value)


class ValuesApart(keras.StatelessScope):
    """Keeps assigned values; also gives those of other variables, for losses of weights."""

    def get_current_value(self, variable: keras.Variable) -> object:
        value = super().get_current_value(variable)
        return behind(variable) if value is None else value


@contextlib.contextmanager
def python_as_it_was(model: keras.Model) -> Iterator[list[tf.Variable]]:
    """Puts all back but variables; gives the `tf.Variable`s that `model` and its layers hold."""
    copies = _Copies()
    copies.add(vars(global_state.GLOBAL_STATE_TRACKER))
    copies.add(layers_of(model))
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with own_eager_seeds():
            yield copies.variables
    finally:
        np.random.set_state(numpy)
        random.setstate(python)
        copies.put_back()


class _Copies:
    """What objects hold, to be put back into them.

    Attributes:
        variables: the `tf.Variable`s found.
    """

    def __init__(self) -> None:
        self.variables: list[tf.Variable] = []
        self._seen: dict[int, Any] = {}  # holds them, so that no other object gets their id
        self._undo: list[Callable] = []

    def add(self, value: Any) -> None:
        """Copies `value`, if it is a container or of Keras or TensorFlow, and all that it holds."""
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, tf.Variable):
            self.variables.append(value)
        elif isinstance(value, _OBJECTS):
            self.add(vars(value))
        elif issubclass(kind, np.ndarray):
            if value.flags.writeable:
                self._undo.append(_undo_array(value))
        elif issubclass(kind, dict):
            self._undo.append(_undo_dict(value))
            self._add_all(list(dict.values(value)))
        elif issubclass(kind, list):
            self._undo.append(_undo_list(value))
            self._add_all(list(value))
        elif issubclass(kind, set):
            self._undo.append(_undo_set(value))
        elif issubclass(kind, tuple):
            self._add_all(value)

    def _add_all(self, values: Sequence) -> None:
        for value in values:
            self.add(value)

    def put_back(self) -> None:
        """Puts everything back, where it was in the same objects."""
        for undo in self._undo:
            undo()


# Methods of the plain types: subclasses, such as Keras's lists, track what is put into them.


def _undo_dict(value: dict) -> Callable[[], None]:
    before = dict(value)

    def undo() -> None:
        dict.clear(value)
        dict.update(value, before)

    return undo


def _undo_list(value: list) -> Callable[[], None]:
    before = list(value)
    return lambda: list.__setitem__(value, slice(None), before)


def _undo_set(value: set) -> Callable[[], None]:
    before = set(value)

    def undo() -> None:
        set.clear(value)
        set.update(value, before)

    return undo


def _undo_array(value: np.ndarray) -> Callable[[], None]:
    before = value.copy()
    return lambda: np.copyto(value, before)


@contextlib.contextmanager
def variables_as_they_were(function: tf.types.experimental.ConcreteFunction) -> Iterator[None]:
    """Puts back every variable, of whomever, that calls of `function` change.

    Args:
        function: concrete, that is, traced.
    """
    before = [
        (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=kind))
        for handle, kind in changed_variables(function.graph)
    ]
    try:
        yield
    finally:
        for handle, value in before:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
