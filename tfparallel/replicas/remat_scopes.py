"""Layers made in a `keras.RematScope`, which says what of them is computed again, not how."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import RematMode, layers_of, remat_mode_of

Wants = Callable[[Any], bool]  # of a layer's outputs: whether it computes again


@contextlib.contextmanager
def without_remat_of_keras(model: keras.Model) -> Iterator[None]:
    """Within it, layers made in a `keras.RematScope` are called as if it were not there.

    Keras's own wraps calls with keywords in what takes none while a graph is traced
    (https://github.com/keras-team/keras/issues/21207). In its mode "activations" it wraps functions
    of one tensor, which works.
    """
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            mode = remat_mode_of(layer)
            if mode is not None and mode.mode != "activations":
                hook = shadowed(
                    layer,
                    "rematerialized_call",
                    _as_it_is,
                    during="the tracing of a step",
                    why="Layers of a `RematScope` are computed again by the graph of the step.",
                )
                hooks.enter_context(hook)
        yield


def wanted_by_scopes(model: keras.Model) -> list[tuple[keras.Layer, Wants]]:
    """The layers in `model` that scopes want computed again, and for which outputs."""
    wanted = []
    for layer in layers_of(model):
        wants = _wanted_by(remat_mode_of(layer), layer)
        if wants is not None and layer is not model:
            wanted.append((layer, wants))
    return wanted


def of_any_outputs(outputs: object) -> bool:
    """Whatever the outputs are."""
    del outputs
    return True


def _wanted_by(mode: RematMode | None, layer: keras.Layer) -> Wants | None:
    if mode is None:
        return None
    if mode.mode == "full" or (mode.mode == "list_of_layers" and layer.name in mode.layer_names):
        return of_any_outputs
    if mode.mode == "larger_than":
        return lambda outputs: _size(outputs) > mode.output_size_threshold
    return None


def _size(outputs: object) -> int:
    """Numbers in `outputs`, for one row where the number of rows is not known, as Keras counts."""
    shapes = [getattr(x, "shape", None) for x in keras.tree.flatten(outputs)]
    return sum(_product(shape) for shape in shapes if shape is not None)


def _product(shape: Iterable[int | None]) -> int:
    product = 1
    for size in shape:
        product *= size or 1
    return product


def _as_it_is(call: Callable, *args: object, **kwargs: object) -> Callable:
    del args, kwargs
    return call
