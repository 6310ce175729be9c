"""Wherever a training stops in its data, it goes on with the batches that it would have read."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.callbacks.pipelines import STEPS, built, numbers
from tfparallel.callbacks.backup.input_position import InputPosition

NUM_PASSES = 3


def position_in(dataset):
    """The position of a `fit` that reads a pass of `dataset` in each epoch."""
    iterator = SimpleNamespace(
        _distributed_dataset=dataset,
        data_adapter=SimpleNamespace(),
        steps_per_epoch=None,
        _current_iterator=None,
        _steps_seen=0,
        _num_batches=None,
    )
    return InputPosition(iterator)


def made(make):
    tf.random.set_seed(7)
    return make()


def rest_of_pass(position, iterator):
    batches = []
    for batch in iterator:
        position.took(1)
        batches.append(batch.numpy().tolist())
    return batches


def passes(position, count):
    return [rest_of_pass(position, iter(position)) for _ in range(count)]


def saved_at(make, num_passes, num_batches):
    """The state after so many passes, and batches of the next one."""
    position = position_in(made(make))
    passes(position, num_passes)
    if num_batches:  # at the end of an epoch, the next iterator is not made yet
        for _ in itertools.islice(iter(position), num_batches):
            position.took(1)
    return position.state(is_mid_epoch=num_batches > 0)


def assert_goes_on_anywhere(make):
    expected = passes(position_in(made(make)), NUM_PASSES)
    for number, batches in enumerate(expected):
        for done in range(bool(number == 0), len(batches) + 1):  # 0: saved at the end of an epoch
            state = saved_at(make, number, done)
            position = position_in(made(make))
            position.resume(state)
            received = passes(position, NUM_PASSES - number)
            assert received == [batches[done:], *expected[number + 1 :]], (number, done)


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers().shuffle(10).batch(4),
        lambda: numbers().shuffle(23).batch(4).prefetch(2),
        lambda: numbers().shuffle(5).repeat(2).batch(7),
        lambda: numbers().batch(4).shuffle(3),
        lambda: numbers().shuffle(8, reshuffle_each_iteration=False).batch(4),
        lambda: numbers().shuffle(8).map(lambda x: x + 1, num_parallel_calls=2).shuffle(4).batch(5),
        lambda: numbers(15).batch(3).shuffle(2).shuffle(2),
        lambda: numbers(15).shuffle(2).cache().batch(3),
        lambda: numbers(15).shuffle(4).cache().shuffle(3).batch(4).prefetch(1),
    ],
    ids=[
        "batched",
        "prefetched",
        "repeated",
        "of batches",
        "same",
        "mapped",
        "twice",
        "cached",
        "two",
    ],
)
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
    assert_goes_on_anywhere(lambda: built(pipeline))


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None, database=None, print_blob=True)
@given(pipelines)
def test_random_pipelines_go_on_anywhere(pipeline):
    assert_goes_on_anywhere(lambda: built(pipeline))


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
    position = position_in(make())
    next(iter(position))
    position.took(1)
    with caplog.at_level("WARNING", "tensorflow"):
        position.state(is_mid_epoch=True)
        position.state(is_mid_epoch=True)
    assert caplog.text.count(f"order: {name}.") == 1


def test_an_unseeded_shuffle_leaves_out_no_row_of_a_pass():
    tf.random.set_seed(None)
    position = position_in(numbers().shuffle(10).batch(4))
    iterator = iter(position)
    before = [next(iterator).numpy() for _ in range(5)]
    position.took(5)
    resumed = position_in(numbers().shuffle(10).batch(4))
    resumed.resume(position.state(is_mid_epoch=True))
    after = [batch.numpy() for batch in iter(resumed)]
    assert sorted(np.concatenate([*before, *after])) == list(range(23))
