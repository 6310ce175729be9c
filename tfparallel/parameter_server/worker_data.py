"""Workers read their own data: the chief only says which batch.

arrays      shipped to each worker once, at its first step; a step then brings row numbers along
tf.data     the dataset's graph is rebuilt on each worker; a step then brings a batch number along,
            and the worker reads on to it, passing over the batches that others take
otherwise   the chief reads and sends every batch (`Fed`): generators, and datasets whose order
            is not fixed by seeds, of which two workers would read different batches by one number

Batch k is the same batch whoever computes it, so a slow worker takes fewer, every example of an
epoch is used exactly once, and the step of a lost worker can be done by another.
"""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.parameter_server.remote_step import specs_of
from tfparallel.tf_internals import ArrayDataAdapter, serialized_dataset

_LARGEST_ARRAY_BYTES = 1 << 30  # a gRPC message ends at 2 GiB


class Rows:
    """Rows of arrays that are on the workers."""

    def __init__(self, arrays: "ArraysOnWorkers", indices: np.ndarray):
        self._arrays, self._indices = arrays, indices
        self.specs = (arrays.specs, tf.TensorSpec([None], tf.int64))

    def on(self, worker: int, device: str) -> tuple:
        """The arrays, which stay where they are, and the row numbers."""
        return self._arrays.on(worker, device), tf.constant(self._indices)

    @staticmethod
    def batch(arrays: Any, indices: tf.Tensor) -> Any:
        """The rows, gathered in the worker's step."""
        return tf.nest.map_structure(lambda a: None if a is None else tf.gather(a, indices), arrays)


class ArraysOnWorkers:
    """The arrays that `fit` was given, in the batches that Keras would make of them.

    Args:
        adapter: Keras's view of the arrays.
        generation: tells how often a worker has been lost: its arrays are shipped again.
    """

    def __init__(self, adapter: ArrayDataAdapter, generation: Any):
        self._adapter, self._generation = adapter, generation
        arrays = keras.tree.lists_to_tuples(adapter._inputs)
        self._arrays = keras.tree.map_structure(_as_array, arrays)
        self.specs = specs_of(keras.tree.map_structure(_spec_like, self._arrays))
        self._shipped: dict[int, tuple[int, Any]] = {}

    @staticmethod
    def can_take(adapter: Any) -> bool:
        """Whether all arrays are dense, of numbers."""
        return isinstance(adapter, ArrayDataAdapter) and all(
            _is_dense(array) for array in keras.tree.flatten(adapter._inputs)
        )

    def on(self, worker: int, device: str) -> Any:
        """The arrays as tensors of the worker; called by the worker's thread."""
        generation = self._generation(worker)
        known = self._shipped.get(worker)
        if known is None or known[0] != generation:
            # Made here, then copied: making tensors elsewhere holds Python's lock all the time.
            here = tf.nest.map_structure(
                lambda a: None if a is None else tf.constant(a), self._arrays
            )
            with tf.device(device):
                shipped = tf.nest.map_structure(
                    lambda a: None if a is None else tf.identity(a), here
                )
            self._shipped[worker] = known = (generation, shipped)
        return known[1]

    def first_batch(self) -> Any:
        """The first rows, as the user sees them."""
        rows = np.arange(min(self._adapter._batch_size, self._adapter._num_samples))
        return tf.nest.map_structure(
            lambda a: None if a is None else tf.constant(a[rows]), self._arrays
        )

    def __iter__(self) -> Iterator[Rows]:
        num_rows, size = self._adapter._num_samples, self._adapter._batch_size
        shuffle = self._adapter._shuffle
        rows = np.arange(num_rows, dtype=np.int64)
        if shuffle and shuffle != "batch":
            np.random.shuffle(rows)  # Keras's seed sets NumPy's
        for start in range(0, num_rows, size):
            batch = rows[start : start + size]
            yield Rows(self, np.random.permutation(batch) if shuffle == "batch" else batch)


def _is_dense(array: Any) -> bool:
    if array is None:
        return True
    is_array = isinstance(array, (np.ndarray, tf.Tensor))
    return is_array and np.asarray(array).dtype.kind in "fiub" and _fits(np.asarray(array))


