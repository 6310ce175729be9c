"""Workers read their own data: the chief only says which batch.

arrays      shipped to each worker once, at its first step; a step then brings row numbers along
tf.data     the dataset's graph is rebuilt on each worker; a step then brings a batch number along,
            and the worker reads on to it, passing over the batches that others take
otherwise   the chief reads and sends every batch: generators, and datasets whose order is not fixed
            by seeds, of which two workers would read different batches by one number

Batch k is the same batch whoever computes it, so a slow worker takes fewer, every example of an
epoch is used exactly once, and the step of a lost worker can be done by another.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import ArrayDataAdapter
from tfparallel.internals.datasets import arrays_of
from tfparallel.parameter_server.batch_arguments import Hosts, specs_of_any_rows
from tfparallel.parameter_server.dataset_graph import DatasetGraph
from tfparallel.parameter_server.dataset_reader import DatasetReader
from tfparallel.replicas.peeked_iterator import BatchOfNumber

_HERE = "/device:CPU:0"
_LARGEST_ARRAY_BYTES = 1 << 30  # a gRPC message ends at 2 GiB


class ArrayRows:
    """Rows of arrays that are on the workers."""

    def __init__(self, arrays: "ArraysOnWorkers", indices: np.ndarray):
        self._arrays, self._indices = arrays, indices
        self.specs = (arrays.specs, tf.TensorSpec([None], tf.int64))

    def tensors(self, hosts: Hosts) -> tuple:
        """The arrays, which stay where they are, and the row numbers."""
        (host,) = hosts
        return self._arrays.on(host.worker, host.device), tf.constant(self._indices)

    def here(self) -> object:
        """The rows."""
        return self._arrays.rows(self._indices)

    @staticmethod
    def recipe(arrays_and_indices: tuple) -> object:
        """The rows, gathered in the worker's step."""
        arrays, indices = arrays_and_indices
        return tf.nest.map_structure(lambda a: None if a is None else tf.gather(a, indices), arrays)


class ArraysOnWorkers:
    """The arrays that `fit` was given, in the batches that Keras would make of them.

    Args:
        adapter: Keras's view of the arrays.
        generation: tells how often a worker has been lost: its arrays are shipped again.
        rows: for each worker those that it needs; None for all.

    Attributes:
        row_numbers: a dataset of the numbers of each batch's rows.
    """

    def __init__(
        self,
        adapter: ArrayDataAdapter,
        generation: Callable[[int], int],
        rows: Sequence[np.ndarray | None] | None = None,
    ):
        self._generation, self._rows = generation, rows
        own = arrays_of(adapter)
        arrays = keras.tree.lists_to_tuples(own.arrays)
        self._arrays = keras.tree.map_structure(_as_array, arrays)
        self.specs = specs_of_any_rows(keras.tree.map_structure(_spec_like, self._arrays))
        # Shuffled as Keras shuffles the arrays: the same operations draw from the same seeds.
        numbers = np.arange(own.num_rows)
        batches = ArrayDataAdapter(numbers, batch_size=own.batch_size, shuffle=own.is_shuffled)
        self.row_numbers = batches.get_tf_dataset()
        self._shipped: dict[int, tuple[int, Any]] = {}

    @staticmethod
    def can_take(adapter: object) -> bool:
        """Whether all arrays are dense, of numbers."""
        return isinstance(adapter, ArrayDataAdapter) and all(
            _is_dense(array) for array in keras.tree.flatten(arrays_of(adapter).arrays)
        )

    def on(self, worker: int, device: str) -> object:
        """The arrays as tensors of the worker; called by the worker's thread."""
        generation = self._generation(worker)
        known = self._shipped.get(worker)
        if known is None or known[0] != generation:
            rows = None if self._rows is None else self._rows[worker]
            # Made here, then copied: making tensors elsewhere holds Python's lock all the time.
            here = tf.nest.map_structure(
                lambda a: None if a is None else tf.constant(a if rows is None else a[rows]),
                self._arrays,
            )
            with tf.device(device):
                shipped = tf.nest.map_structure(
                    lambda a: None if a is None else tf.identity(a), here
                )
            self._shipped[worker] = known = (generation, shipped)
        return known[1]

    def rows(self, numbers: np.ndarray) -> object:
        """Those rows of the arrays, on the chief; a nest as Keras makes a batch of them."""
        return keras.tree.map_structure(lambda a: None if a is None else a[numbers], self._arrays)

    def __iter__(self) -> Iterator[ArrayRows]:
        return (ArrayRows(self, rows.numpy()) for rows in self.row_numbers)


