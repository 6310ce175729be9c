"""How many bytes go over a cut of a model, for each place where it can be cut."""

import weakref
from collections.abc import Iterable

import tensorflow as tf


class CrossingBytes:
    """What parts of a model take and make, told in the order in which they run.

        part      0 --a--> 1 --b--> 2 --c--> 3
                   \\___________d_________/
        cut behind 0: a + d    behind 1: b + d    behind 2: c + d

    Floats cross twice, as their gradients come back. A model's inputs do not: each stage has them
    from the host. What a subclassed model's own code makes counts as made by the part before it.

    Args:
        num_parts: of the model.
    """

    def __init__(self, num_parts: int):
        self._num_parts = num_parts
        self._made: dict[int, tuple[weakref.ref, _Made]] = {}
        self._every: list[_Made] = []
        self._latest = 0

    def give(self, tensors: object) -> None:
        """Tells of the model's inputs."""
        for tensor in _tensors(tensors):
            self._note(tensor, self._num_parts)

    def take(self, part: int, tensors: object) -> None:
        """Tells what a part is called with."""
        for tensor in _tensors(tensors):
            reference, made = self._made.get(id(tensor), (None, None))
            if made is None or reference is None or reference() is not tensor:
                made = self._note(tensor, self._latest)
            made.until = max(made.until, part)

    def make(self, part: int, tensors: object) -> None:
        """Tells what a part makes."""
        for tensor in _tensors(tensors):
            self._note(tensor, part)
        self._latest = part

    def behind_parts(self) -> list[int]:
        """For each part the bytes that cross a cut right behind it."""
        crossing = [0] * self._num_parts
        for made in self._every:
            for part in range(made.by, made.until):
                crossing[part] += made.bytes
        return crossing

    def _note(self, tensor: tf.Tensor, part: int) -> "_Made":
        made = _Made(part, nbytes(tensor) * (1 + tensor.dtype.is_floating))
        self._made[id(tensor)] = weakref.ref(tensor), made
        self._every.append(made)
        return made


class _Made:
    def __init__(self, by: int, size: int):
        self.by, self.until, self.bytes = by, by, size


def nbytes(tensor: tf.Tensor) -> int:
    """Of a tensor whose shape is known."""
    return tensor.dtype.size * (tensor.shape.num_elements() or 0)


def _tensors(values: object) -> Iterable[tf.Tensor]:
    return [x for x in tf.nest.flatten(values) if isinstance(x, tf.Tensor)]
