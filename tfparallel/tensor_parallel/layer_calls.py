"""What calls what in a model: it is traced once, without computing, and its layers' calls noted."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import FuncGraph
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import inputs_structure, kept_losses, layers_of
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.tensor_parallel.cuts import Cuts, cuts_of, is_cut_by_type


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: of Keras.
        inputs, outputs: symbolic tensors.
    """

    layer: keras.Layer
    inputs: list[Any]
    outputs: list[Any]

    @property
    def cuts(self) -> Cuts | None:
        """How the layer can be cut."""
        return cuts_of(self.layer, _shapes(self.inputs), _shapes(self.outputs))


@dataclass(frozen=True)
class ModelCalls:
    """All calls of a model's layers.

    Attributes:
        calls: in their order.
        borders: what the model takes and gives, tensors.
    """

    calls: list[LayerCall]
    borders: list[Any]


def calls_of(model: keras.Model, inputs: object = None) -> ModelCalls:
    """The calls of `model`'s layers; attention counts as one layer, a nested model as its layers.

    Args:
        model: built.
        inputs: what it is called with, a nest of anything with shape and dtype; by default what a
            functional model was made of.

    Raises:
        ValueError: if its inputs are not known.
    """
    specs = inputs_structure(model) if inputs is None else inputs
    if specs is None:
        raise ValueError(
            f"Expected a model whose inputs are known, such as a functional one. Received: model "
            f"'{model.name}' of class {type(model).__name__}. Give a batch of its inputs."
        )
    try:
        return _noted_calls(model, specs, training=False)
    except Exception:  # Keras's `RandomCrop` crops in training alone, for layers behind it
        return _noted_calls(model, specs, training=True)


def _noted_calls(model: keras.Model, specs: object, training: bool) -> ModelCalls:
    calls: list[LayerCall] = []
    with _noting(model, calls), keras.StatelessScope(), FuncGraph("layer_calls").as_default():
        given = keras.tree.map_structure(_placeholder, specs)
        with kept_losses(model), without_remat_of_keras(model):
            outputs = model(given, training=training)
    return ModelCalls(calls, [*_tensors(given), *_tensors(outputs)])


def _placeholder(spec: keras.KerasTensor) -> tf.Tensor:
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return tf.compat.v1.placeholder(dtype, spec.shape)


@contextlib.contextmanager
def _noting(model: keras.Model, calls: list[LayerCall]) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if layer is not model and _is_noted(layer):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        wrapped(layer, "call", _noted(layer, calls)),
                        during="the search for a layout",
                        why="Which layer's output another layer takes is noted.",
                    )
                )
        yield


def _noted(layer: keras.Layer, calls: list[LayerCall]) -> Callable:
    def call(original: Callable, *args: object, **kwargs: object) -> object:
        before = len(calls)
        outputs = original(*args, **kwargs)
        del calls[before:]  # of layers within: those of attention
        calls.append(LayerCall(layer, _tensors((args, kwargs)), _tensors(outputs)))
        return outputs

    return call


def _is_noted(layer: keras.Layer) -> bool:
    return is_cut_by_type(layer) or len(layers_of(layer)) == 1


def _tensors(nest: object) -> list:
    return [x for x in keras.tree.flatten(nest) if tf.is_tensor(x)]


def _shapes(tensors: list) -> list:
    return [x.shape.as_list() if x.shape.rank is not None else [] for x in tensors]
