"""Backups of a training on a TPU's cores."""

import keras
import pytest
import tensorflow as tf

from tests.helpers import SEED, in_float64, momentum_sgd, tiny_data, train
from tests.helpers import assert_same_training as assert_same
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.callbacks import BackupAndRestore


class Interrupt(keras.callbacks.Callback):
    """Ends a training in the second epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            raise KeyboardInterrupt


def cached() -> tf.data.Dataset:
    """In the order of the first pass, in all of them."""
    data = tf.data.Dataset.from_tensor_slices(tiny_data(17))
    return data.shuffle(17, seed=3).cache().batch(6)


def training(strategy, *callbacks):
    keras.utils.set_random_seed(SEED)
    return train(strategy, optimizer=momentum_sgd, data=None, x=cached(), callbacks=list(callbacks))


def test_a_cache_is_filled_again_before_a_training_goes_on(tmp_path):
    with in_float64():
        with pytest.raises(KeyboardInterrupt):
            training(CpuStrategy(), BackupAndRestore(tmp_path, save_freq=1), Interrupt())
        resumed = training(CpuStrategy(), BackupAndRestore(tmp_path, save_freq=1))
        assert_same(training(None), resumed, atol=1e-9)


def test_a_backup_names_what_shuffles_without_a_seed(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *args: said.append(text % args))
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(tiny_data(8)).shuffle(8).batch(4)
    with CpuStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(data, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert any("another order: shuffle without a seed" in text for text in said)
