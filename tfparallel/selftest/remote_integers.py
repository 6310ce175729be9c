"""int32 given to a function on a device and back: as it is, and as pipelines send it.

A pipeline calls its stages by TensorFlow's `RemoteCall`. On GPUs that is expected to hand an int32
over in the wrong memory, which ends the process; pipelines send int64 (`wide_integers.py`). So the
check is of int64; what becomes of int32 is tried in a process of its own, and only told.
"""

import signal
import subprocess
import sys

import numpy as np
import tensorflow as tf

from tfparallel.internals import device_util
from tfparallel.segments.graph_copy import GraphFunction
from tfparallel.segments.wide_integers import WideFunction, narrowed, widened
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_LIMIT_S = 120.0
_DTYPES = (tf.int32, tf.float32)


def pass_integers(bench: Bench) -> Passed:
    """What a stage is given arrives, and what it gives."""
    check = ("tfparallel.selftest.one_check", bench.to_json(), "remote_integers:pass_as_they_are")
    tried = _ending([sys.executable, "-m", *check])  # before this process takes the GPU's memory
    open_devices()
    device = device_util.canonicalize(bench.devices[-1])
    if not arrives(device, is_wide=True):
        raise CheckFailedError(f"int32 sent as int64 is another number on {device}")
    return Passed(f"sent as int64 they arrive; as int32: {tried}", {"as_int32": tried})


def pass_as_they_are(bench: Bench) -> Passed:
    """As `pass_integers`, without what makes it safe."""
    open_devices()
    if not arrives(device_util.canonicalize(bench.devices[-1]), is_wide=False):
        raise CheckFailedError("other numbers")
    return Passed("they arrive")


def arrives(device: str, is_wide: bool) -> bool:
    """Whether a function on `device` is given int32 as they are, and gives them so.

    Args:
        is_wide: whether they cross as int64.
    """

    def compute(shape: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reshape(x, shape) * 2.0, shape + 1]

    specs = [tf.TensorSpec([2], tf.int64 if is_wide else tf.int32), tf.TensorSpec([6])]
    stage = WideFunction(compute, _DTYPES) if is_wide else compute
    graph = tf.function(stage, autograph=False).get_concrete_function(*specs).graph
    function = GraphFunction("integers", graph, graph.inputs, graph.outputs)

    @tf.function(autograph=False)
    def step(shape: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        outputs = function(device, widened([shape, x]) if is_wide else [shape, x])
        return narrowed(outputs, (tf.float32, tf.int32)) if is_wide else outputs

    with tf.device(device):
        doubled, following = step(tf.constant([2, 3]), tf.range(6.0))
    expected = 2.0 * np.arange(6.0).reshape(2, 3)
    return bool(np.array_equal(doubled, expected) and np.array_equal(following, [3, 4]))


def _ending(command: list[str]) -> str:
    """How a process ends that may crash."""
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_LIMIT_S:g} s"
    print(done.stdout.decode(errors="replace").replace("tfparallel-selftest ", ""))
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    return "they arrive" if done.returncode == 0 else f"exit status {done.returncode}"
