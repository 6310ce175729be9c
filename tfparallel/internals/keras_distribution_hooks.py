"""What `keras.distribution` lacks on TensorFlow, and its one global setting, watched.

Keras's module of the TensorFlow backend has the devices' names and nothing that computes. What its
public functions ask for is put there as long as `distribution_installed` lasts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace

# The backend's side of `keras.distribution`, which Keras's own side calls.
from keras.src.backend.tensorflow import distribution_lib as backend_side

# Keras's own side: `set_distribution` and `Distribution.scope` are here.
from keras.src.distribution import distribution_lib as keras_side

# What makes batches of the data that `fit` is given: it asks which Distribution is set.
from keras.src.trainers import data_adapters

from tfparallel.internals.hooks import shadowed


@contextlib.contextmanager
def distribution_installed(
    functions: Mapping[str, Callable], changed: Callable[[object], None]
) -> Iterator[None]:
    """Within it, Keras's functions reach `functions`, and every new setting reaches `changed`.

    Args:
        functions: of Keras's backend module, by name.
        changed: called with the `Distribution` that is set, or None, before Keras notes it.
    """
    with contextlib.ExitStack() as hooks:
        for name, function in functions.items():
            hooks.enter_context(
                shadowed(
                    backend_side,
                    name,
                    function,
                    during="keras_distribution.enable()",
                    why="Keras's TensorFlow backend lacks this side of keras.distribution.",
                )
            )
        hooks.enter_context(
            shadowed(
                keras_side,
                "global_state",
                _Watched(keras_side.global_state, changed),
                during="keras_distribution.enable()",
                why="Which Distribution is set decides what a model trains under.",
            )
        )
        hooks.enter_context(
            shadowed(
                data_adapters,
                "distribution_lib",
                SimpleNamespace(distribution=lambda: None),
                during="keras_distribution.enable()",
                why="Between processes the strategy divides data; Keras would divide it before.",
            )
        )
        yield


def is_distribution_watched() -> bool:
    """Whether `distribution_installed` lasts, so that what is set is a strategy of ours."""
    return isinstance(keras_side.global_state, _Watched)


class _Watched:
    """Keras's module of global state, as its distribution module sees it."""

    def __init__(self, module: ModuleType, changed: Callable[[object], None]):
        self._module, self._changed = module, changed

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def set_global_attribute(self, name: str, value: object) -> None:
        """As Keras's, but `changed` may refuse the value."""
        if name == keras_side.GLOBAL_ATTRIBUTE_NAME:
            self._changed(value)
        self._module.set_global_attribute(name, value)