def _fits(array: np.ndarray) -> bool:
    return array.nbytes < _LARGEST_ARRAY_BYTES


def _as_array(array: Any) -> Any:
    if array is None:
        return None
    array = np.asarray(array)
    # As Keras does.
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _spec_like(array: Any) -> Any:
    return None if array is None else tf.constant(array[:1])


class Numbered:
    """The batch of one number of an epoch."""

    def __init__(self, dataset: "DatasetOnWorkers", epoch: int, number: int):
        self._dataset, self._epoch, self._number = dataset, epoch, number
        self.specs = (dataset.specs,)

    def on(self, worker: int, device: str) -> tuple:
        """The batch, read on the worker, where it stays."""
        return (self._dataset.read(worker, device, self._epoch, self._number),)

    @staticmethod
    def batch(batch: Any) -> Any:
        """The batch itself."""
        return batch


class DatasetOnWorkers:
    """A `tf.data.Dataset` rebuilt on every worker from its graph.

    Args:
        dataset: of batches, in an order that is fixed by seeds; `serialize` says whether it is.
        graph: what `serialize` gave for it.
        generation: as in `ArraysOnWorkers`.
    """

    def __init__(self, dataset: tf.data.Dataset, graph: tf.Tensor, generation: Any):
        self._dataset, self._graph, self._generation = dataset, graph, generation
        self.specs = tf.nest.map_structure(lambda spec: spec, dataset.element_spec)
        self._readers: dict[int, _Reader] = {}
        self._epochs = 0

    @staticmethod
    def serialize(dataset: tf.data.Dataset) -> tf.Tensor | None:
        """The dataset's graph, or None where two workers could read different batches from it."""
        known_specs = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
        specs = tf.nest.flatten(dataset.element_spec)
        length_is_known = int(dataset.cardinality()) != tf.data.UNKNOWN_CARDINALITY
        may_reorder = dataset.options().deterministic is False
        if may_reorder or not length_is_known:
            return None
        if not all(isinstance(spec, known_specs) for spec in specs):
            return None
        return serialized_dataset(dataset)

    def first_batch(self) -> Any:
        """The first batch, as the user sees it."""
        return next(iter(self._dataset))

    def __iter__(self) -> Iterator[Numbered]:
        epoch, self._epochs = self._epochs, self._epochs + 1
        length = int(self._dataset.cardinality())
        number = 0
        while length < 0 or number < length:
            yield Numbered(self, epoch, number)
            number += 1

    def read(self, worker: int, device: str, epoch: int, number: int) -> Any:
        """Batch `number` of `epoch`, on `worker`; called by the worker's thread."""
        generation = self._generation(worker)
        reader = self._readers.get(worker)
        if reader is None or reader.generation != generation:
            reader = _Reader(self._graph, self._dataset.element_spec, device, generation)
            self._readers[worker] = reader
        return reader.read(epoch, number)


@tf.function(reduce_retracing=True)
def _skip_and_read(iterator: Any, num_skipped: tf.Tensor) -> Any:
    for _ in tf.range(num_skipped):
        iterator.get_next()
    return iterator.get_next()


class _Reader:
    """One worker's copy of a dataset, and how far it has read."""

    def __init__(self, graph: tf.Tensor, element_spec: Any, device: str, generation: int):
        self.generation = generation
        self._device, self._element_spec = device.rpartition("/")[0] + "/device:CPU:0", element_spec
        with tf.device(self._device):
            variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
            self._dataset = tf.data.experimental.from_variant(variant, element_spec)
        self._epoch, self._next = -1, 0

    def read(self, epoch: int, number: int) -> Any:
        if epoch < self._epoch or (epoch == self._epoch and number < self._next):
            self._epoch = -1  # a step of another worker, done again: start over
        while self._epoch < epoch:
            # One iterator for each epoch, also those that are over: reshuffling counts them.
            with tf.device(self._device):
                self._iterator = iter(self._dataset)
            self._epoch, self._next = self._epoch + 1, 0
        num_skipped = tf.constant(number - self._next)
        self._next = number + 1
        with tf.device(self._device):
            return _skip_and_read(self._iterator, num_skipped)
