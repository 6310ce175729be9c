"""The optimizers of a model: a GAN has one for each network, and compiles none of them."""

from typing import Any

import keras

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import layers_of


def optimizers_of(model: keras.Model) -> list[BaseOptimizer]:
    """The compiled one first, then the attributes of the model and of its layers that are some.

    Those in lists, tuples and dicts are found; those that only a function knows are not.
    """
    found: dict[int, BaseOptimizer] = {}

    def look_at(value: Any) -> None:
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
    return list(found.values())
