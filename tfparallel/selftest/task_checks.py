"""What one process of a job does in checks of jobs."""

from collections.abc import Callable

import keras
import numpy as np

import tfparallel
from tfparallel.selftest.job_checks import digest_of_bytes
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, compiled_model, data_of
from tfparallel.selftest.verdicts import CheckFailedError, Passed


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
    model = "mlp" if bench.gpus else "mlp_layer"
    digests: dict[str, object] = {}
    for name, make in _compressors().items():
        strategy = tfparallel.MultiWorkerMirroredStrategy(compression=make())
        weights = _fitted_weights(strategy, Trial(model, "uneven"))
        if not all(np.isfinite(each).all() for each in weights):
            raise CheckFailedError(f"{name}: weights are not finite")
        digests[name] = digest_of_bytes([each.tobytes() for each in weights])
    return Passed("trained", digests)


def _fitted_weights(
    strategy: tfparallel.MultiWorkerMirroredStrategy, trial: Trial
) -> list[np.ndarray]:
    """After `fit` alone: nothing else compresses."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = compiled_model(trial)
    x, y, batch = data_of(trial)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()
