"""A TPU trains as the processor of its host does, whose float32 has more bits."""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, compiled_model, data_of, reference_of, train
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed

_TRIALS = (
    Trial("mlp", "static"),
    Trial("cnn", "static"),  # with BatchNorm
    Trial("gpt", "static"),  # with an Embedding
    Trial("cnn", "uneven"),  # a last batch that is filled up
    Trial("mlp", "many", option="steps_per_execution"),
)
_MOST_DIFFERENCE = 1e-2  # of losses and predictions: a TPU multiplies bfloat16


def train_on_tpu(bench: Bench) -> Passed:
    """Losses and predictions are the host's, and weights are read from the TPU's files."""
    open_devices()
    try:
        strategy = tfparallel.TPUStrategy()
    except RuntimeError as error:
        raise CheckSkippedError(str(error).partition("\n")[0]) from error
    apart = {str(trial): _difference(trial, strategy) for trial in _TRIALS}
    passed = judge_tpu(apart)
    _check_file(str(bench.path / "of_tpu.weights.h5"), strategy)
    text = f"{strategy.num_replicas_in_sync} cores; {passed.text}; its weights load on the host"
    return Passed(text, passed.figures)


def judge_tpu(apart: dict[str, float]) -> Passed:
    """Holds losses and predictions of trainings against the host's.

    Raises:
        CheckFailedError: naming every training that ends elsewhere.
    """
    wrong = [
        f"{name} by {each:.1e}" for name, each in apart.items() if not each <= _MOST_DIFFERENCE
    ]
    if wrong:
        raise CheckFailedError(f"differs from the host: {', '.join(wrong)}")
    text = f"trainings: {len(apart)}; at most {max(apart.values()):.1e} from the host"
    return Passed(text, dict(apart))


def _difference(trial: Trial, strategy: tf.distribute.Strategy) -> float:
    """The larger one of the loss and of predictions."""
    own = train(trial, strategy)
    with tf.device("CPU:0"):
        plain = train(reference_of(trial))
    losses = abs(own.evaluation[0] - plain.evaluation[0])
    return float(np.max([losses, np.max(np.abs(own.predictions - plain.predictions))]))


def _check_file(path: str, strategy: tf.distribute.Strategy) -> None:
    """Weights that were trained on the TPU are the same ones in a model on the host."""
    keras.backend.clear_session()
    trial = _TRIALS[1]
    with strategy.scope():
        model = compiled_model(trial)
    x, y, batch = data_of(trial)
    model.fit(x, y, batch_size=batch, verbose=0)
    model.save_weights(path)
    with tf.device("CPU:0"):
        plain = compiled_model(trial)
        plain.load_weights(path)
    check_same_weights(model.get_weights(), plain.get_weights())


def check_same_weights(of_tpu: Iterable[np.ndarray], of_host: Iterable[np.ndarray]) -> None:
    """Holds weights against those that a file has brought to the host.

    Raises:
        CheckFailedError: if one differs.
    """
    for number, (own, other) in enumerate(zip(of_tpu, of_host, strict=True)):
        if not np.array_equal(own, other):
            raise CheckFailedError(f"weight {number} of the TPU is another one in its file")
