"""Wherever a training stops in its data, it goes on with the batches that it would have read."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tests.callbacks.pipelines import STEPS, built, numbers
from tfparallel.callbacks.backup.fit_call import FitCall
from tfparallel.callbacks.backup.input_position import InputPosition
from tfparallel.callbacks.backup.read_ahead import ReadAhead, hash_of
from tfparallel.callbacks.backup.storage import BackupError

pytestmark = pytest.mark.turns

NUM_PASSES = 3
SCALAR = tf.TensorSpec([], tf.int64)


class Reading:
    """How `fit` reads a dataset: Keras's own iterator over epochs, and the position in it."""

    def __init__(self, dataset, checks=True):
        strategy = tf.distribute.get_strategy()
        self.epochs = TFEpochIterator(x=dataset, distribute_strategy=strategy)
        self.call = FitCall(None, None, self.epochs, NUM_PASSES, None)
        self.position = InputPosition(self.epochs, checks=checks)

    def rest_of_pass(self, most=None, after_batch=lambda number: None):
        """The batches of a pass; of the one that was resumed, those that are left."""
        batches, steps = [], iter(self.epochs)
        with warnings.catch_warnings(), self.epochs.catch_stop_iteration():
            warnings.simplefilter("ignore")  # a dataset of unknown length has ended
            while most is None or len(batches) < most:
                _, _, iterator = next(steps)
                batches.append(iterator.get_next().numpy().tolist())
                self.position.took(1)
                after_batch(len(batches))
        return batches

    def passes(self, count):
        return [self.rest_of_pass() for _ in range(count)]

    def state(self, num_batches):
        return self.position.state(is_mid_epoch=num_batches > 0)

    def resume(self, state, num_batches):
        """Goes to where `state` was taken, after so many batches of a pass."""
        self.position.resume(state)
        if num_batches:
            self.position.leave_out_steps(num_batches)
            self.call.leave_out_steps(num_batches, state["steps_seen"], is_stopped=False)


def made(make):
    tf.random.set_seed(7)
    return make()


def saved_at(make, num_passes, num_batches):
    """The state after so many passes, and batches of the next one."""
    reading = Reading(made(make))
    reading.passes(num_passes)
    if num_batches:  # at the end of an epoch, the next iterator is not made yet
        reading.rest_of_pass(num_batches)
    return reading.state(num_batches)


def states_of(make):
    """The states at each end of a batch and of a pass, of one reading that always saves."""
    reading, states = Reading(made(make)), {}
    for number in range(NUM_PASSES):

        def save(done, number=number):
            states[number, done] = reading.state(done)

        reading.rest_of_pass(after_batch=save)
        states[number + 1, 0] = reading.state(0)
    return states


def assert_goes_on_anywhere(make, saves_always=False):
    """Builds two datasets for each stop; one, if it `saves_always`."""
    expected = Reading(made(make)).passes(NUM_PASSES)
    states = states_of(make) if saves_always else {}
    for number, batches in enumerate(expected):
        for done in range(bool(number == 0), len(batches) + 1):  # 0: saved at the end of an epoch
            state = states[number, done] if saves_always else saved_at(make, number, done)
            reading = Reading(made(make))
            reading.resume(state, done)
            received = reading.passes(NUM_PASSES - number)
            assert received == [batches[done:], *expected[number + 1 :]], (number, done)


def assert_saving_changes_nothing(make):
    """Saves after each batch and at the end of each pass; what it says comes next does."""
    expected = Reading(made(make)).passes(NUM_PASSES)
    reading, said = Reading(made(make)), []

    def save(num_batches):
        hashes = [reading.state(num_batches)["next_batches"] for _ in range(2)]
        assert hashes[0] == hashes[1]
        said.append(hashes[0])

    for number, batches in enumerate(expected):
        assert reading.rest_of_pass(after_batch=save) == batches
        save(0)
        if number < NUM_PASSES - 1:
            following = [*batches[1:], None, expected[number + 1][0]]
            right = [None if b is None else [hash_of(tf.constant(b, tf.int64))] for b in following]
            assert [s or None for s in said] == right
        said.clear()


SHUFFLED = {
    "batched": lambda: numbers().shuffle(10).batch(4),
    "prefetched": lambda: numbers().shuffle(23).batch(4).prefetch(2),
    "repeated": lambda: numbers().shuffle(5).repeat(2).batch(7),
    "repeated, twice": lambda: numbers(15).shuffle(2).repeat(2).shuffle(2).batch(3),
    "of batches": lambda: numbers().batch(4).shuffle(3),
    "same": lambda: numbers().shuffle(8, reshuffle_each_iteration=False).batch(4),
    "mapped": lambda: (
        numbers().shuffle(8).map(lambda x: x + 1, num_parallel_calls=2).shuffle(4).batch(5)
    ),
    "twice": lambda: numbers(15).batch(3).shuffle(2).shuffle(2),
    "cached": lambda: numbers(15).shuffle(2).cache().batch(3),
    "two": lambda: numbers(15).shuffle(4).cache().shuffle(3).batch(4).prefetch(1),
}


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)
def test_shuffled_data_go_on_anywhere(make):
    """Near the end of a pass TensorFlow's checkpoint lacks how far a shuffle's seeds have come."""
    assert_goes_on_anywhere(make)


