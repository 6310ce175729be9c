"""Where a training stands in its data, and how another process gets there.

Keras makes an iterator over the dataset for every epoch, or one for all (`steps_per_epoch`). This
class stands between the two and counts what is taken from each. To come back to a position,

1. the iterators of earlier epochs are made again, because a `shuffle` draws its next seed when an
   iterator is made. One batch of each is read: enough where epochs differ by nothing else. The
   first is read as far as it was where a `cache` fills meanwhile. All batches are read where the
   input keeps a state of its own (stateful ops, Python generators).
2. The last iterator is made and set by TensorFlow's own checkpoint of an iterator, where the
   dataset supports one. Of a `shuffle` that has come to its end, also because a `prefetch` has, it
   does not hold how far the seeds of later passes have come. Then, and where there is none, the
   batches of its pass that were trained on are read again and dropped. (After the checkpoint of
   the pass's beginning, where a `repeat` shuffles several times in a pass. It is taken there only:
   it waits for the shuffle's buffer, and holds it.)
   Where workers read batches by numbers, it is the iterator of the numbers; where they agree on
   each batch, the one behind that.
   While that goes on, Python's and NumPy's random states are what they were then.

A generator that knows its position (`resumable.py`) is told it, and nothing is read again.

Batches that are placed on devices ahead of their steps are read and not trained on. They are saved
beside the checkpoint, which is behind them, and come first again; whatever is counted is not ahead.

A `keras.utils.PyDataset` is read by index: its earlier epochs need no reading, only its hooks.

A backup holds hashes of the batches of the next step, and what is resumed has to give these. They
are read ahead (`read_ahead.py`) where nobody can notice it: where TensorFlow has a checkpoint, so
that the data draw from nothing but themselves, or a `prefetch` reads ahead anyway. At the end of a
pass the next iterator is made a little before Keras asks for it.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.iterator_checkpoint import (
    can_restore,
    checkpoint_of,
    is_of_numbers,
    num_seeds_drawn,
    restore,
)
from tfparallel.callbacks.backup.not_taken import begun_with, not_taken_of, source_of
from tfparallel.callbacks.backup.read_ahead import ReadAhead, differ
from tfparallel.callbacks.backup.resumable import GeneratorPosition
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.internals.datasets import (
    ends_in_a_prefetch,
    fills_a_cache,
    num_shuffles,
    repeats_a_shuffle,
    unrepeatable_parts,
)
from tfparallel.internals.keras_epochs import (
    EpochIterator,
    dataset_of_iterator,
    hook_steps,
    iterator_of_epochs,
    set_dataset_of_iterator,
    set_iterator_of_epochs,
    set_steps_of_epoch,
    set_steps_seen,
    steps_of_iterator,
)
from tfparallel.replicas.random_states import (
    HostRandomState,
    host_random_state,
    set_host_random_state,
)

_DRAWN_PER_SHUFFLE = 2  # by its iterator, and by the generator of its passes' seeds


class InputPosition:
    """Counts the batches that `fit` takes from its data; stands in for the dataset.

    Args:
        epoch_iterator: Keras's iterator over epochs, which reads through this object from now on.
        num_workers: of several, each reads a share of the batches that a generator makes: then its
            own position says nothing.
        checks: whether the first batches after a resume must be those that the backup tells of.
    """

    def __init__(self, epoch_iterator: EpochIterator, num_workers: int = 1, checks: bool = True):
        self._epoch_iterator, self._checks = epoch_iterator, checks
        self._dataset = dataset_of_iterator(epoch_iterator)
        # What this process reads batches from; None where others do, and this one only counts.
        self._read_dataset = getattr(self._dataset, "read_dataset", self._dataset)
        set_dataset_of_iterator(epoch_iterator, self)
        self._taken: list[int] = []  # batches, of each iterator made so far
        self._is_read_to_its_end = False  # whether the first iterator is asked for a batch too many
        self._last: Any = None  # the newest iterator
        self._random_state: HostRandomState | None = None  # before the newest iterator was made
        generator = GeneratorPosition.of(epoch_iterator.data_adapter)
        self._generator = generator if num_workers == 1 else None
        self._beginning: list[np.ndarray] | None = None  # the newest iterator's first checkpoint
        self._has_checkpoints: bool | None = None  # not known before the first save
        self._to_resume: dict[str, Any] | None = None  # until Keras asks for the iterator
        self._num_read_again, self._reading_again_s = 0, 0.0
        self._read_ahead: ReadAhead | None = None  # of the newest iterator
        self._is_made_early = False  # the newest iterator: Keras has not asked for it yet
        self._expected: dict[str, Any] | None = None  # tells of the next iterator's first batches
        self._steps_left_out = 0  # of the epoch that begins
        hook_steps(epoch_iterator, self.steps_of_epoch)

    def __iter__(self) -> Iterator:
        if self._is_made_early:
            self._is_made_early = False
            return self._last
        if self._to_resume is None:
            iterator, state = self._make_iterator(), self._expected
            self._expected = None
            if state is not None:
                self._check(iterator, state)
            return iterator
        state, self._to_resume = self._to_resume, None
        return self._iterator_at(state)

    def steps_of_epoch(self, steps: Iterator[tuple]) -> Iterator[tuple]:
        """The same steps, one of which may get batches that were read ahead."""
        left_out, self._steps_left_out = self._steps_left_out, 0
        for first, last, batches in steps:
            ahead = self._read_ahead if last >= left_out else None
            if ahead is not None:
                self._read_ahead = None
            yield first, last, (batches if ahead is None else ahead.iterator())

    def leave_out_steps(self, num_steps: int) -> None:
        """Tells that the next epoch begins with steps that are not done again."""
        self._steps_left_out = num_steps

    def _make_iterator(self) -> Iterator:
        self._read_ahead = None
        self._random_state = host_random_state()
        self._last = iter(self._dataset)
        if not self._taken:  # Keras does not ask once it knows how many there are
            self._is_read_to_its_end = self._has_unknown_size()
        self._taken.append(0)
        shuffles_again = repeats_a_shuffle(self._read_dataset)
        needs_beginning = self._has_checkpoints is not False and shuffles_again
        self._beginning = self._checkpoint() if needs_beginning else None
        return self._last

    def _has_unknown_size(self) -> bool:
        iterator = self._epoch_iterator
        return iterator.steps_per_epoch is None and iterator._num_batches is None

    def took(self, num_batches: int) -> None:
        """Tells that a step has taken batches from the newest iterator."""
        self._taken[-1] += num_batches
        if self._generator is not None:
            self._generator.trained(sum(self._taken))

    # ---- saving ----------------------------------------------------------------------------------

    def state(self, is_mid_epoch: bool, reads_on: bool = True) -> dict[str, Any]:
        """What `resume` needs.

        Args:
            is_mid_epoch: whether the current epoch has steps behind it.
            reads_on: whether this training will read more.
        """
        iterator = self._epoch_iterator
        spans_epochs = iterator.steps_per_epoch is not None
        goes_on = is_mid_epoch or (spans_epochs and iterator_of_epochs(iterator) is not None)
        steps_seen, num_batches = steps_of_iterator(iterator)
        checkpoint, not_taken = None, None
        if self._has_checkpoints is None:
            self._tell_what_differs()
        if self._has_checkpoints is None or (self._has_checkpoints and goes_on):
            checkpoint = self._checkpoint()
            self._has_checkpoints = checkpoint is not None
            not_taken = self._not_taken() if checkpoint else None
        random_state = self._random_state
        taken = self._taken[:-1] if self._is_made_early else list(self._taken)
        beginning = self._beginning
        next_batches = self._next_batches(goes_on, checkpoint) if reads_on else None
        num_to_drop, reads_all_again = 0, False
        if goes_on and checkpoint and self._lacks_seeds(checkpoint):
            # A shuffle behind another one has not begun when its pass begins.
            reads_all_again = beginning is not None and self._lacks_seeds(beginning)
            checkpoint, num_to_drop = (None if reads_all_again else beginning), taken[-1]
            not_taken = None  # they are not trained on: they are read again, too
        return {
            "next_batches": next_batches,
            "taken": taken,
            "goes_on": goes_on,  # whether the last iterator still has batches to give
            "steps_seen": steps_seen,
            "num_batches": num_batches,
            "random": random_state,
            "has_checkpoint": self._has_checkpoints,
            "checkpoint": checkpoint if goes_on else None,
            "not_taken": not_taken if goes_on else None,  # batches before the checkpoint
            "num_to_drop": num_to_drop,  # batches after the checkpoint
            "reads_all_again": reads_all_again,  # earlier passes, too
            "is_of_numbers": is_of_numbers(self._last),
            "generator": self._generator and [self._generator.state(sum(self._taken))],
        }

    def _tell_what_differs(self) -> None:
        """Names what makes the order of batches another one in each process."""
        names = unrepeatable_parts(self._read_dataset)
        if names:
            tf.get_logger().warning(
                "A resumed training reads this dataset in another order: %s. Give shuffles a seed "
                "(or call keras.utils.set_random_seed), and leave deterministic=False out.",
                ", ".join(names),
            )

    def _lacks_seeds(self, checkpoint: list[np.ndarray]) -> bool:
        """Whether later passes would be wrong after it, in an order that can be right."""
        num_expected = _DRAWN_PER_SHUFFLE * num_shuffles(self._read_dataset)
        is_lacking = num_seeds_drawn(checkpoint) < num_expected
        return is_lacking and not unrepeatable_parts(self._read_dataset)

    def _next_batches(self, goes_on: bool, checkpoint: list[np.ndarray] | None) -> list[str] | None:
        """Hashes of the batches of the next step; None where they are not known."""
        if self._read_ahead is None and self._can_read_ahead(goes_on):
            if not goes_on:
                self._make_iterator()
                self._is_made_early = True
            self._read_ahead_of(self._last, checkpoint)
        return None if self._read_ahead is None else self._read_ahead.hashes

    def _can_read_ahead(self, goes_on: bool) -> bool:
        """Whether nobody notices it, and the same batches come in another process."""
        if not self._can_compare(self._last):
            return False
        if self._read_dataset is None:
            return True
        if not goes_on:
            return bool(self._has_checkpoints)
        num_batches = self._epoch_iterator._num_batches
        if num_batches is not None and self._taken[-1] >= num_batches:
            return False  # a pass that Keras does not read to its end does not fill a cache
        return bool(self._has_checkpoints) or ends_in_a_prefetch(self._read_dataset)

    def _can_compare(self, iterator: Iterator) -> bool:
        shows_batches = isinstance(iterator, tf.data.Iterator) or hasattr(iterator, "peek")
        return shows_batches and not unrepeatable_parts(self._read_dataset)

    def _read_ahead_of(self, iterator: Iterator, checkpoint: list[np.ndarray] | None) -> list[str]:
        ahead = ReadAhead(iterator, self._epoch_iterator.steps_per_execution, checkpoint)
        self._read_ahead = ahead if ahead.hashes else None
        return ahead.hashes

    def _checkpoint(self) -> list[np.ndarray] | None:
        """The state of the last iterator, or None where the dataset has none that can be saved."""
        if self._read_ahead is not None:
            return self._read_ahead.checkpoint
        return checkpoint_of(self._last)

    def _not_taken(self) -> list[list[np.ndarray]] | None:
        """The batches between what was trained on and the checkpoint."""
        if self._read_ahead is not None:
            return self._read_ahead.not_taken
        return not_taken_of(self._last)

    # ---- resuming --------------------------------------------------------------------------------

    def resume(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`, in another process that reads the same data."""
        iterator = self._epoch_iterator
        earlier = state["taken"][:-1] if state["goes_on"] else state["taken"]
        if isinstance(_py_dataset(iterator), keras.utils.PyDataset):
            for _ in filter(None, earlier):
                iterator.data_adapter.on_epoch_begin()
                iterator.data_adapter.on_epoch_end()
            self._taken = list(earlier)
        elif self._generator is not None and state["generator"]:
            self._generator.go_to(sum(state["taken"]), state["generator"][0])
            self._taken = list(earlier)
        else:
            draws_in_between = repeats_a_shuffle(self._read_dataset) and not state["goes_on"]
            is_unknown = not state["has_checkpoint"] or state.get("reads_all_again", False)
            all_batches = is_unknown or draws_in_between
            self._read_again(earlier, all_batches)
        set_steps_seen(iterator, state["steps_seen"])
        set_steps_of_epoch(iterator, state["num_batches"])
        if state["goes_on"] and iterator.steps_per_epoch is None:
            self._to_resume = state
        elif state["goes_on"]:
            set_iterator_of_epochs(iterator, self._iterator_at(state))
        else:
            self._expected = state
            self._log_cost()

    def _read_again(self, earlier: list[int], all_batches: bool) -> None:
        started, num_read = time.monotonic(), 0
        for count in earlier:
            is_filling = fills_a_cache(self._read_dataset) and not self._taken
            is_needed = all_batches or is_filling
            iterator = self._make_iterator()
            num_read += _drop(iterator, count if is_needed else min(count, 1))
            if is_filling and self._is_read_to_its_end:
                _drop(iterator, 1)  # only then is the cache complete
            self._taken[-1] = count
        if all_batches:
            self._count_cost(num_read, started)

    def _iterator_at(self, state: dict[str, Any]) -> Iterator:
        """The iterator that was the last one, with the batches to come; draws nothing."""
        started, now = time.monotonic(), host_random_state()
        set_host_random_state(state["random"])
        iterator = self._make_iterator()
        self._taken[-1] = state["taken"][-1]
        if self._generator is not None and state["generator"]:
            pass  # it begins where it should
        elif can_restore(iterator, state):
            restore(iterator, state["checkpoint"])
            self._beginning = state["checkpoint"] if state.get("num_to_drop", 0) else None
            _drop(iterator, state.get("num_to_drop", 0))
        else:
            self._count_cost(_drop(iterator, state["taken"][-1]), started)
            state = {**state, "not_taken": None}
        iterator = self._last = begun_with(iterator, state.get("not_taken") or [], self._taken[-1])
        self._check(iterator, state)
        set_host_random_state(now)
        self._log_cost()
        return iterator

    def _check(self, iterator: Iterator, state: dict[str, Any]) -> None:
        """Compares the first batches of an iterator with those that a backup tells of.

        Raises:
            BackupError: if they differ, and do not depend on what Python draws.
        """
        expected = state.get("next_batches")
        if expected is None or not self._checks or not self._can_compare(iterator):
            return
        checkpoint = self._checkpoint() if state["has_checkpoint"] else None
        received = self._read_ahead_of(iterator, checkpoint)
        if not differ(expected, received):
            return
        text = (
            "A training goes on with the data of its backup. Expected: next a batch with hash "
            f"{expected[0] if expected else 'of none'}. Received: "
            f"{received[0] if received else 'the end of the data'}. "
        )
        is_counted = self._read_dataset is None
        if not (is_counted or state["has_checkpoint"] or state.get("generator")):
            why = "What runs Python, or stateful operations, gives other batches in each process."
            tf.get_logger().warning("%s%s Seed it, or draw from the number of a row.", text, why)
            return
        raise BackupError(
            f"{text}Other files or rows, another batch size or seed? Put back what it was; or pass "
            "BackupAndRestore(check_data=False) to go on with these."
        )

    def _count_cost(self, num_batches: int, started: float) -> None:
        if self._read_dataset is None:
            return
        self._num_read_again += num_batches
        self._reading_again_s += time.monotonic() - started

    def _log_cost(self) -> None:
        if self._num_read_again:
            tf.get_logger().warning(
                "The position in this dataset cannot be saved: %d batches were read again, in "
                "%.1f s.",
                self._num_read_again,
                self._reading_again_s,
            )


def _py_dataset(epoch_iterator: EpochIterator) -> keras.utils.PyDataset | None:
    return getattr(epoch_iterator.data_adapter, "py_dataset", None)


def _drop(iterator: Iterator, num_batches: int) -> int:
    """Takes batches and forgets them; returns how many there were."""
    try:
        return sum(1 for _ in itertools.islice(source_of(iterator), num_batches))
    except tf.errors.OutOfRangeError:  # how the batches of several workers end
        return num_batches
