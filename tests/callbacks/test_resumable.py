"""Generators that know their position."""

import re

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

from tests.callbacks.test_backup import Interrupt
from tests.callbacks.trainings import Batches
from tests.helpers import tiny_compile_options
from tfparallel.callbacks import BackupAndRestore, resumable
from tfparallel.callbacks.backup.resumable import GeneratorPosition

pytestmark = pytest.mark.turns


def fit(batches, *callbacks):
    data = resumable(batches) if isinstance(batches, Batches) else batches
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(optimizer="sgd", **tiny_compile_options(), run_eagerly=True)
    return model.fit(data, steps_per_epoch=10, epochs=2, verbose=0, callbacks=list(callbacks))


def interrupted(folder, after):
    backup = BackupAndRestore(folder, save_freq=1, keep=5)
    with pytest.raises(KeyboardInterrupt):
        fit(Batches(), backup, Interrupt(after))


# In the first epoch, and at the end of it.
@pytest.mark.parametrize("after", [4, 11])
def test_nothing_is_read_again(tmp_path, caplog, after):
    expected, batches = fit(Batches()), Batches()
    interrupted(tmp_path, after)
    received = fit(batches, BackupAndRestore(tmp_path))
    assert received.history == expected.history
    pairs = zip(received.model.get_weights(), expected.model.get_weights(), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert "read again" not in caplog.text
    looked_at_and_prefetched = 4
    assert batches.made <= 20 - (after - 1) + looked_at_and_prefetched


def test_a_second_kill_goes_on_from_there(tmp_path):
    expected = fit(Batches())
    interrupted(tmp_path, 4)
    interrupted(tmp_path, 9)
    assert fit(Batches(), BackupAndRestore(tmp_path)).history == expected.history


@pytest.mark.parametrize("after", [14])
def test_a_generator_that_has_lost_its_protocol_is_read_again(tmp_path, caplog, after):
    expected = fit(Batches())
    interrupted(tmp_path, after)
    received = fit((batch for batch in Batches()), BackupAndRestore(tmp_path))
    assert received.history == expected.history
    said = re.findall(r"(\d+) batches were read again", caplog.text)
    assert said == [str(after - 1)]  # once


def test_old_states_are_forgotten():
    batches = Batches()
    adapter = GeneratorDataAdapter(resumable(batches))
    position = GeneratorPosition.of(adapter)
    made = batches.made
    position.trained(made - 1)
    assert sorted(position._record._states) == [made - 1, made]


def test_refuses_batches_without_a_position():
    with pytest.raises(TypeError, match="Received: list without get_state, set_state"):
        resumable([1, 2])
