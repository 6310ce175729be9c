"""The CTC loss of Keras's TensorFlow backend, which all of Keras's CTC losses call."""

import contextlib
from collections.abc import Callable, Iterator

# Where it is looked up when it is called.
from keras.src.backend.tensorflow import nn as keras_nn

from tfparallel.internals.hooks import shadowed, wrapped


@contextlib.contextmanager
def ctc_loss_by(hook: Callable) -> Iterator[None]:
    """Within it, `hook` is called: with Keras's function, and what that is called with."""
    with shadowed(
        keras_nn,
        "ctc_loss",
        wrapped(keras_nn, "ctc_loss", hook),
        during="a step on replicas",
        why="TensorFlow cannot compute it of no rows: it gets one, which is cut off.",
    ):
        yield
