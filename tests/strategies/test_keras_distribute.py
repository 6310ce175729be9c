"""Keras's own tests of `tf.distribute`, from its wheel, with our strategy in the place of stock."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

FOLDER = Path(keras.__file__).parent / "src/backend/tensorflow"
EXCEPT = [
    # It asks for the name of TensorFlow's class of variables.
    "test_variable_creation",
    # It gives one tensor to all replicas as their gradient, which stock counts once where it is
    # applied (`test_ema`) and once for each replica where it is accumulated first. Ours counts it
    # once in both; of gradients of the replicas' own, as any tape gives, ours trains to the numbers
    # of this test: `test_gradient_accumulation_of_own_gradients`.
    "test_gradient_accumulation",
]
PROGRAM = """
import sys
import pytest
import tensorflow as tf
import tfparallel
tf.distribute.MirroredStrategy = tfparallel.MirroredStrategy
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["distribute_test.py", "optimizer_distribute_test.py"])
def test_passes(name, tmp_path):
    """In a process of its own: these tests reset TensorFlow's context."""
    if not (FOLDER / name).exists():
        pytest.skip(f"this version of Keras does not ship {name}")
    chosen = f"not ({' or '.join(EXCEPT)})"
    options = ["-q", "-c", "/dev/null", "--rootdir", str(FOLDER), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options, "-k", chosen, str(FOLDER / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_gradient_accumulation_of_own_gradients():
    """The weights of Keras's `test_gradient_accumulation`, where each replica has its gradient."""
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)

    def update():
        gradient = tf.identity([[1.0, 1.0], [2.0, 2.0]])
        optimizer.apply_gradients([(gradient, weight)])

    for expected in ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]], [[-1.0, 0.0]] * 2):
        strategy.run(update)
        np.testing.assert_array_equal(weight, expected)
    assert int(optimizer.iterations) == 1
