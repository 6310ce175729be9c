"""Whether memory stays as it is, however many steps are trained and whatever their sizes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.selftest.contenders import IN_ONE_PROCESS
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_STRATEGIES = ("mirrored", "pipeline_1f1b")
_STEPS = 200
_FIRST_STEPS = 40  # after which memory is as large as it gets
_ROWS = (512, 320)  # of batches, in turn
_WIDTH = 256
_LAYERS, _LAYERS_WITHOUT_GPUS = 4, 2
_MORE_PEAK = 1.1
_MORE_ON_HOST_BYTES = 64 << 20  # less than a batch a step; an allocator keeps some for itself


class Growth(NamedTuple):
    """What `_STEPS` more steps need more than `_FIRST_STEPS`.

    Attributes:
        host_bytes: how much more of the host's memory the process holds.
        of_peaks: the largest peak of a GPU, as a multiple of that before; 1 without GPUs.
    """

    host_bytes: int
    of_peaks: float


def watch_memory(bench: Bench) -> Passed:
    """Batches of two sizes in turn: no step leaves anything behind."""
    open_devices()
    return judge_growth({name: _growth(name, bench) for name in _STRATEGIES})


def judge_growth(found: Mapping[str, Growth]) -> Passed:
    """Holds what steps left behind against what is allowed.

    Raises:
        CheckFailedError: naming the strategies under which memory grows.
    """
    text = f"{_STEPS} more steps: " + "; ".join(
        f"{name} {own.host_bytes / 2**20:+.0f} MiB on the host, peaks of GPUs x{own.of_peaks:.2f}"
        for name, own in found.items()
    )
    if any(x.host_bytes > _MORE_ON_HOST_BYTES or x.of_peaks > _MORE_PEAK for x in found.values()):
        raise CheckFailedError(text)
    return Passed(text, {name: own._asdict() for name, own in found.items()})


def _growth(name: str, bench: Bench) -> Growth:
    keras.backend.clear_session()
    with IN_ONE_PROCESS[name](bench.devices).scope():
        number = _LAYERS if bench.gpus else _LAYERS_WITHOUT_GPUS
        hidden = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(number)]
        model = keras.Sequential([keras.Input((_WIDTH,)), *hidden, keras.layers.Dense(8)])
        model.compile("sgd", "mse")
    sizes = tf.data.Dataset.from_tensor_slices(list(_ROWS))
    data = sizes.map(lambda rows: (tf.ones([rows, _WIDTH]), tf.ones([rows, 8]))).repeat()
    uses = []
    for steps in (_FIRST_STEPS, _STEPS):
        for gpu in bench.devices if bench.gpus else ():
            tf.config.experimental.reset_memory_stats(gpu)
        model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
        uses.append((_held_bytes(), _peaks(bench)))
    (held_before, before), (held, after) = uses
    risen = (last / first for first, last in zip(before, after, strict=True))
    return Growth(held - held_before, max(risen, default=1.0))


def _held_bytes() -> int:
    """Of the host's memory, by this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peaks(bench: Bench) -> list[int]:
    gpus = bench.devices if bench.gpus else ()
    return [tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus]
