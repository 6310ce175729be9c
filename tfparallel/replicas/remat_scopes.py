"""Layers made in a `keras.RematScope`, which says what of them is computed again, not how."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import layers_of, remat_mode_of


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


def _as_it_is(call: Callable, *args: Any, **kwargs: Any) -> Callable:
    del args, kwargs
    return call
