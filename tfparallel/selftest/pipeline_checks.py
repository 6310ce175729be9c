"""What a pipeline takes of its GPUs, held against what it says beforehand."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_MORE_PEAK = 1.1
_PREDICTION_OFF = 0.2
_MICROBATCH_ROWS = 4096


class MemoryUse(NamedTuple):
    """Bytes of a device, the batch not counted: at the peak of a step, and by the summary."""

    measured: int
    predicted: int


def measure_memory(bench: Bench) -> Passed:
    """The peak of 1F1B does not grow with the number of microbatches, and is as predicted."""
    open_devices()
    few, many = (_use_of_pipeline(bench.devices[:2], number) for number in (4, 16))
    return judge_memory(few, many)


def judge_memory(few: Sequence[MemoryUse], many: Sequence[MemoryUse]) -> Passed:
    """Holds what devices needed for a few microbatches, and for many, against one another.

    Raises:
        CheckFailedError: where more of them need more, or the prediction is far off.
    """
    of_few, of_many = (max(each.measured for each in own) for own in (few, many))
    text = f"peak {of_few / 2**20:,.0f} MiB of 4 microbatches, {of_many / 2**20:,.0f} MiB of 16"
    shares = [each.measured / each.predicted for each in many]
    text += f"; of what summary predicts: {', '.join(f'{share:.0%}' for share in shares)}"
    if of_many > _MORE_PEAK * of_few or any(abs(share - 1) > _PREDICTION_OFF for share in shares):
        raise CheckFailedError(text)
    figures = {"peak_bytes_of_4": of_few, "peak_bytes_of_16": of_many, "of_prediction": shares}
    return Passed(text, figures)


def _use_of_pipeline(devices: Sequence[str], num_microbatches: int) -> list[MemoryUse]:
    """Of each device, for a pipeline whose activations outweigh its weights."""
    keras.backend.clear_session()
    rows = _MICROBATCH_ROWS * num_microbatches
    strategy = tfparallel.PipelineStrategy(devices, num_microbatches, "1f1b")
    with strategy.scope():
        hidden = [keras.layers.Dense(1024, activation="tanh") for _ in range(24)]
        model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.zeros((rows, 64), "float32"), np.zeros((rows, 1), "float32")
    model.train_on_batch(x, y)
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    model.train_on_batch(x, y)
    peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in devices]
    stages = strategy.summary(model).stages
    predicted = [each.parameter_bytes + (each.activation_bytes or 0) for each in stages]
    batch = x.nbytes + y.nbytes
    pairs = zip(peaks, predicted, strict=True)
    return [MemoryUse(int(peak) - batch, bytes_) for peak, bytes_ in pairs]
