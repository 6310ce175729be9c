"""What one process of a job does in checks of jobs."""

import os
import signal
from collections.abc import Callable

import keras
import numpy as np

import tfparallel
from tfparallel.selftest.job_checks import digest_of_bytes
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, compiled_model, data_of, train
from tfparallel.selftest.verdicts import CheckFailedError, Passed

_TRIAL = Trial("mlp", "uneven")


def _compressors() -> dict[str, Callable[[], tfparallel.compression.Compressor]]:
    from tfparallel import compression

    return {
        "cast": lambda: compression.Cast("bfloat16"),
        "top_k": lambda: compression.TopK(0.1),
        "random_k": lambda: compression.RandomK(0.1),
        "power_sgd": lambda: compression.PowerSGD(2),
        "sign_sgd": compression.SignSGD,
        "qsgd": compression.QSGD,
        "terngrad": compression.TernGrad,
    }


def train_compressed(bench: Bench) -> Passed:
    """The digest of the weights that each compressor ends with, in this worker."""
    open_devices()
    digests: dict[str, object] = {}
    for name, make in _compressors().items():
        strategy = tfparallel.MultiWorkerMirroredStrategy(compression=make())
        weights = train(_TRIAL, strategy).weights
        if not all(np.isfinite(each).all() for each in weights):
            raise CheckFailedError(f"{name}: weights are not finite")
        digests[name] = digest_of_bytes([each.tobytes() for each in weights])
    return Passed("trained", digests)


class _KillAt(keras.callbacks.Callback):
    """Ends this process at a batch, as nothing can catch."""

    def __init__(self, batch: int):
        super().__init__()
        self._left = batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_backups(bench: Bench, name: str, kill_at: str) -> Passed:
    """The digest of the weights after a training with backups, killed at a batch, or not at 0."""
    open_devices()
    keras.utils.set_random_seed(0)
    strategy = tfparallel.MirroredStrategy(bench.devices)
    with strategy.scope():
        model = compiled_model(_TRIAL)
    x, y, batch = data_of(_TRIAL)
    folder = str(bench.path / f"backups_{name}")
    callbacks = [tfparallel.callbacks.BackupAndRestore(folder, save_freq=2), _KillAt(int(kill_at))]
    model.fit(x, y, batch_size=batch, epochs=4, verbose=0, callbacks=callbacks)
    return Passed(digest_of_bytes([each.tobytes() for each in model.get_weights()]))
