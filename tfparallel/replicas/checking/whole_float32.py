"""float32 with all of its 24 bits, where two computations are compared."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """Within, GPUs multiply float32 as such; afterwards as before.

    Ampere and newer GPUs use TF32 by default: 11 bits of mantissa, so that products differ by a
    thousandth between kernels that are both right.

    Source: `tf.config.experimental.enable_tensor_float_32_execution`.
    """
    was_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_enabled)
