"""The inputs of one microbatch, to measure a model's layers with."""

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import ArrayDataAdapter, TrainerCall
from tfparallel.internals.datasets import arrays_of
from tfparallel.pipeline.profile import ROWS, zeros_like_spec


class FirstBatches:
    """What is known of the first batch of each model.

    Args:
        num_microbatches: parts of a batch.
    """

    def __init__(self, num_microbatches: int):
        self._num_microbatches = num_microbatches
        self._inputs: Any = weakref.WeakKeyDictionary()

    def take(self, model: keras.Model) -> tf.Tensor:
        """The inputs of a microbatch of `model`, which are kept no longer; None if not known."""
        return self._inputs.pop(model, None)

    def note_arrays(self, call: TrainerCall) -> None:
        """Notes the first rows of arrays; any other dataset would lose those that are looked at."""
        adapter: Any = call.data_adapter
        if not isinstance(adapter, ArrayDataAdapter) or call.model in self._inputs:
            return
        arrays, num_rows, *_ = arrays_of(adapter)
        rows = min(adapter.batch_size, num_rows)
        rows = -(-rows // self._num_microbatches)
        x = keras.utils.unpack_x_y_sample_weight(arrays)[0]
        if all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in keras.tree.flatten(x)):
            first = keras.tree.map_structure(lambda leaf: tf.constant(leaf[:rows]), x)
            self._inputs[call.model] = first

    def note_shapes(self, model: keras.Model, data: object) -> None:
        """Notes zeros of the shapes of a batch of which no real rows are known."""
        if model in self._inputs:
            return
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        leaves = keras.tree.flatten(x)
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            return
        num_rows = leaves[0].shape[0]
        rows = -(-num_rows // self._num_microbatches) if num_rows else ROWS
        with tf.init_scope():
            x = keras.tree.map_structure(lambda leaf: zeros_like_spec(leaf, rows), x)
            self._inputs[model] = x
