"""Keras's own tests of `tf.distribute`, from its wheel, with our strategy in the place of stock."""

import subprocess
import sys
from pathlib import Path

import keras
import pytest

FOLDER = Path(keras.__file__).parent / "src/backend/tensorflow"
EXCEPT = [
    # It asks for the name of TensorFlow's class of variables.
    "test_variable_creation",
    # It gives one gradient to all replicas, outside of a `tf.function`. Stock counts that once for
    # each replica if it is accumulated first, and else once (`test_ema`); ours is summed first.
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
