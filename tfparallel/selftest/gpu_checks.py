"""Checks that only GPUs can answer: what runs where, what is copied."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.selftest.contenders import IN_ONE_PROCESS
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.speed_checks import STEPS, wide_model
from tfparallel.selftest.trials import Trial, train
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_MOST_BACK_BYTES = 4096  # of metrics and counters, a step
_MORE_THAN_A_BATCH = 1.1


class Copies(NamedTuple):
    """What crossed between the host and the GPUs: how many copies, of how many bytes."""

    to_device: int
    to_device_bytes: int
    to_host: int
    to_host_bytes: int
    between_devices: int
    between_devices_bytes: int


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
    model, x, y = wide_model(strategy, len(bench.devices))
    batch = len(x) // STEPS
    model.fit(x, y, batch_size=batch, verbose=0)  # compiles, and makes all variables
    log = str(bench.path / "profile")
    with tf.profiler.experimental.Profile(log):
        model.fit(x, y, batch_size=batch, verbose=0)
    (path,) = Path(log).rglob("*.xplane.pb")
    return judge_copies(copies_of_profile(path.read_bytes()), STEPS, (x.nbytes + y.nbytes))


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
