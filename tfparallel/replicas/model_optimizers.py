"""The optimizers of a model: a GAN has one for each network, and compiles none of them."""

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import layers_of, trained_by


def optimizers_of(model: keras.Model) -> list[BaseOptimizer]:
    """The compiled one first, then the attributes of the model and of its layers that are some.

    Last those that its `train_step` knows as a function does: from around it, or from its module.
    Those in lists, tuples and dicts are found; see `hidden_optimizers_of` for the rest.
    """
    found: dict[int, BaseOptimizer] = {}

    def look_at(value: object) -> None:
        if isinstance(value, BaseOptimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, dict):
            look_at(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                look_at(item)

    look_at(getattr(model, "optimizer", None))
    for layer in layers_of(model):
        look_at(list(vars(layer).values()))
    look_at(known_to(getattr(model, "train_step", None)))
    return list(found.values())


def known_to(function: Callable | None) -> list[object]:
    """The values that a function, partial or method uses and was not called with."""
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    plain = inspect.unwrap(getattr(function, "__func__", function)) if function else None
    if not inspect.isfunction(plain):
        return values
    try:
        known = inspect.getclosurevars(plain)
    except ValueError:  # a variable around it has no value yet
        return values
    return [*values, *known.nonlocals.values(), *known.globals.values()]


def hidden_optimizers_of(model: keras.Model) -> list[BaseOptimizer]:
    """Optimizers that were built on weights of `model` and that `optimizers_of` does not find.

    Looks at all objects of the process: some 0.1 s.
    """
    known = {id(optimizer) for optimizer in _with_inner(optimizers_of(model))}
    weights = {id(weight) for weight in model.trainable_variables}
    built = [o for o in gc.get_objects() if issubclass(type(o), BaseOptimizer) and o.built]
    inner = {id(each) for optimizer in built for each in _with_inner([optimizer])[1:]}
    return [
        optimizer
        for optimizer in built
        if id(optimizer) not in known | inner
        and any(id(v) in weights for v in trained_by(optimizer))
    ]


def _with_inner(optimizers: list[BaseOptimizer]) -> list[BaseOptimizer]:
    inner = [getattr(optimizer, "inner_optimizer", None) for optimizer in optimizers]
    return [*optimizers, *(each for each in inner if each is not None)]
