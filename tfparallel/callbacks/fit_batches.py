"""What the batches of one call of `Model.fit` look like, without taking one."""

import keras
import tensorflow as tf

from tfparallel.internals.keras_epochs import dataset_of_iterator
from tfparallel.internals.keras_trainer import Fit


def batch_spec(fit: Fit) -> tuple[object, int]:
    """A nest of `tf.TensorSpec` of `[rows, ...]`, and how many rows; 1 where that is not known.

    Raises:
        AttributeError: where the strategy has made something else of the data than a dataset.
    """
    rows = fit.epoch_iterator.data_adapter.batch_size or 1
    spec = dataset_of_iterator(fit.epoch_iterator).element_spec
    return keras.tree.map_structure(lambda each: _of_rows(each, rows), spec), rows


def _of_rows(spec: tf.TensorSpec, rows: int) -> tf.TensorSpec:
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)
