"""A backup counts the batches that were trained on, not those that were read ahead of that."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.callbacks.test_backup import Interrupt
from tests.helpers import numbered, tiny_compile_options, tiny_data, tiny_model
from tfparallel.callbacks import BackupAndRestore, BackupError
from tfparallel.callbacks.backup.not_taken import begun_with, not_taken_of
from tfparallel.coordination.writer import writer_for
from tfparallel.replicas.batches_ahead import BatchesAhead

pytestmark = pytest.mark.turns

ROWS = 22  # six batches, the last of two rows


def arrays():
    x, y = tiny_data(ROWS)
    return {"x": x, "y": y, "batch_size": 4}


def shuffled():
    dataset = tf.data.Dataset.from_tensor_slices(tiny_data(ROWS))
    return {"x": dataset.shuffle(9, seed=3).batch(4)}


def endless():
    """One iterator over all epochs, which end in the middle of the data."""
    dataset = tf.data.Dataset.from_tensor_slices(tiny_data(ROWS))
    return {"x": dataset.shuffle(9, seed=3).repeat().batch(4), "steps_per_epoch": 4}


def without_checkpoint():
    """An operation with a state has none: what was trained on is read again."""
    generator = tf.random.Generator.from_seed(5)
    dataset = tf.data.Dataset.from_tensor_slices(tiny_data(ROWS)).batch(4)
    return {"x": dataset.map(lambda x, y: (x + generator.normal([6]), y))}


def cached():
    dataset = tf.data.Dataset.from_tensor_slices(tiny_data(ROWS))
    return {"x": dataset.shuffle(9).cache().batch(4)}


DATA = [arrays, shuffled, endless, without_checkpoint, cached]


def fit(data, ahead, *callbacks, steps_per_execution=1):
    keras.utils.set_random_seed(0)
    with tfparallel.OneDeviceStrategy("CPU:1", prefetch_batches=ahead).scope():
        model = tiny_model()
        options = {**tiny_compile_options(), "steps_per_execution": steps_per_execution}
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **options)
    fitted = model.fit(**data(), epochs=3, verbose=0, callbacks=list(callbacks))
    return {**numbered("weights", model.get_weights()), **fitted.history}


def interrupted(folder, data, ahead, batches, **options):
    backup = BackupAndRestore(folder, save_freq=1, asynchronous=False)
    with pytest.raises(KeyboardInterrupt):
        fit(data, ahead, backup, Interrupt(batches), **options)
    writer_for(folder).wait()


def assert_equal(received, expected):
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(received[name], value, err_msg=name)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("batches", "before", "after"),
    [
        (8, 2, 2),
        pytest.param(4, 2, 0, marks=pytest.mark.long),
        pytest.param(8, 0, 2, marks=pytest.mark.long),
        pytest.param(6, 3, 1, marks=pytest.mark.long),  # at the end of a pass
        pytest.param(11, 7, 7, marks=pytest.mark.long),  # ahead as far as a pass
    ],
)
def test_an_interrupted_training_ends_as_one_without(tmp_path, data, batches, before, after):
    """That reads nothing ahead, to the bit. A difference of one batch would show in the weights."""
    expected = fit(data, 0)
    interrupted(tmp_path, data, before, batches)
    resumed = fit(data, after, BackupAndRestore(tmp_path))
    assert_equal(resumed, expected)


def test_several_steps_an_execution_go_on_too(tmp_path):
    expected = fit(endless, 0, steps_per_execution=2)
    interrupted(tmp_path, endless, 2, 3, steps_per_execution=2)
    assert_equal(fit(endless, 2, BackupAndRestore(tmp_path), steps_per_execution=2), expected)


@pytest.mark.parametrize("other", [tiny_data(4), (np.zeros([4, 6]), np.zeros(4), np.zeros(4))])
def test_batches_of_a_dataset_with_other_tensors_are_refused(other):
    reading = BatchesAhead(iter(tf.data.Dataset.from_tensors(np.zeros(5))), lambda batch: batch, 1)
    reading.peek(1)
    saved = not_taken_of(reading)
    with pytest.raises(BackupError, match="Expected: 1 tensors a batch"):
        begun_with(iter(tf.data.Dataset.from_tensors(other)), saved, 0)
    (same,) = begun_with(iter(tf.data.Dataset.from_tensors(np.ones(5))), saved, 0).not_taken()
    np.testing.assert_array_equal(same, np.zeros(5))
