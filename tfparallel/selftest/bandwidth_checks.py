"""How fast strategies sum over all GPUs, beside NCCL called by itself.

Bus bandwidth: of n GPUs each sends and receives 2 (n - 1) / n of the bytes at least. So it is the
speed of links, and does not depend on n.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfparallel.selftest.contenders import IN_ONE_PROCESS, IN_SEVERAL_PROCESSES
from tfparallel.selftest.job_checks import ALONE, horovodrun, launcher, outcomes_of
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed

# Called with the value of all numbers; gives one of each device that is there when its sums are.
Sums = Callable[[tf.Tensor], Iterable[tf.Tensor]]

NCCL = "NCCL alone"
_SIZE_BYTES = 256 << 20
_SUMS = 10  # in a call, one after the other
_CALLS = 5
_LEAST_OF_NCCL = 0.8
_GROUP = 1 << 20  # no strategy counts its groups so far


def compare_bandwidth(bench: Bench) -> Passed:
    """Each strategy that sums gradients of all GPUs; a process holds GPUs until it has ended."""
    room, size = "bandwidth_checks", str(_SIZE_BYTES)
    (one,) = outcomes_of(ALONE, bench, f"{room}:measure_in_one_process", size)
    found = dict(one["figures"])
    starts = {"multi_worker_mirrored": launcher(bench)}
    with contextlib.suppress(CheckSkippedError):  # it is not installed
        starts["horovod"] = horovodrun(bench)
    for name, start in starts.items():
        ranks = outcomes_of(start, bench, f"{room}:measure_as_task", name, size)
        measured = [rank["figures"][name] for rank in ranks if rank["verdict"] == "ok"]
        if measured:
            found[name] = min(measured)
    return judge_bandwidth(found)


def judge_bandwidth(bytes_per_s: Mapping[str, float]) -> Passed:
    """Holds the bandwidths of strategies against that of `NCCL`.

    Raises:
        CheckFailedError: if one is far slower.
    """
    text = ", ".join(f"{name} {own / 1e9:.1f} GB/s" for name, own in bytes_per_s.items())
    if any(own < _LEAST_OF_NCCL * bytes_per_s[NCCL] for own in bytes_per_s.values()):
        raise CheckFailedError(text)
    return Passed(text, dict(bytes_per_s))


def measure_in_one_process(bench: Bench, size_bytes: str) -> Passed:
    """NCCL, and a strategy over all devices of this process."""
    open_devices()
    size, hint = int(size_bytes), "nccl" if bench.gpus else "ring"
    strategy = IN_ONE_PROCESS["mirrored"](bench.devices)
    measured = {
        NCCL: _bytes_per_s(_raw_sums(bench.devices, size, hint), len(bench.devices), size),
        "mirrored": _bytes_per_s(_sums(strategy, size), len(bench.devices), size),
    }
    return Passed("measured", dict(measured))


def measure_as_task(bench: Bench, name: str, size_bytes: str) -> Passed:
    """A strategy of several processes, in one of them."""
    open_devices()
    if name == "horovod":
        import horovod.tensorflow as hvd

        if bench.gpus and not hvd.nccl_built():
            raise CheckSkippedError("this Horovod has no NCCL")
    strategy, size = IN_SEVERAL_PROCESSES[name](), int(size_bytes)
    replicas = strategy.num_replicas_in_sync
    return Passed("measured", {name: _bytes_per_s(_sums(strategy, size), replicas, size)})


def _bytes_per_s(sums: Sums, replicas: int, size_bytes: int) -> float:
    """The bus bandwidth of sums, by the fastest of several calls."""
    one = tf.ones([])

    def call_s() -> float:
        begin = time.perf_counter()
        for number in sums(one):
            float(number)
        return time.perf_counter() - begin

    call_s()  # traces, and opens links
    sum_s = min(call_s() for _ in range(_CALLS)) / _SUMS
    return 2 * (replicas - 1) / replicas * size_bytes / sum_s


def _sums(strategy: tf.distribute.Strategy, size_bytes: int) -> Sums:
    """Those of a strategy, as it sums gradients."""

    def sum_up(value: tf.Tensor) -> tf.Tensor:
        x = tf.fill([size_bytes // 4], value)
        for _ in range(_SUMS):
            x = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)
        return x[0]

    @tf.function(autograph=False)
    def sums(value: tf.Tensor) -> Sequence[tf.Tensor]:
        return strategy.experimental_local_results(strategy.run(sum_up, args=(value,)))

    return sums


def _raw_sums(devices: Sequence[str], size_bytes: int, hint: str) -> Sums:
    """The same by TensorFlow's operation, without a strategy."""
    orders = []  # those of a device; without them each would wait for that of the device before
    for device in devices:
        with tf.device(device):
            orders.append(tf.Variable(0.0))

    @tf.function(autograph=False)
    def sums(value: tf.Tensor) -> list[tf.Tensor]:
        ends = []
        for device, order in zip(devices, orders, strict=True):
            with tf.device(device):
                x = tf.fill([size_bytes // 4], value)
                for number in range(_SUMS):
                    x = tf.raw_ops.CollectiveReduceV2(
                        input=x,
                        group_size=len(devices),
                        group_key=_GROUP,
                        instance_key=number,
                        ordering_token=[order.handle],
                        merge_op="Add",
                        final_op="Id",
                        communication_hint=hint,
                    )
                ends.append(x[0])
        return ends

    return sums
