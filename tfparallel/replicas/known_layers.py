"""The layers that a function given to `strategy.run` uses, as far as its code names them.

model = ...                              a global, or from around the function
def forward(x): return model(x)          in a function that it uses
class Trainer:                           an attribute of the object whose method it is
    def step(self, x): self.model(x)
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TypeGuard

import keras

from tfparallel.internals.keras_layers import layers_of
from tfparallel.replicas.model_optimizers import known_to


def layers_known_to(function: Callable) -> list[keras.Layer]:
    """Those that are named, all layers in them, and those of functions that are named."""
    found: dict[int, keras.Layer] = {}
    seen: set[int] = set()

    def look_at(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, keras.Layer):
            found.update({id(layer): layer for layer in layers_of(value)})
        elif isinstance(value, Mapping):
            look_at_each(value.values())
        elif isinstance(value, (list, tuple)):
            look_at_each(value)
        elif _is_of_user(value):
            look_at_each(known_to(value))
            look_at_each(getattr(getattr(value, "__self__", None), "__dict__", {}).values())

    def look_at_each(values: Iterable[object]) -> None:
        for value in list(values):
            look_at(value)

    look_at(_plain(function))
    return list(found.values())


def _plain(function: Callable) -> Callable:
    """The Python function of a `tf.function`."""
    return getattr(function, "python_function", function)


def _is_of_user(value: object) -> TypeGuard[Callable]:
    """Whether `value` is a function, and not one of a library, whose globals are many."""
    plain = inspect.unwrap(_plain(value)) if callable(value) else value
    is_function = inspect.isfunction(plain) or inspect.ismethod(plain) or _is_partial(plain)
    module = (getattr(plain, "__module__", None) or "").partition(".")[0]
    return is_function and module not in ("keras", "tensorflow", "tfparallel", "numpy")


def _is_partial(value: object) -> bool:
    return hasattr(value, "func") and hasattr(value, "keywords")
