"""A version of TensorFlow or Keras that lacks something is refused in one error."""

import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from keras.src.ops.function import Function
from tensorflow.python.distribute import device_util

from tfparallel.internals import supported

_LACKING = """
import keras
from keras.src.backend.common import masking
from keras.src.ops.function import Function
del Function._run_through_graph
del masking.get_keras_mask
import tfparallel
try:
    tfparallel.MirroredStrategy
except ImportError as error:
    print("MESSAGE", error)
"""


def test_the_installed_versions_lack_nothing():
    supported.check()


def test_a_name_that_is_missing_is_told_on_import_of_a_strategy():
    told = subprocess.run(
        [sys.executable, "-c", _LACKING],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    ).stdout
    assert "MESSAGE tfparallel needs TensorFlow 2.20 and 2.21 and Keras 3.12 to 3.15." in told
    assert f"TensorFlow {tf.__version__} and Keras {keras.__version__}" in told
    assert "masking.get_keras_mask, " in told and "Functional._run_through_graph" in told


def test_all_that_is_missing_is_told_at_once(monkeypatch):
    monkeypatch.delattr(Function, "_run_through_graph")
    monkeypatch.delattr(device_util, "canonicalize")
    monkeypatch.delattr(keras.layers.Layer, "_get_own_losses")
    with pytest.raises(ImportError) as raised:
        supported.check()
    for name in ("Functional._run_through_graph", "device_util.canonicalize", "_get_own_losses"):
        assert name in str(raised.value)


def test_an_attribute_and_a_local_variable_that_are_gone_are_told(monkeypatch):
    def fit(self, epochs):
        """Without the local variables of Keras's."""

    def without(self):
        """Without the attributes of Keras's."""

    monkeypatch.setattr(keras.Model, "fit", fit)
    trainer = next(each for each in keras.Model.__mro__ if each.__name__ == "TensorFlowTrainer")
    monkeypatch.setattr(trainer, "fit", fit)
    embedding = keras.layers.Embedding
    for name in [name for name, value in vars(embedding).items() if callable(value)]:
        monkeypatch.setattr(embedding, name, without)
    monkeypatch.setattr(embedding, "embeddings", property(without))
    with pytest.raises(ImportError) as raised:
        supported.check()
    assert "epoch_iterator in keras.src.backend.tensorflow.trainer.TensorFlowTrainer.fit" in str(
        raised.value
    )
    assert "Embedding._embeddings" in str(raised.value)
