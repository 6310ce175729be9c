"""What a process does in checks of trainings that lose one."""

import json
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.data_parallel.gpu_of_rank import identity_of_gpu
from tfparallel.machine.gpu_shares import VISIBLE
from tfparallel.selftest.contenders import IN_SEVERAL_PROCESSES
from tfparallel.selftest.job_checks import digest_of_bytes
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.recovery_checks import (
    ELASTIC,
    HOSTS,
    WORKERS,
    ProcessPlace,
    read_places,
    write_place,
)
from tfparallel.selftest.trials import Trial, compiled_model, data_of
from tfparallel.selftest.verdicts import Passed

_TRIAL = Trial("mlp", "uneven")
_EPOCHS = 4  # of three batches
_SAVE_FREQ = 2


class _KillAt(keras.callbacks.Callback):
    """Counts batches, and ends this process at one, as nothing can catch; never at 0."""

    def __init__(self, batch: int):
        super().__init__()
        self._last = batch
        self.num_batches = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.num_batches += 1
        if self.num_batches == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_backups(bench: Bench, name: str, kill_at: str) -> Passed:
    """The digest of the weights after a training with backups, killed at a batch, or not at 0."""
    open_devices()
    model, kill = _model(tfparallel.MirroredStrategy(bench.devices)), _KillAt(int(kill_at))
    _fit(model, [_backup(bench, name), kill])
    digest = digest_of_bytes([each.tobytes() for each in model.get_weights()])
    return Passed(digest, {"batches": kill.num_batches})


def train_as_worker(bench: Bench, kill_at: str) -> Passed:
    """One of several workers, of which number 1 is killed once."""
    rank = _number_of_worker()
    attempt = sum(place.rank == rank for place in read_places(bench, WORKERS))
    open_devices()
    strategy = IN_SEVERAL_PROCESSES["multi_worker_mirrored"]()
    model = _model(strategy)
    place = ProcessPlace(attempt, strategy.num_replicas_in_sync, rank, _device_of(model))
    write_place(bench, WORKERS, place)
    kill = _KillAt(int(kill_at) if (attempt, rank) == (0, 1) else 0)
    _fit(model, [_backup(bench, WORKERS), kill])
    return _ending(model, kill)


def train_elastic(bench: Bench, kill_at: str) -> Passed:
    """One of two elastic ranks, on the GPU of its host; number 1 is killed once."""
    host = HOSTS.index(os.environ["HOROVOD_HOSTNAME"])
    os.environ[VISIBLE] = bench.gpus[host] if bench.gpus else "-1"
    open_devices()
    attempts: list[_KillAt] = []

    def train(job: tfparallel.ElasticJob) -> keras.Model:
        strategy = tfparallel.HorovodStrategy()
        model = _model(strategy)
        place = ProcessPlace(len(attempts), strategy.num_replicas_in_sync, host, _device_of(model))
        write_place(bench, ELASTIC, place)
        is_killed = strategy.num_replicas_in_sync == 2 and strategy.rank == 1
        kill = _KillAt(int(kill_at) if is_killed else 0)
        attempts.append(kill)
        _fit(model, [_backup(bench, ELASTIC), kill, job.callback(check_freq=_SAVE_FREQ)])
        return model

    model = tfparallel.run_elastic(train)()
    return _ending(model, attempts[-1])


def _model(strategy: tf.distribute.Strategy | None = None) -> keras.Model:
    keras.utils.set_random_seed(0)
    if strategy is None:
        return compiled_model(_TRIAL)
    with strategy.scope():
        return compiled_model(_TRIAL)


def _fit(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> None:
    x, y, batch = data_of(_TRIAL)
    model.fit(x, y, batch_size=batch, epochs=_EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)


def _backup(bench: Bench, name: str) -> keras.callbacks.Callback:
    folder = bench.path / f"backups_{name}"
    return tfparallel.callbacks.BackupAndRestore(folder, save_freq=_SAVE_FREQ)


def _ending(model: keras.Model, kill: _KillAt) -> Passed:
    """How far the weights are from one device's, and how many batches this attempt trained."""
    plain = _model()
    _fit(plain, [])
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    most = max(float(np.max(np.abs(own - other))) for own, other in pairs)
    return Passed("trained", {"difference": most, "batches": kill.num_batches})


def _device_of(model: keras.Model) -> str:
    """Where the first weight is: "GPU:0 GPU-3f...", "CPU:0"."""
    spec = tf.DeviceSpec.from_string(model.weights[0].value.device)
    own = f"{spec.device_type}:{spec.device_index}"
    return f"{own} {identity_of_gpu()}" if spec.device_type == "GPU" else own


def _number_of_worker() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
