"""Checks that only GPUs can answer: what runs where, what is copied, who waits, how fast."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.selftest.contenders import IN_ONE_PROCESS
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, train
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_WIDTH = 4096
_ROWS_A_GPU = 2048
_STEPS = 20
_SLOWEST_LAUNCH = 0.5  # of a step
_MOST_BACK_BYTES = 4096  # of metrics and counters, a step
_MORE_THAN_A_BATCH = 1.1
_SLOWEST_TO_STOCK = 0.9
_MORE_PEAK = 1.1
_PREDICTION_OFF = 0.2
_MICROBATCH_ROWS = 4096


class Copies(NamedTuple):
    """What crossed between the host and the GPUs: how many copies, of how many bytes."""

    to_device: int
    to_device_bytes: int
    to_host: int
    to_host_bytes: int
    between_devices: int
    between_devices_bytes: int


class MemoryUse(NamedTuple):
    """Bytes of a device, the batch not counted: at the peak of a step, and by the summary."""

    measured: int
    predicted: int


def multiply_on_each_device(bench: Bench) -> Passed:
    """Each device multiplies as numpy does, and another device reads the result."""
    open_devices()
    a = np.random.default_rng(0).normal(size=(256, 256)).astype("float32")
    expected = a.astype("float64") @ a
    for device in bench.devices:
        with tf.device(device):
            product = tf.linalg.matmul(a, a)
        if device not in product.device:
            raise CheckFailedError(f"asked for {device}, the product is on {product.device}")
        for other in bench.devices:
            with tf.device(other):
                copy = tf.identity(product).numpy()
            if not np.allclose(copy, expected, rtol=0, atol=1e-3):
                raise CheckFailedError(f"a product of {device}, read from {other}, is wrong")
    return Passed(f"{', '.join(bench.devices)}: products and copies are right")


def run_without_soft_placement(bench: Bench) -> Passed:
    """Every operation of a step has a kernel on the device that it is asked for on."""
    open_devices()
    tf.config.set_soft_device_placement(False)
    names = ("one_device", "mirrored", "sharded", "pipeline_1f1b")
    for name in names:
        for model in ("mlp", "gpt"):
            try:
                train(Trial(model, "uneven"), IN_ONE_PROCESS[name](bench.devices))
            except tf.errors.InvalidArgumentError as error:
                raise CheckFailedError(f"{name}, {model}: {error.message[:400]}") from error
    return Passed(f"{len(names)} strategies: nothing moves to the host for lack of a kernel")


def find_nccl(bench: Bench) -> Passed:
    """NCCL, and nothing else, sums gradients over GPUs of this machine."""
    import os

    log = bench.path / "nccl"
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": f"{log}.%p",
    }
    open_devices()
    train(Trial("mlp", "static"), tfparallel.MirroredStrategy(bench.devices))
    text = "".join(path.read_text() for path in Path(bench.folder).glob("nccl.*"))
    return judge_nccl(text, len(bench.gpus))


def judge_nccl(log: str, num_gpus: int) -> Passed:
    """Reads NCCL's own log.

    Raises:
        CheckFailedError: unless a group of all GPUs was made, and sums ran in it, without sockets.
    """
    ranks = {int(number) for number in re.findall(r"nranks (\d+).*Init COMPLETE", log)}
    sums = len(re.findall(r"NCCL INFO AllReduce:", log))
    if num_gpus not in ranks or not sums:
        raise CheckFailedError(f"groups of {sorted(ranks)} GPUs, {sums} sums in NCCL's log")
    if "via NET/Socket" in log:
        raise CheckFailedError("NCCL sends by sockets between GPUs of one machine")
    return Passed(f"{num_gpus} ranks, {sums} sums", {"all_reduces": sums})


def count_copies(bench: Bench) -> Passed:
    """A step copies its batch to the GPUs, and back no more than metrics."""
    open_devices()
    strategy = tfparallel.MirroredStrategy(bench.devices)
    model, x, y = _wide_model(strategy, len(bench.devices))
    batch = len(x) // _STEPS
    model.fit(x, y, batch_size=batch, verbose=0)  # compiles, and makes all variables
    log = str(bench.path / "profile")
    with tf.profiler.experimental.Profile(log):
        model.fit(x, y, batch_size=batch, verbose=0)
    (path,) = Path(log).rglob("*.xplane.pb")
    return judge_copies(copies_of_profile(path.read_bytes()), _STEPS, (x.nbytes + y.nbytes))


def copies_of_profile(serialized: bytes) -> Copies:
    """Copies that a profile of TensorFlow's holds, by direction."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(serialized)
    kinds = {"MemcpyH2D": [0, 0], "MemcpyD2H": [0, 0], "MemcpyP2P": [0, 0]}
    for plane in space.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name in kinds:
                    kinds[name][0] += 1
                    kinds[name][1] += sum(_copied_bytes(plane, event))
    return Copies(*kinds["MemcpyH2D"], *kinds["MemcpyD2H"], *kinds["MemcpyP2P"])


