"""Workers that share each batch read their own rows of it: the chief only says which.

given to `fit`   on each worker                                with a step come
--------------   --------------                                ----------------
arrays           the rows that its replicas get, or all rows   row numbers
                 where they are shuffled; shipped once
tf.data          the dataset, rebuilt from its graph           nothing: each worker reads the next
                                                               batch, and keeps its rows
otherwise        nothing                                       rows, which the chief has read

Which rows a step gets follows from the numbers of epoch and batch alone. So a step is done again
with the same rows, on workers that have come back with nothing; and a backup holds numbers.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.internals import ArrayDataAdapter, TrainerCall
from tfparallel.internals.datasets import arrays_of
from tfparallel.parameter_server.batch_arguments import Hosts
from tfparallel.parameter_server.dataset_graph import DatasetGraph
from tfparallel.parameter_server.remote_calls import remote_calls
from tfparallel.parameter_server.worker_data import ArrayRows, ArraysOnWorkers, DatasetOnWorkers
from tfparallel.replicas.batch import OnHost, OnHosts, split_rows
from tfparallel.replicas.peeked_iterator import PeekedIterator

Generation = Callable[[int], int]  # of a worker: how often it has been lost, with all that it kept


def shared_batches(
    dataset: tf.data.Dataset, call: TrainerCall, hosts: Hosts, generation: Generation
) -> "SharedArrays | SharedDataset | None":
    """What Keras iterates over, once for each epoch; None where the chief has to read.

    Args:
        dataset: what Keras has made of the data that `call` was given.

    Returns:
        An iterable of what `SharedStep` takes.
    """
    if ArraysOnWorkers.can_take(call.data_adapter):
        adapter: Any = call.data_adapter
        rows = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        return SharedArrays(adapter, rows, hosts, generation)
    if call.is_dataset_of_user and (graph := DatasetGraph.of(dataset)) is not None:
        return SharedDataset(dataset, graph, hosts, generation)
    return None


class NumberedBatches:
    """The batches of an epoch, by their numbers.

    Args:
        numbers: of rows or batches, from a dataset of them.
        batch: makes a batch of them.
        position: the iterator of the numbers, where its checkpoint is all that is needed to go on.
    """

    def __init__(self, numbers: Iterator, batch: Callable[[tf.Tensor], object], position: object):
        self._batches, self.position = PeekedIterator(map(batch, numbers)), position

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        return next(self._batches)

    def peek(self, most: int) -> list:
        """What tells the next batches from others, as far as there are so many."""
        return [batch.here() for batch in self._batches.peek(most)]


# ---- arrays --------------------------------------------------------------------------------------


class SharedArrays:
    """The arrays that `fit` was given.

    Args:
        adapter: Keras's view of them.
        batch_rows: how many rows every batch has; None where the last has fewer.
    """

    read_dataset = None  # the chief reads nothing

    def __init__(
        self,
        adapter: ArrayDataAdapter,
        batch_rows: int | None,
        hosts: Hosts,
        generation: Generation,
    ):
        _, num_rows, size, is_shuffled = arrays_of(adapter)
        self._hosts, self.recipe = hosts, GatherRows(hosts, batch_rows)
        self._rows = [  # that each worker has: in order, or all
            None if is_shuffled else rows_of_replicas(num_rows, size, hosts, host.replicas)
            for host in hosts
        ]
        self._arrays = ArraysOnWorkers(adapter, generation, self._rows)
        lengths = [batch_rows and _num_rows(batch_rows, hosts, host.replicas) for host in hosts]
        places = tuple(tf.TensorSpec([length], tf.int64) for length in lengths)
        arrays = (self._arrays.specs,) * len(places)
        self.specs = tf.TensorSpec((), tf.int32), places, arrays

    def __iter__(self) -> NumberedBatches:
        numbers = iter(self._arrays.row_numbers)
        return NumberedBatches(numbers, lambda rows: SharedRows(self, rows.numpy()), numbers)

    def rows(self, row_numbers: np.ndarray) -> object:
        """As `ArraysOnWorkers.rows`."""
        return self._arrays.rows(row_numbers)

    def tensors(self, row_numbers: np.ndarray) -> tuple:
        """For a batch of these rows: how many they are; then for each worker the places of its own
        among the rows that it has, and its arrays."""
        total, places = len(row_numbers), []
        for host in self._hosts:
            start, end = _bounds(total, self._hosts, host.replicas)
            own, rows = row_numbers[start:end], self._rows[host.worker]
            places.append(tf.constant(own if rows is None else np.searchsorted(rows, own)))
        with remote_calls():
            arrays = [self._arrays.on(host.worker, host.device) for host in self._hosts]
        return tf.constant(total), tuple(places), tuple(arrays)


@dataclass(frozen=True)
class SharedRows:
    """Arguments of a step: the rows of these numbers."""

    arrays: SharedArrays
    row_numbers: np.ndarray

    @property
    def specs(self) -> tuple:
        """Of `tensors`."""
        return self.arrays.specs

    @property
    def recipe(self) -> "GatherRows":
        """Makes the batch."""
        return self.arrays.recipe

    def tensors(self, hosts: Hosts) -> tuple:
        """As `SharedArrays.tensors`; `hosts` are those of the arrays."""
        del hosts
        return self.arrays.tensors(self.row_numbers)

    def here(self) -> object:
        """The rows."""
        return self.arrays.rows(self.row_numbers)


@dataclass(frozen=True)
class GatherRows:
    """Makes a batch of what `SharedRows` gives, in the step.

    Attributes:
        batch_rows: as in `SharedArrays`.
    """

    hosts: Hosts
    batch_rows: int | None

    def __call__(self, tensors: tuple) -> OnHosts:
        total, places, arrays = tensors
        total = total if self.batch_rows is None else self.batch_rows
        return OnHosts(
            OnHost(
                host.device,
                host.replicas,
                places[host.worker],
                total,
                functools.partial(_rows_of, arrays[host.worker]),
            )
            for host in self.hosts
        )


def _rows_of(arrays: object, indices: tf.Tensor) -> object:
    return ArrayRows.recipe((arrays, indices))


def rows_of_replicas(num_rows: int, batch_size: int, hosts: Hosts, replicas: range) -> np.ndarray:
    """The numbers of the rows that some replicas get of arrays in order, ascending."""
    starts = range(0, num_rows, batch_size)
    bounds = [_bounds(min(batch_size, num_rows - start), hosts, replicas) for start in starts]
    ranges = zip(starts, bounds, strict=True)
    return np.concatenate([np.arange(start + a, start + b) for start, (a, b) in ranges])


def _bounds(total: int, hosts: Hosts, replicas: range) -> tuple[int, int]:
    bounds = split_rows(total, hosts.num_replicas, replicas)
    return bounds[0][0], bounds[-1][1]


def _num_rows(total: int, hosts: Hosts, replicas: range) -> int:
    start, end = _bounds(total, hosts, replicas)
    return end - start


# ---- tf.data -------------------------------------------------------------------------------------


class SharedDataset:
    """A `tf.data.Dataset` of which every worker reads every batch, for its own rows."""

    read_dataset = None  # the chief reads nothing

    def __init__(
        self, dataset: tf.data.Dataset, graph: DatasetGraph, hosts: Hosts, generation: Generation
    ):
        self._dataset, self._graph = DatasetOnWorkers(dataset, graph, generation), graph
        self._hosts, self.recipe = hosts, ReadBatch(hosts)
        self.specs = (tf.data.IteratorSpec(dataset.element_spec),) * len(hosts.of_worker)

    def __iter__(self) -> NumberedBatches:
        epoch, length = self._dataset.begin_epoch(), self._graph.num_batches
        numbers = iter(tf.data.Dataset.range(length if length >= 0 else tf.int64.max))

        def batch(number: tf.Tensor) -> SharedBatch:
            self._dataset.take(epoch, int(number))
            return SharedBatch(self, epoch, int(number))

        return NumberedBatches(numbers, batch, numbers if self._graph.is_left_unread else None)

    def here(self, number: int) -> object:
        """As `DatasetOnWorkers.here`."""
        return self._dataset.here(number)

    def iterators_at(self, epoch: int, number: int) -> tuple:
        """For each worker an iterator there, whose next batch is the one asked for."""
        with remote_calls():
            return tuple(
                self._dataset.reader(host.worker, host.device).iterator_at(epoch, number)
                for host in self._hosts
            )


@dataclass(frozen=True)
class SharedBatch:
    """Arguments of a step: the batch of this number."""

    dataset: SharedDataset
    epoch: int
    number: int

    @property
    def specs(self) -> tuple:
        """Of `tensors`."""
        return self.dataset.specs

    @property
    def recipe(self) -> "ReadBatch":
        """Makes the batch."""
        return self.dataset.recipe

    def tensors(self, hosts: Hosts) -> tuple:
        """As `SharedDataset.iterators_at`; `hosts` are those of the dataset."""
        del hosts
        return self.dataset.iterators_at(self.epoch, self.number)

    def here(self) -> object:
        """As `DatasetOnWorkers.here`."""
        return self.dataset.here(self.number)


@dataclass(frozen=True)
class ReadBatch:
    """Makes a batch of what `SharedBatch` gives, in the step: all workers read at a time."""

    hosts: Hosts

    def __call__(self, iterators: tuple) -> OnHosts:
        on_hosts = []
        for host in self.hosts:
            with tf.device(host.device):
                batch = iterators[host.worker].get_next()
            on_hosts.append(OnHost(host.device, host.replicas, batch))
        return OnHosts(on_hosts)
