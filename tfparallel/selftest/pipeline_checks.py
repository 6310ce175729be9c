"""What a pipeline takes of its GPUs, held against what it says beforehand."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.internals.profile_planes import Ran
from tfparallel.internals.ran_operations import profiled
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_MORE_PEAK = 1.1
_PREDICTION_OFF = 0.2
_MICROBATCH_ROWS = 4096
_SLOWEST_STAGE = 1.2  # of the mean


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


def measure_balance(bench: Bench) -> Passed:
    """Stages take equally long, of a model that equal numbers of layers would not divide so."""
    open_devices()
    devices = bench.devices[:2]
    strategy = tfparallel.PipelineStrategy(devices, num_microbatches=4)
    with strategy.scope():
        widths = [1024] * 32 + [2048] * 8
        hidden = [keras.layers.Dense(width, activation="tanh") for width in widths]
        model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = _MICROBATCH_ROWS * 4
    x, y = np.zeros((rows, 1024), "float32"), np.zeros((rows, 1), "float32")
    model.train_on_batch(x, y)
    with profiled() as ran:
        model.train_on_batch(x, y)
    predicted = [stage.time_share or 0.0 for stage in strategy.summary(model).stages]
    return judge_balance(predicted, [computing_s(ran, device) for device in devices])


def computing_s(ran: Iterable[Ran], device: str) -> float:
    """Seconds in which a device computed, by its own clock; copies do not count.

    Args:
        ran: what a profiler saw.
        device: "GPU:0".
    """
    own = [x for x in ran if x.device == device and "memcpy" not in x.operation.lower()]
    seconds, end = 0.0, 0.0
    for each in sorted(own, key=lambda x: x.start_s):  # streams compute beside one another
        seconds += max(0.0, each.end_s - max(each.start_s, end))
        end = max(end, each.end_s)
    return seconds


def judge_balance(predicted: Sequence[float], measured_s: Sequence[float]) -> Passed:
    """Holds the times of stages against one another.

    Args:
        predicted: shares by which the model was divided.
        measured_s: seconds of each stage in a step.

    Raises:
        CheckFailedError: if one takes far longer than the mean, or nothing was measured.
    """
    if not all(measured_s):
        raise CheckFailedError(f"the profile shows nothing on some GPUs; seconds: {measured_s}")
    shares = [each / sum(measured_s) for each in measured_s]
    own, before = (", ".join(f"{x:.0%}" for x in each) for each in (shares, predicted))
    text = f"stages take {own} of the time; predicted {before}"
    if max(shares) * len(shares) > _SLOWEST_STAGE:
        raise CheckFailedError(text)
    return Passed(text, {"measured_s": list(measured_s), "predicted": list(predicted)})
