"""How many rows a second strategies train, of models as users have them, beside stock ones.

Steps are those of a user's settings: mixed bfloat16, and neither deterministic nor without TF32.
"""

import contextlib
import time
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

import tfparallel
from tfparallel.selftest.contenders import IN_ONE_PROCESS, IN_SEVERAL_PROCESSES
from tfparallel.selftest.job_checks import ALONE, horovodrun, launcher, outcomes_of
from tfparallel.selftest.machine_checks import has_nvlink
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.speed_checks import STEPS, seconds_of_fit
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed
from tfparallel.selftest.workloads import WORKLOADS, Workload, timed_model

_ROUNDS = 3
_LEAST_OF_STOCK = 0.9
_LEAST_EFFICIENCY = 0.85  # over NVLink; over slower links it is told
_DTYPE = "mixed_bfloat16"
_STOCK = "stock "  # before the name of what a strategy stands beside

# Trains `STEPS` steps; gives seconds.
Timed = Callable[[], float]


def compare_throughput(bench: Bench, workload: str) -> Passed:
    """Each way to train a model on all GPUs; a process holds GPUs until it has ended."""
    room = "throughput_checks"
    (one,) = outcomes_of(ALONE, bench, f"{room}:measure_alone", workload)
    found = dict(one["figures"])
    starts = {"multi_worker_mirrored": launcher(bench)}
    with contextlib.suppress(CheckSkippedError):  # it is not installed
        starts["horovod"] = horovodrun(bench)
    for name, start in starts.items():
        ranks = outcomes_of(start, bench, f"{room}:measure_rank", name, workload)
        measured = [rank["figures"] for rank in ranks if rank["verdict"] == "ok"]
        for key in measured[0] if measured else ():
            found[key] = min(each[key] for each in measured)
    return judge_throughput(found, bench.num_devices, has_nvlink=bool(bench.gpus) and has_nvlink())


def judge_throughput(rows_per_s: Mapping[str, float], num_gpus: int, has_nvlink: bool) -> Passed:
    """Holds rows a second of strategies against stock ones, and of all GPUs against one.

    Args:
        rows_per_s: of all GPUs together; "keras" and "one_device" are on one.
        num_gpus: how many there are.
        has_nvlink: whether they are joined so that sums cost little.

    Raises:
        CheckFailedError: for a strategy that is far slower than the stock one beside it, or that
            gains little of more GPUs where it could.
    """
    efficiency = rows_per_s["mirrored"] / (num_gpus * rows_per_s["one_device"])
    text = ", ".join(f"{name} {own:,.0f}" for name, own in rows_per_s.items())
    text = f"rows/s: {text}; {efficiency:.0%} of {num_gpus} times one GPU"
    pairs = [(own, rows_per_s.get(_STOCK + name)) for name, own in rows_per_s.items()]
    is_slow = any(stock is not None and own < _LEAST_OF_STOCK * stock for own, stock in pairs)
    if is_slow or (has_nvlink and efficiency < _LEAST_EFFICIENCY):
        raise CheckFailedError(text)
    return Passed(text, {**rows_per_s, "efficiency": efficiency})


def measure_alone(bench: Bench, workload: str) -> Passed:
    """What one process trains, on one device and on all of them: in turn, so that all are alike."""
    open_devices(is_exact=False, is_deterministic=False)
    keras.config.set_dtype_policy(_DTYPE)
    devices, own = bench.devices, WORKLOADS[workload]
    rows = {1: own.rows_a_gpu, len(devices): own.rows_a_gpu * len(devices)}
    contestants: dict[str, tuple[int, Callable[[], tf.distribute.Strategy] | None]] = {
        "keras": (1, None),  # with XLA, as Keras has it by default
        "one_device": (1, lambda: tfparallel.OneDeviceStrategy(devices[0])),
        "mirrored": (len(devices), lambda: IN_ONE_PROCESS["mirrored"](devices)),
        f"{_STOCK}mirrored": (len(devices), lambda: tf.distribute.MirroredStrategy(devices)),
    }
    timed = {
        name: _fitted(own, rows[count], make() if make else None)
        for name, (count, make) in contestants.items()
    }
    seconds = _in_turn(timed)
    figures = {n: STEPS * rows[count] / seconds[n] for n, (count, _) in contestants.items()}
    return Passed("measured", dict(figures))


def measure_rank(bench: Bench, name: str, workload: str) -> Passed:
    """What one of several processes trains, under a strategy and in a loop as stock has it.

    `fit` of Keras 3 ends with an error under the stock strategy for workers, and Horovod's
    `DistributedOptimizer` knows none of its optimizers.
    """
    open_devices(is_exact=False, is_deterministic=False)
    keras.config.set_dtype_policy(_DTYPE)
    own = WORKLOADS[workload]
    strategy = IN_SEVERAL_PROCESSES[name]()
    count = strategy.num_replicas_in_sync
    timed = {name: _fitted(own, own.rows_a_gpu * count, strategy)}
    if name == "horovod":
        import horovod.tensorflow as hvd

        if bench.gpus and not hvd.nccl_built():
            raise CheckSkippedError("this Horovod has no NCCL")
        timed[_STOCK + name] = _looped(_step_of_tape(own), own)
    else:
        timed[_STOCK + name] = _looped(_step_of_workers(own), own)
    seconds = _in_turn(timed)
    return Passed("measured", {n: STEPS * own.rows_a_gpu * count / seconds[n] for n in timed})


def _in_turn(timed: Mapping[str, Timed]) -> dict[str, float]:
    """Seconds of `STEPS` steps of each, by the fastest of several rounds."""
    for train in timed.values():
        train()  # traces and compiles
    rounds = [{name: train() for name, train in timed.items()} for _ in range(_ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in timed}


def _fitted(workload: Workload, rows: int, strategy: tf.distribute.Strategy | None) -> Timed:
    """`fit` with batches of so many rows."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = timed_model(workload)
    batch = workload.data(rows)
    return lambda: min(seconds_of_fit(model, batch, epochs=1))


def _looped(step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], workload: Workload) -> Timed:
    """A loop over a process's own rows, as guides have it."""
    data = tf.data.Dataset.from_tensors(workload.data(workload.rows_a_gpu)).repeat().prefetch(2)
    batches = iter(data)

    def train() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = step(*next(batches))
        float(loss)
        return time.perf_counter() - begin

    return train


def _step_of_workers(workload: Workload) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl"""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = timed_model(workload)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True)) / strategy.num_replicas_in_sync
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    return step


def _step_of_tape(workload: Workload) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Source: https://horovod.readthedocs.io/en/stable/tensorflow.html"""
    import horovod.tensorflow as hvd

    model = timed_model(workload)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        weights = model.trainable_variables
        # TensorFlow's variables: Horovod's tape knows none of Keras 3.
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [w.value for w in weights])
        model.optimizer.apply(gradients, weights)
        return loss

    return step
