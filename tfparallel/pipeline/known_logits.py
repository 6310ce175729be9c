"""Which computations are to know the logits of the probabilities that they take.

Losses and metrics are, and whatever may call them. Others would only have more sent to them:
Keras's own layers do not look.
"""

from collections.abc import Sequence

import keras

from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.probabilities import Origin, origin_of


def origins_for(operations: Sequence, inputs: Sequence) -> list[Origin | None]:
    """What a computation is to know of each of its `inputs`.

    Args:
        operations: layers and Keras's operations in it; none in a loss or a metric.
        inputs: tensors.
    """
    if operations and not any(map(_may_call_losses, operations)):
        return [None for _ in inputs]
    return [origin_of(x) for x in inputs]


def _may_call_losses(operation: object) -> bool:
    if not isinstance(operation, keras.Layer):
        return type(operation).__name__.endswith("Crossentropy")
    layers = layers_of(operation)
    inner = [each for layer in layers for each in getattr(layer, "operations", ())]
    others = [each for each in inner if not isinstance(each, keras.Layer)]
    return any(map(_is_of_user, layers)) or any(map(_may_call_losses, others))


def _is_of_user(layer: keras.Layer) -> bool:
    is_of_keras = type(layer).__module__.startswith("keras.")
    return isinstance(layer, keras.layers.Lambda) or not is_of_keras