def _is_dense(array: object) -> bool:
    if array is None:
        return True
    is_array = isinstance(array, (np.ndarray, tf.Tensor))
    return is_array and np.asarray(array).dtype.kind in "fiub" and _fits(np.asarray(array))


def _fits(array: np.ndarray) -> bool:
    return array.nbytes < _LARGEST_ARRAY_BYTES


def _as_array(array: object) -> object:
    if array is None:
        return None
    array = np.asarray(array)
    # As Keras does.
    floatx = keras.config.floatx()
    return array.astype(floatx, copy=False) if array.dtype.kind == "f" else array


def _spec_like(array: np.ndarray | None) -> object:
    return None if array is None else tf.constant(array[:1])


class Numbered:
    """The batch of one number of an epoch."""

    def __init__(self, dataset: "DatasetOnWorkers", epoch: int, number: int):
        self._dataset, self._epoch, self._number = dataset, epoch, number
        self.specs = dataset.specs

    def tensors(self, hosts: Hosts) -> object:
        """The batch, read on the worker, where it stays."""
        (host,) = hosts
        return self._dataset.reader(host.worker, host.device).read(self._epoch, self._number)

    def here(self) -> object:
        """As `DatasetOnWorkers.here`."""
        return self._dataset.here(self._number)

    @staticmethod
    def recipe(batch: object) -> object:
        """The batch itself."""
        return batch


class DatasetOnWorkers:
    """A `tf.data.Dataset` rebuilt on every worker from its graph.

    Args:
        dataset: of batches.
        graph: of the dataset.
        generation: as in `ArraysOnWorkers`.
    """

    def __init__(
        self, dataset: tf.data.Dataset, graph: DatasetGraph, generation: Callable[[int], int]
    ):
        self._graph, self._generation = graph, generation
        self.specs = tf.nest.map_structure(lambda spec: spec, dataset.element_spec)
        self._readers: dict[int, tuple[int, DatasetReader]] = {}
        self._first_batch: Any = None
        # `fit`, called again, goes on with the next order of a dataset that shuffles, as on one
        # device; unless every worker would have to read all earlier epochs for it.
        self._num_taken = _num_taken.setdefault(dataset, []) if graph.is_left_unread else []

    def begin_epoch(self) -> int:
        """The number of an epoch that begins now."""
        self._num_taken.append(0)
        return len(self._num_taken) - 1

    def take(self, epoch: int, number: int) -> Numbered:
        """The batch of that number."""
        self._num_taken[epoch] = max(self._num_taken[epoch], number + 1)
        return Numbered(self, epoch, number)

    def here(self, number: int) -> BatchOfNumber:
        """Stands for batch `number`, through which the chief would have to read for nothing."""
        if self._first_batch is None:
            self._first_batch = DatasetReader(self._graph, self.specs, _HERE, [0]).read(0, 0)
        return BatchOfNumber(self._first_batch, number)

    def __iter__(self) -> Iterator[Numbered]:
        epoch, length = self.begin_epoch(), self._graph.num_batches
        numbers = range(length) if length >= 0 else itertools.count()
        return (self.take(epoch, number) for number in numbers)

    def reader(self, worker: int, device: str) -> DatasetReader:
        """The worker's copy; called by the worker's thread."""
        generation = self._generation(worker)
        known = self._readers.get(worker)
        if known is None or known[0] != generation:
            device = device.rpartition("/")[0] + "/device:CPU:0"
            reader = DatasetReader(self._graph, self.specs, device, self._num_taken)
            self._readers[worker] = known = (generation, reader)
        return known[1]


_num_taken: MutableMapping[tf.data.Dataset, list[int]] = weakref.WeakKeyDictionary()
