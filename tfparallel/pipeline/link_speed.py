"""How long a byte takes from a stage's device to the next one's."""

import itertools
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

_NUM_FLOATS = 1 << 21  # 8 MB: the start of a copy does not count for much
_REPEATS = 3


def seconds_per_byte(devices: Sequence[str]) -> float:
    """Of the slowest link between devices that follow one another.

    Args:
        devices: of each stage, in canonical names, of this process or one that it can reach.
    """
    pairs = {(a, b) for a, b in itertools.pairwise(devices) if not _share_memory(a, b)}
    return max((link_seconds_per_byte(*pair) for pair in sorted(pairs)), default=0.0)


def _share_memory(source: str, target: str) -> bool:
    """Logical CPUs of a process do: nothing is copied between them."""
    first, second = map(tf.DeviceSpec.from_string, (source, target))
    is_one_process = (first.job, first.task) == (second.job, second.task)
    return source == target or (
        is_one_process and {first.device_type, second.device_type} == {"CPU"}
    )


def link_seconds_per_byte(source: str, target: str) -> float:
    """How much longer it takes until values of `source` are there, by byte, if `target` asks."""
    taken_s = _fastest_s(_sending(source, target)) - _fastest_s(_sending(source, source))
    return max(taken_s, 0.0) / (4 * _NUM_FLOATS)


def _sending(source: str, target: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that makes values on `source`, and has one of them on `target` with all others."""

    @tf.function(autograph=False)
    def send(value: tf.Tensor) -> tf.Tensor:
        with tf.device(source):
            values = tf.fill([_NUM_FLOATS], value)
        with tf.device(target):
            return tf.reduce_max(values)

    return send


def _fastest_s(function: Callable[[tf.Tensor], tf.Tensor]) -> float:
    """Of several calls whose results are read; others only are in the way of a link."""
    value = tf.constant(1.0)
    float(function(value))
    times_s = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        float(function(value))
        times_s.append(time.perf_counter() - started)
    return min(times_s)