pipelines = st.tuples(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5)), max_size=4),
    st.integers(3, 6),
    st.lists(st.tuples(st.sampled_from(["shuffle", "prefetch"]), st.integers(0, 3)), max_size=2),
)


@settings(max_examples=3, deadline=None, database=None, derandomize=True)
@given(pipelines)
def test_a_few_random_pipelines_go_on_anywhere(pipeline):
    assert_goes_on_anywhere(lambda: built(pipeline), saves_always=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None, database=None, print_blob=True)
@given(pipelines)
def test_random_pipelines_go_on_anywhere(pipeline):
    assert_goes_on_anywhere(lambda: built(pipeline), saves_always=True)


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)
def test_saving_tells_what_is_next_and_changes_nothing(make):
    assert_saving_changes_nothing(make)


OTHER_BATCH = r"hash [0-9a-f]{16}\. Received: [0-9a-f]{16}\. Other files"


def test_other_data_than_those_of_the_backup_are_refused():
    def make(first):
        return numbers().shuffle(5).map(lambda x: x + first).batch(4)

    state = saved_at(lambda: make(0), 1, 0)
    same, other = (Reading(made(lambda first=first: make(first))) for first in (0, 9))
    same.resume(state, 0)
    assert len(same.rest_of_pass()) == 6
    other.resume(state, 0)
    with pytest.raises(BackupError, match=OTHER_BATCH):
        other.rest_of_pass()
    trusting = Reading(made(lambda: make(9)), checks=False)
    trusting.resume(state, 0)
    assert len(trusting.rest_of_pass()) == 6


def test_a_checkpoint_that_goes_on_elsewhere_is_found():
    def make():
        return numbers(400).shuffle(5).batch(4)

    state, later = saved_at(make, 1, 2), saved_at(make, 1, 3)
    assert state["checkpoint"] is not None and later["checkpoint"] is not None
    reading = Reading(made(make))
    reading.resume(state | {"checkpoint": later["checkpoint"]}, 2)
    with pytest.raises(BackupError, match=OTHER_BATCH):
        reading.rest_of_pass()


def test_a_batch_of_other_rows_than_before_is_found_where_reading_again_cannot_repeat_it(caplog):
    """A generator that draws from nowhere: it says so, and goes on."""

    def make():
        draw = np.random.default_rng()
        return (
            tf.data.Dataset.from_generator(
                lambda: (draw.integers(1 << 40) for _ in range(9)), output_signature=SCALAR
            )
            .batch(2)
            .prefetch(1)
        )

    state = saved_at(make, 0, 2)
    reading = Reading(made(make))
    reading.resume(state, 2)
    with caplog.at_level("WARNING", "tensorflow"):
        assert len(reading.rest_of_pass()) == 3
    assert "A training goes on with the data of its backup" in caplog.text


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_any_structure_are_given_as_they_were(size):
    """Also sparse, ragged, text and None; the step sees the same element spec."""
    rows = {
        "dense": tf.random.stateless_normal([6, 2], [1, 2]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5], [6]]),
        "sparse": tf.sparse.from_dense(tf.eye(6)),
        "text": tf.constant(["a", "bb", "c", "d", "e", "f"]),
    }
    dataset = tf.data.Dataset.from_tensor_slices((rows, None)).batch(2)
    ahead, plain = ReadAhead(iter(dataset), size), iter(dataset)
    given = ahead.iterator()
    assert given.element_spec == plain.element_spec
    again = [(next(given), next(plain)) for _ in range(size)]
    assert [hash_of(one) for one, _ in again] == [hash_of(other) for _, other in again]
    assert len(set(ahead.hashes)) == size
    assert next(given, None) is None


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: numbers().shuffle(3).batch(2), "shuffle without a seed"),
        (
            lambda: numbers().map(lambda x: x, num_parallel_calls=2, deterministic=False).batch(2),
            "deterministic=False",
        ),
    ],
)
def test_an_order_that_cannot_be_repeated_is_said_at_the_first_save(make, name, caplog):
    tf.random.set_seed(None)
    reading = Reading(make())
    reading.rest_of_pass(1)
    with caplog.at_level("WARNING", "tensorflow"):
        assert reading.state(1)["next_batches"] is None
        reading.state(1)
    assert caplog.text.count(f"order: {name}.") == 1


def test_an_unseeded_shuffle_leaves_out_no_row_of_a_pass():
    tf.random.set_seed(None)
    reading = Reading(numbers().shuffle(10).batch(4))
    before = reading.rest_of_pass(5)
    resumed = Reading(numbers().shuffle(10).batch(4))
    resumed.resume(reading.state(5), 5)
    after = resumed.rest_of_pass()
    assert sorted(np.concatenate([*before, *after])) == list(range(23))
