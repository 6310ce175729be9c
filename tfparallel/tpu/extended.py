"""TensorFlow's own TPU strategy inside, with our hooks around."""

from typing import Any

import tensorflow as tf

from tfparallel.internals import TPUExtended
from tfparallel.tpu.spmd_step import SpmdExtended


class KerasTPUExtended(SpmdExtended, TPUExtended):
    """`TPUExtended` with the hooks of our strategies that one XLA program allows."""


def connect_to_tpu(tpu: str = "local") -> Any:
    """Finds and initialises a TPU.

    Args:
        tpu: name or address of a TPU, or "local" for the TPU of this TPU VM.

    Returns:
        An initialised `tf.distribute.cluster_resolver.TPUClusterResolver`.

    Raises:
        RuntimeError: if there is none, saying what was looked for.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        looked_for = (
            "the TPU of this TPU VM (tpu='local')" if tpu == "local" else f"a TPU at tpu={tpu!r}"
        )
        raise RuntimeError(
            f"TPUStrategy looked for {looked_for} and found none; it needs a machine with a TPU "
            "and `pip install 'tfparallel[tpu]'`."
        ) from error
    return resolver
