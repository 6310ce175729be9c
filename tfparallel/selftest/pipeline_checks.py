"""What a pipeline takes of its GPUs, held against what it says beforehand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
_MOST_LEFT = 0.75  # of a peak that a policy lowers
_MICROBATCHES = (4, 16, 64)
_OF_GPIPE = 8
_MICROBATCH_ROWS = 4096
_WIDTH = 1024
_INPUTS = 4  # so few that a batch, which grows with its microbatches, is small
_SLOWEST_STAGE = 1.2  # of the mean


class MemoryUse(NamedTuple):
    """Bytes of a device: at the peak of a step, and by the summary."""

    measured: int
    predicted: int


def measure_memory(bench: Bench) -> Passed:
    """The peak of 1F1B does not grow with microbatches, and is as predicted; policies lower it.

    A policy is held against GPipe, which keeps the activations of all microbatches. 1F1B over two
    stages keeps those of two, no more than are on their way to the host with `offload=True`.
    """
    open_devices()
    devices = bench.devices[:2]
    by_number = {number: _use_of_pipeline(devices, number) for number in _MICROBATCHES}
    kept = _use_of_pipeline(devices, _OF_GPIPE, schedule="gpipe")
    policies: dict[str, dict[str, Any]] = {
        "offload": {"offload": True},
        "rematerialize": {"rematerialize": "full"},
    }
    lowered = {
        name: _peak(_use_of_pipeline(devices, _OF_GPIPE, schedule="gpipe", **options)) / _peak(kept)
        for name, options in policies.items()
    }
    return judge_memory(by_number, lowered)


def judge_memory(
    by_number: Mapping[int, Sequence[MemoryUse]], lowered: Mapping[str, float]
) -> Passed:
    """Holds what devices needed for fewer and more microbatches against one another.

    Args:
        by_number: of microbatches, what each device needed.
        lowered: of what peak is left, by the policy that lowers it.

    Raises:
        CheckFailedError: where more of them need more, the prediction is far off, or a policy saves
            little.
    """
    peaks = {number: _peak(uses) for number, uses in by_number.items()}
    text = ", ".join(f"{number}: {peak / 2**20:,.0f} MiB" for number, peak in peaks.items())
    off = {n: [each.measured / each.predicted for each in uses] for n, uses in by_number.items()}
    shares = [share for own in off.values() for share in own]
    text = f"peaks by microbatches: {text}; {min(shares):.0%} to {max(shares):.0%} of predictions"
    text += "".join(f"; with {name} {share:.0%}" for name, share in lowered.items())
    grows = max(peaks.values()) > _MORE_PEAK * peaks[min(peaks)]
    is_off = any(abs(share - 1) > _PREDICTION_OFF for share in shares)
    if grows or is_off or any(share > _MOST_LEFT for share in lowered.values()):
        raise CheckFailedError(text)
    return Passed(text, {"peak_bytes": peaks, "of_predictions": off, "lowered": dict(lowered)})


def _peak(uses: Sequence[MemoryUse]) -> int:
    return max(each.measured for each in uses)


def _use_of_pipeline(
    devices: Sequence[str], num_microbatches: int, schedule: str = "1f1b", **policy: Any
) -> list[MemoryUse]:
    """Of each device, for a pipeline whose activations outweigh its weights."""
    keras.backend.clear_session()
    rows = _MICROBATCH_ROWS * num_microbatches
    strategy = tfparallel.PipelineStrategy(devices, num_microbatches, schedule, **policy)
    with strategy.scope():
        hidden = [keras.layers.Dense(_WIDTH, activation="tanh") for _ in range(24)]
        model = keras.Sequential([keras.Input((_INPUTS,)), *hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.zeros((rows, _INPUTS), "float32"), np.zeros((rows, 1), "float32")
    model.train_on_batch(x, y)
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    model.train_on_batch(x, y)
    peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in devices]
    stages = strategy.summary(model).stages
    predicted = [each.parameter_bytes + (each.activation_bytes or 0) for each in stages]
    pairs = zip(peaks, predicted, strict=True)
    return [MemoryUse(int(peak), bytes_) for peak, bytes_ in pairs]


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
