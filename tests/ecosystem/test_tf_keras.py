"""The package of Keras 2, which trains to other weights under strategies of Keras 3: refused."""

import subprocess
import sys

import pytest

TRAIN = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tensorflow as tf, tfparallel
strategy = tfparallel.MirroredStrategy(1)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
assert type(model).__module__.startswith("tf_keras")
model.fit(np.ones((8, 4), "float32"), np.ones(8), verbose=0)
"""


def test_a_model_of_keras_2_is_refused_with_what_to_do():
    pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    ran = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "Expected a model of Keras 3. Received: one of Keras 2" in ran.stderr
    assert "Unset TF_USE_LEGACY_KERAS" in ran.stderr
