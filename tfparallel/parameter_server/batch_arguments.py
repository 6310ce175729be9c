"""A batch on its way to workers: what a step is called with, and how it makes the batch of that.

arguments        chief                      with a step come             in the step
--------------   ------------------------   --------------------------   --------------------
ReadByChief      reads the batch            its rows                     nothing is to do
Rows             knows its row numbers      arrays that are there, and   rows are gathered
SharedRows       likewise                   those numbers                likewise, on each host
Numbered         knows its number           the batch, read there        nothing is to do
SharedBatch      likewise                   iterators that are there     each host reads
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import keras
import tensorflow as tf

from tfparallel.replicas.batch import OfRows


@dataclass(frozen=True)
class Host:
    """A worker that takes a step: its CPU or GPU, where data goes, and its replicas' numbers.

    Asynchronous workers count by their devices: each takes steps of its own (`worker_lanes.py`).
    """

    worker: int
    device: str
    replicas: range


@dataclass(frozen=True)
class Hosts:
    """The workers that take a step, in the order of their replicas: all of them, or one."""

    of_worker: tuple[Host, ...]

    @classmethod
    def of_one(cls, worker: int, device: str) -> "Hosts":
        """One worker, with one replica."""
        return cls((Host(worker, device, range(1)),))

    @property
    def num_replicas(self) -> int:
        """Of all workers."""
        return self.of_worker[-1].replicas.stop

    def __iter__(self) -> Iterator[Host]:
        return iter(self.of_worker)


@runtime_checkable
class BatchArguments(Protocol):
    """What one step is called with, in both modes."""

    @property
    def specs(self) -> object:
        """A nest of `TypeSpec`s, of `tensors`."""

    @property
    def recipe(self) -> Callable[[object], object]:
        """Makes the batch of `tensors`, in the step; equal for all that are traced alike."""

    def tensors(self, hosts: Hosts) -> object:
        """A nest of tensors, on `hosts` or here; called again where the step is done again."""

    def here(self) -> object:
        """The batch, or what tells it from others, on the chief: a nest of tensors."""


class ReadByChief:
    """A batch that the chief has read: TensorFlow sends each worker its rows with the step.

    What is known of shapes matters: Keras weighs a batch by its rows where it knows them.

    Args:
        batch: as Keras hands it to its functions.
        specs: of the dataset that it is from, if it is.
    """

    def __init__(self, batch: object, specs: object = None):
        self._batch = keras.tree.map_structure(_as_tensor, batch)
        self.specs = keras.tree.map_structure(_spec, self._batch if specs is None else specs)

    @classmethod
    def of_any_rows(cls, batch: object) -> "ReadByChief":
        """One whose step takes batches of other numbers of rows, too."""
        tensors = keras.tree.map_structure(_as_tensor, batch)
        return cls(tensors, specs_of_any_rows(tensors))

    def tensors(self, hosts: Hosts) -> object:
        """The batch."""
        del hosts
        return self._batch

    def here(self) -> object:
        """The batch."""
        return self._batch

    @staticmethod
    def recipe(batch: object) -> object:
        """The batch itself."""
        return batch


def _as_tensor(leaf: object) -> object:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _spec(leaf: object) -> object:
    if leaf is None or isinstance(leaf, tf.OptionalSpec):
        return None
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)


def specs_of_any_rows(arguments: object) -> object:
    """The specs of a nest of tensors, with any number of rows."""

    def spec(leaf: OfRows | None) -> object:
        if leaf is None or not isinstance(leaf, tf.Tensor):
            return None if leaf is None else tf.type_spec_from_value(leaf)
        return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)

    return tf.nest.map_structure(spec, arguments)