def _copied_bytes(plane: Any, event: Any) -> Iterator[int]:
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            yield from (int(number) for number in re.findall(r"size:(\d+)", text))


def judge_copies(copies: Copies, steps: int, data_bytes: int) -> Passed:
    """Holds copies of an epoch against its data.

    Raises:
        CheckFailedError: for more bytes than batches to the GPUs, or than metrics back.
    """
    there, back = copies.to_device_bytes / steps, copies.to_host_bytes / steps
    most = _MORE_THAN_A_BATCH * data_bytes / steps
    text = (
        f"a step: {copies.to_device / steps:.0f} copies of {there:,.0f} bytes to GPUs, "
        f"{copies.to_host / steps:.0f} of {back:,.0f} back, "
        f"{copies.between_devices / steps:.0f} of "
        f"{copies.between_devices_bytes / steps:,.0f} between them"
    )
    if there == 0:
        raise CheckFailedError(f"the profile holds no copy to a GPU; {text}")
    if there > most or back > _MOST_BACK_BYTES:
        raise CheckFailedError(f"expected {most:,.0f} there and {_MOST_BACK_BYTES} back; {text}")
    return Passed(text, copies._asdict())


def launch_ahead(bench: Bench) -> Passed:
    """A step is launched before the step ahead of it has ended: no wait for the GPU in between."""
    open_devices()
    strategy = tfparallel.MirroredStrategy(bench.devices)
    model, x, y = _wide_model(strategy, len(bench.devices))
    batch = len(x) // _STEPS
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()
    model.fit(data, steps_per_epoch=2, verbose=0)
    function = model.make_train_function()
    with strategy.scope():
        iterator = iter(strategy.experimental_distribute_dataset(data))
    _wait(function(iterator))
    begin = time.perf_counter()
    logs = [function(iterator) for _ in range(_STEPS)]
    launched = time.perf_counter() - begin
    _wait(logs[-1])
    share = launched / (time.perf_counter() - begin)
    if share > _SLOWEST_LAUNCH:
        raise CheckFailedError(f"launching takes {share:.0%} of the steps: each waits for the GPU")
    return Passed(f"launching takes {share:.0%} of the time of steps", {"share": share})


def compare_speed(bench: Bench) -> Passed:
    """Steps a second beside TensorFlow's own strategy, in turn."""
    open_devices()
    ours = _timed(tfparallel.MirroredStrategy(bench.devices), bench)
    stock = _timed(tf.distribute.MirroredStrategy(bench.devices), bench)
    pairs = [(next(ours), next(stock)) for _ in range(5)]
    own, other = (float(np.median(times)) for times in zip(*pairs, strict=True))
    text = f"{_STEPS / own:.1f} steps/s, tf.distribute {_STEPS / other:.1f}"
    if other / own < _SLOWEST_TO_STOCK:
        raise CheckFailedError(text)
    return Passed(text, {"steps_per_s": _STEPS / own, "stock_steps_per_s": _STEPS / other})


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


def _wide_model(
    strategy: tf.distribute.Strategy, num_devices: int
) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(8)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    rows = _ROWS_A_GPU * num_devices * _STEPS
    x = np.random.default_rng(0).normal(size=(rows, 256)).astype("float32")
    return model, x, np.ascontiguousarray(x[:, :8])


def _timed(strategy: tf.distribute.Strategy, bench: Bench) -> Iterator[float]:
    """Seconds of an epoch, one after the other."""
    model, x, y = _wide_model(strategy, len(bench.devices))
    options = {"batch_size": len(x) // _STEPS, "verbose": 0}
    model.fit(x, y, **options)
    while True:
        begin = time.perf_counter()
        model.fit(x, y, **options)
        yield time.perf_counter() - begin


def _wait(logs: object) -> None:
    for value in tf.nest.flatten(logs):
        np.asarray(value)
