"""What a worker remembers from step to step: tensors on the worker, known by the chief.

A step gets them as arguments and returns new ones, which take their place when the step's update
has been applied. So a step that is given to another worker has changed nothing here either. A
worker that was lost starts with nothing. Each device of a worker counts as one
here (`worker_lanes.py`).
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Remembered:
    """One tensor that each worker remembers.

    Attributes:
        owner: whose it is; a weak reference, with the owner goes the tensor.
        name: which of the owner's.
        initial: gives a worker's first value, from the worker's number.
    """

    owner: weakref.ref
    name: str
    initial: Callable[[int], tf.Tensor]

    @property
    def key(self) -> tuple[weakref.ref, str]:
        """Equal for the same tensor in steps that were traced separately."""
        return self.owner, self.name


class WorkerStates:
    """The tensors of all workers.

    Args:
        generation: how often a worker, by number, has been lost.
    """

    def __init__(self, generation: Callable[[int], int]):
        self._generation = generation
        self._values: dict[int, tuple[int, dict]] = {}  # by worker, with its generation
        self._restored: dict[tuple, Any] = {}  # first values, by worker and key
        self._thread = threading.local()

    @contextlib.contextmanager
    def of_worker(self, worker: int, device: str) -> Iterator[None]:
        """Within it, steps that the calling thread starts get the tensors of `worker`."""
        self._thread.worker, self._thread.device = worker, device
        yield

    def read(self, slot: Remembered, spec: tf.TensorSpec) -> tf.Tensor:
        """The tensor of the worker that runs the step; called while a step is traced."""
        graph: Any = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: self._value(slot), spec)

    def _value(self, slot: Remembered) -> tf.Tensor:
        worker = self._thread.worker
        values = self._values_of(worker)
        if slot.key not in values:
            restored = self._restored.pop((worker, slot.key), None)
            first = slot.initial(worker) if restored is None else tf.constant(restored)
            with tf.device(self._thread.device):
                values[slot.key] = tf.identity(first)
        return values[slot.key]

    def keep(self, worker: int, slots: Sequence[Remembered], tensors: Sequence[tf.Tensor]) -> None:
        """The step of `worker` that gave `tensors` counts; called by the worker's thread."""
        if slots:
            values = self._values_of(worker)
            values.update({slot.key: t for slot, t in zip(slots, tensors, strict=True)})
            for key in [key for key in values if key[0]() is None]:
                del values[key]

    def tensors_of(self, worker: int) -> list[tf.Tensor]:
        """All that a worker remembers now."""
        return list(self._values_of(worker).values())

    def of_owner(self, owner: object) -> dict[int, dict[str, object]]:
        """What workers remember of `owner`: by worker and name, on the workers or the chief."""
        found: dict[int, dict[str, Any]] = {}
        for (worker, (reference, name)), value in self._restored.items():
            if reference() is owner:
                found.setdefault(worker, {})[name] = value
        for worker in self._values:
            for (reference, name), value in self._values_of(worker).items():
                if reference() is owner:
                    found.setdefault(worker, {})[name] = value
        return found

    def restore(self, owner: object, values: Mapping[int, Mapping[str, object]]) -> None:
        """From now on, workers remember these arrays of `owner`; between steps."""
        reference = weakref.ref(owner)
        for _, of_worker in self._values.values():
            for key in [key for key in of_worker if key[0] == reference]:
                del of_worker[key]
        for key in [key for key in self._restored if key[1][0] == reference]:
            del self._restored[key]
        for worker, of_name in values.items():
            for name, value in of_name.items():
                self._restored[worker, (reference, name)] = value

    def _values_of(self, worker: int) -> dict:
        generation = self._generation(worker)
        if worker not in self._values or self._values[worker][0] != generation:
            self._values[worker] = (generation, {})
        return self._values[worker][1]
