"""Batches that are on the devices before the step that takes them begins.

    reader thread:  read 2, place 2 | read 3, place 3 | read 4, ...
    steps:          step 0          | step 1          | step 2

A copy to a GPU waits for the kernels that the GPU was given before it, so a batch that is copied
when its step begins comes after the step before has ended, and the GPU has nothing to do meanwhile.
Two batches ahead, the copy waits for one step and goes on during the next.

One thread reads, one batch after the other, so their order is that of the dataset. It never asks
for a batch that Keras would not ask for, where it is known how many those are: who reads on fills a
`cache` that would stay empty. What it has read and no step has had yet is shown to a backup.
"""

import collections
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import tensorflow as tf

from tfparallel.internals import TrainerCall
from tfparallel.internals.keras_epochs import steps_of_iterator
from tfparallel.replicas.local_replicas import LocalReplicas
from tfparallel.replicas.placed_batch import BatchPlacement, PlacedBatch, can_be_placed

AHEAD_ON_GPUS = 2
_END = object()


class PlacesAhead(LocalReplicas, Protocol):
    """What is asked of the `extended` of a strategy."""

    _num_batches_ahead: int | None  # of their steps; None: as suits the devices
    _places_batches: bool  # whether a batch may be on the replicas' devices before its step


def batches_ahead_by_default(devices: Iterable[str]) -> int:
    """How many batches are read ahead where nobody says: none where a copy is no copy."""
    on_gpus = all(tf.DeviceSpec.from_string(device).device_type == "GPU" for device in devices)
    return AHEAD_ON_GPUS if on_gpus else 0


def with_batches_ahead(
    extended: PlacesAhead, batches: Iterable[object], call: TrainerCall
) -> Iterable[object]:
    """`batches`, which `call` iterates over, placed ahead of their steps as the strategy says."""
    asked = extended._num_batches_ahead
    ahead = batches_ahead_by_default(extended.worker_devices) if asked is None else asked
    if not ahead or not extended._places_batches or not isinstance(batches, tf.data.Dataset):
        return batches
    if not can_be_placed(batches.element_spec):
        if asked is not None:
            tf.get_logger().warning(
                "Batches of ragged, sparse or text tensors, or of unknown rank, are not placed on "
                "devices ahead of their steps. Received: prefetch_batches=%d for a dataset of %s.",
                *(asked, batches.element_spec),
            )
        return batches
    return DatasetAhead(extended, batches, ahead, call)


class DatasetAhead:
    """A dataset whose batches are read and placed `ahead` steps before they are asked for.

    Attributes:
        read_dataset: where they come from.
    """

    def __init__(
        self, extended: PlacesAhead, dataset: tf.data.Dataset, ahead: int, call: TrainerCall
    ):
        self.read_dataset, self._ahead = dataset, ahead
        self._place = BatchPlacement(extended, dataset.element_spec).place
        # Keras's iterator has this object, and shall go with its data when the call is over.
        self._epoch_iterator: Any = weakref.ref(call.epoch_iterator)

    def __iter__(self) -> "BatchesAhead":
        most = _most_asked(self._epoch_iterator())
        return BatchesAhead(iter(self.read_dataset), self._place, self._ahead, most)


def _most_asked(epoch_iterator: Any) -> int | None:
    """How many batches Keras asks an iterator for, at most; None where it asks until the end."""
    _, num_batches = steps_of_iterator(epoch_iterator)
    at_once = epoch_iterator.steps_per_execution
    return None if num_batches is None else -(-num_batches // at_once) * at_once


class BatchesAhead:
    """The batches of one iterator, in its order.

    Args:
        source: gives batches of the host.
        place: makes of one what a step takes.
        ahead: how many are read before they are asked for.
        most: how many `source` is asked for; None: until it ends.

    Attributes:
        source: as given. Nobody reads from it once a batch was asked for here.
    """

    def __init__(self, source: Iterator, place: Callable, ahead: int, most: int | None = None):
        self.source, self._place, self._count = source, place, ahead
        self._left = most
        self._reader = ThreadPoolExecutor(1, "tfparallel-batches-ahead")
        self._ahead: collections.deque[Future] = collections.deque()
        self._begins_step = False
        self._has_ended = threading.Event()

    def __iter__(self) -> Iterator:
        self._begins_step = True  # Keras makes an iterator of an iterator for each execution
        return self

    def __next__(self) -> PlacedBatch:
        """The next batch, placed.

        Raises:
            tf.errors.OutOfRangeError: at the end, as an exhausted `tf.data` iterator, which is what
                Keras looks for where an execution begins.
            StopIteration: at the end within an execution of several steps.
            Exception: what the source or the copy of this batch has raised.
        """
        begins_step, self._begins_step = self._begins_step, False
        self._read_up_to(1)
        read: Any = self._ahead[0].result() if self._ahead else _END
        if read is _END:
            if begins_step:
                raise tf.errors.OutOfRangeError(None, None, "end of the dataset")
            raise StopIteration
        self._ahead.popleft()
        self._read_up_to(self._count)
        return read[1]

    def _read_up_to(self, count: int) -> None:
        while len(self._ahead) < count and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            self._ahead.append(
                self._reader.submit(_read, self.source, self._place, self._has_ended)
            )

    # ---- for backups -----------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """Waits for what is being read; whether all of it could be."""
        return all(future.exception() is None for future in self._ahead)

    def not_taken(self) -> list:
        """The batches, as the source gave them, that were read and are still to come."""
        read = [future.result() for future in self._ahead]
        return [batch[0] for batch in read if batch is not _END]

    def peek(self, most: int) -> list:
        """The next batches as the source gives them, as far as there are so many."""
        self._read_up_to(most)
        return self.not_taken()[:most] if self.is_whole() else []

    def skip(self, count: int) -> None:
        """Tells that the source has been asked for so many already, elsewhere."""
        self._left = None if self._left is None else max(0, self._left - count)

    def begin_with(self, batches: list) -> None:
        """Gives these first, which a source gave once."""
        self._ahead.extend(self._reader.submit(_given, batch, self._place) for batch in batches)


def _read(source: Iterator, place: Callable, has_ended: threading.Event) -> object:
    if has_ended.is_set():
        return _END
    try:
        batch = next(source)
    except (StopIteration, tf.errors.OutOfRangeError):
        has_ended.set()
        return _END
    return batch, place(batch)


def _given(batch: object, place: Callable) -> tuple:
    return batch, place(batch)
