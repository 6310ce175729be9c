"""Generators that a resumed training continues without reading again what it has trained on.

A Python generator cannot be copied, and Keras runs it ahead of the training: it looks at the first
batches, and `tf.data` prefetches. So the state of what makes the batches is noted after each of
them, and a backup holds the one after the last batch that was trained on.

```
batches made      1   2   3   4   5   6
state after       s1  s2  s3  s4  s5  s6
trained on                 ^ a backup made here holds s3
```
"""

import inspect
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol


class ResumableBatches(Protocol):
    """What a user writes: an iterable of batches whose position can be asked for and set."""

    def __iter__(self) -> Iterator:
        """Goes on from the present position."""

    def get_state(self) -> object:
        """The position after the last batch: of the types that a callback's state may have.

        It must not change afterwards: return copies.
        """

    def set_state(self, state: object) -> None:
        """Goes to a position, in another process."""


def resumable(batches: ResumableBatches) -> Generator:
    """A generator for `Model.fit` that a resumed training continues where it was.

    Args:
        batches: iterable, with `get_state()` and `set_state(state)`.

    Raises:
        TypeError: if it lacks one of them.
    """
    missing = [n for n in ("__iter__", "get_state", "set_state") if not hasattr(batches, n)]
    if missing:
        raise TypeError(
            "`batches` must be iterable and have get_state() and set_state(state). Received: "
            f"{type(batches).__name__} without {', '.join(missing)}."
        )
    return _Record(batches).generator()


class _Record:
    """The states after the batches that were made and may not have been trained on."""

    def __init__(self, batches: ResumableBatches):
        self.batches = batches
        self._states: dict[int, Any] = {0: batches.get_state()}
        self._num_made = 0

    def generator(self) -> Generator:
        generator = self._run(self.batches)
        _records[generator] = self
        return generator

    def _run(self, batches: Iterable) -> Generator:
        for batch in batches:
            self._num_made += 1
            self._states[self._num_made] = self.batches.get_state()
            yield batch

    def state_after(self, num_batches: int) -> object:
        return self._states[num_batches]

    def forget_before(self, num_batches: int) -> None:
        for number in [number for number in list(self._states) if number < num_batches]:
            del self._states[number]

    def go_to(self, num_batches: int, state: object) -> None:
        self.batches.set_state(state)
        self._states, self._num_made = {num_batches: state}, num_batches


_records: weakref.WeakKeyDictionary[Generator, _Record] = weakref.WeakKeyDictionary()


class GeneratorPosition:
    """The position in the `resumable` generator that Keras reads.

    Args:
        data_adapter: Keras's, of a generator.
        record: what is known of it.
    """

    def __init__(self, data_adapter: Any, record: _Record):
        self._data_adapter, self._record = data_adapter, record

    @classmethod
    def of(cls, data_adapter: object) -> "GeneratorPosition | None":
        """The position in the data of an adapter; None if they are no `resumable` generator."""
        function = getattr(data_adapter, "generator", None)
        if not inspect.isfunction(function):
            return None
        # Keras keeps the generator as a variable of the function that makes the iterator.
        generator = inspect.getclosurevars(function).nonlocals.get("generator")
        record = _records.get(generator) if isinstance(generator, Generator) else None
        return None if record is None else cls(data_adapter, record)

    def state(self, num_trained: int) -> object:
        """The state after so many batches."""
        return self._record.state_after(num_trained)

    def trained(self, num_trained: int) -> None:
        """Tells that positions before this one will not be asked for."""
        self._record.forget_before(num_trained)

    def go_to(self, num_trained: int, state: object) -> None:
        """Makes Keras read on after so many batches: also past those it has looked at already."""
        self._record.go_to(num_trained, state)
        generator = self._record.generator()
        self._data_adapter.generator = lambda: generator
