"""What Keras walks in `fit`, `evaluate` and `predict`: epochs, their steps, and what they read."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf

# The iterator of epochs, whose method gives the steps of one.
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfparallel.internals.datasets import let_go_beside
from tfparallel.internals.hooks import hook_once, shadowed, wrapped

EpochIterator: TypeAlias = TFEpochIterator


def surround_epochs(epoch_iterator: EpochIterator, make_context: Callable) -> None:
    """Lets every epoch of a call run within a context of its own."""
    iterator: Any = epoch_iterator
    original = type(iterator).catch_stop_iteration  # Keras enters it around the steps of an epoch
    known = weakref.ref(iterator)  # it shall go, with its data, when the call is over

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        with make_context(), original(known()):
            yield

    hook_once(
        iterator,
        "catch_stop_iteration",
        catch_stop_iteration,
        why="An error within an epoch names the process that is lost.",
    )


def let_iterators_go_beside(epoch_iterator: EpochIterator) -> None:
    """Has no epoch of a call wait for the iterator of the one before."""
    iterator: Any = epoch_iterator
    original = type(iterator)._enumerate_iterator
    known = weakref.ref(iterator)  # it shall go, with its data, when the call is over

    def enumerate_iterator() -> Iterator[tuple]:
        last = None
        for step in original(known()):
            if step[-1] is not last:
                last = step[-1]
                let_go_beside(last)
            yield step

    hook_once(
        iterator,
        "_enumerate_iterator",
        enumerate_iterator,
        why="No epoch waits until tf.data has let go of the iterator of the one before.",
        mark="_tfparallel_lets_go",
    )


def hook_steps(epoch_iterator: object, around: Callable[[Iterator], Iterator]) -> None:
    """Has `around(steps)` walk the steps of each epoch in the place of `steps`, from now on.

    Args:
        epoch_iterator: of a call of `fit`.
        around: takes and gives an iterator of `(first_step, last_step, batches)`.
    """
    hook_once(
        epoch_iterator,
        "_enumerate_iterator",
        _walked(epoch_iterator, around),
        why="A step takes the batches that a backup has read ahead, to tell their hash.",
    )


@contextlib.contextmanager
def surrounded_steps(
    epoch_iterator: object, around: Callable[[Iterator], Iterator]
) -> Iterator[None]:
    """Within it, `around(steps)` walks the steps of each epoch in the place of `steps`.

    Args:
        epoch_iterator: of a call of `fit`.
        around: takes and gives an iterator of `(first_step, last_step, batches)`.
    """
    with shadowed(
        epoch_iterator,
        "_enumerate_iterator",
        _walked(epoch_iterator, around),
        during="a training that is measured",
        why="When a step begins and ends, and what it waits for its data, is measured.",
    ):
        yield


def _walked(epoch_iterator: object, around: Callable[[Iterator], Iterator]) -> Callable:
    def enumerate_iterator(original: Callable) -> Iterator[tuple]:
        return around(original())

    return wrapped(epoch_iterator, "_enumerate_iterator", enumerate_iterator)


def steps_of_epoch(epoch_iterator: EpochIterator) -> Iterator[tuple]:
    """The steps of the epoch that begins, as `fit` walks them, with an iterator of batches each."""
    return epoch_iterator._enumerate_iterator()


def dataset_of_iterator(
    epoch_iterator: EpochIterator,
) -> tf.data.Dataset | tf.distribute.DistributedDataset:
    """What `fit` makes an iterator of for each pass."""
    return epoch_iterator._distributed_dataset


def set_dataset_of_iterator(epoch_iterator: EpochIterator, dataset: Iterable) -> None:
    """Has it make its iterators of `dataset`."""
    epoch_iterator._distributed_dataset = dataset


def iterator_of_epochs(epoch_iterator: EpochIterator) -> object:
    """The iterator that goes on from epoch to epoch (`steps_per_epoch`); None before the first."""
    return epoch_iterator._current_iterator


def set_iterator_of_epochs(epoch_iterator: EpochIterator, iterator: object) -> None:
    """Has the next epoch go on with `iterator`."""
    epoch_iterator._current_iterator = iterator


def steps_of_iterator(epoch_iterator: EpochIterator) -> tuple[int, int | None]:
    """How many steps it has seen, and how many an epoch has, if that is known."""
    return epoch_iterator._steps_seen, epoch_iterator._num_batches


def set_steps_seen(epoch_iterator: EpochIterator, steps: int) -> None:
    """How many steps Keras shall think it has seen."""
    epoch_iterator._steps_seen = steps


def set_steps_of_epoch(epoch_iterator: EpochIterator, steps: int | None) -> None:
    """How many steps Keras shall think an epoch has."""
    epoch_iterator._num_batches = steps
