"""An Embedding takes the rows it needs from the servers of its table, and leaves the table there.

Keras reads the whole table and gathers from it where it computes. Where the table is on a parameter
server, that sends all rows for the few of a batch:

    Keras     parameter server --- all rows ------------> worker: gather
    here      parameter server: gather --- rows of the batch ---> worker

Only layers that are created under a parameter server strategy are changed, each by itself.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.internals import in_stateless_scope
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import behind, embedding_table
from tfparallel.parameter_server.server_variables import RowsOnServers


def hook_embedding(layer: keras.Layer) -> None:
    """Makes `layer` gather on the servers, if it is an `Embedding`. Twice changes nothing."""
    is_stock = isinstance(layer, keras.layers.Embedding)
    if is_stock and type(layer).call is keras.layers.Embedding.call and "call" not in vars(layer):
        hook_once(
            layer,
            "call",
            wrapped(layer, "call", functools.partial(_call, layer)),
            why="An Embedding's rows are gathered on the server of its table.",
        )


def _call(layer: keras.Layer, call: Callable, inputs: object) -> object:
    """`Embedding.call`; what is no plain lookup goes the usual way."""
    created = embedding_table(layer)
    table = behind(created)
    if (
        in_stateless_scope()
        or layer.embeddings is not created  # quantised, or with LoRA
        or not isinstance(table, RowsOnServers)
        or not table.trainable
        or not isinstance(inputs, tf.Tensor)
    ):
        return call(inputs)
    rows = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    rows = tf.where(rows < 0, rows + layer.input_dim, rows)  # as `keras.ops.take` counts
    return tf.cast(table.sparse_read(rows), layer.compute_dtype)
