"""Mistakes of the first minute: refused, or said, with cause and cure."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfparallel
from tests.helpers import (
    assert_same_training,
    momentum_sgd,
    tiny_compile_options,
    tiny_model,
    train,
)

X, Y = np.ones((8, 6), "float32"), np.zeros(8)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", keras.optimizers.Adam])
def test_a_model_built_outside_and_compiled_inside_is_refused(optimizer):
    model, strategy = tiny_model(), tfparallel.MirroredStrategy(2)
    with strategy.scope():
        optimizer = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(**{"optimizer": optimizer, **tiny_compile_options()})
    with pytest.raises(ValueError, match="4 created outside of it.*clone_model") as raised:
        model.fit(X, Y, verbose=0)
    assert "scope of this MirroredStrategy" in str(raised.value)


def test_the_cure_that_the_message_gives_trains_as_one_device():
    def copy_in_scope():
        copy = keras.models.clone_model(outside)
        copy.set_weights(outside.get_weights())
        return copy

    keras.utils.set_random_seed(1)
    outside = tiny_model()
    expected = train(None, build=copy_in_scope)
    assert_same_training(expected, train(tfparallel.MirroredStrategy(2), build=copy_in_scope))


def test_a_loaded_model_is_refused_with_what_to_do(tmp_path):
    model = tiny_model()
    model.compile(**{"optimizer": momentum_sgd(), **tiny_compile_options()})
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with (
        tfparallel.MirroredStrategy(2).scope(),
        pytest.raises(ValueError, match="built outside of its scope.*load_model"),
    ):
        loaded.fit(X, Y, verbose=0)


class TwoTowers(keras.Model):
    """Its loss has a decoder that is built when the loss is first computed."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = keras.layers.Dense(3), keras.layers.Dense(6)

    def call(self, x):
        return self.encoder(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(self.decoder(y_pred) - x))


def test_a_layer_that_compute_loss_builds_trains_as_on_one_device():
    options = {"build": TwoTowers, "compile_options": dict}
    expected = train(None, **options)
    assert len(expected.model.trainable_weights) == 4
    assert_same_training(expected, train(tfparallel.MirroredStrategy(3), **options))


def test_a_distribution_of_keras_beside_a_strategy_is_refused(monkeypatch):
    class DataParallel:
        pass

    monkeypatch.setattr(keras.distribution, "distribution", DataParallel)
    strategy = tfparallel.MirroredStrategy(2)
    with pytest.raises(RuntimeError, match=r"DataParallel.*set_distribution\(None\)"):
        strategy.scope()


START = """
import tensorflow as tf, tfparallel
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""


@pytest.mark.turns
def test_one_line_says_what_a_strategy_is_and_one_that_nobody_used_it():
    ran = run_python(START + "strategy = tfparallel.MirroredStrategy()", SLURM_NTASKS="4")
    assert ran.returncode == 0, ran.stderr
    ours = [line for line in ran.stderr.splitlines() if "tfparallel" in line]
    what = "MirroredStrategy(num_replicas=2, devices=['CPU:0', 'CPU:1'])"
    assert ours[0] == f"INFO:tensorflow.tfparallel:{what}"
    assert "Slurm says that this job has 4 tasks (SLURM_NTASKS)" in ours[1]
    assert ours[2].startswith(f"WARNING:tensorflow.tfparallel:{what} was not used")
    assert len(ours) == 3


@pytest.mark.turns
def test_a_strategy_that_is_used_is_spoken_of_once():
    ran = run_python(START + "with tfparallel.MirroredStrategy().scope(): tf.Variable(1.0)")
    assert ran.returncode == 0, ran.stderr
    assert len([line for line in ran.stderr.splitlines() if "tfparallel" in line]) == 1


@pytest.mark.turns
@pytest.mark.parametrize(
    "made", ["MultiWorkerMirroredStrategy()", "TensorParallelStrategy('auto', transport='ring')"]
)
def test_workers_that_come_after_tensorflow_has_started_say_so_before_they_wait(made):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    code = f"import tensorflow as tf, tfparallel; tf.ones(1); tfparallel.{made}"
    ran = run_python(code, TF_CONFIG=config)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"RuntimeError: Expected {made.partition('(')[0]} to be made before")
    assert "restart the kernel" in last
    assert "Rank 1 is speaking" in last


@pytest.mark.turns
def test_logical_cpus_that_come_too_late_say_what_to_do():
    code = "import tensorflow as tf, tfparallel; tf.ones(1); tfparallel.MirroredStrategy"
    ran = run_python(code, TFPARALLEL_LOGICAL_CPUS="2")
    assert "restart the kernel" in ran.stderr.strip().splitlines()[-1], ran.stderr
