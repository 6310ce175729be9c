"""Every strategy trains to one device's weights, evaluates and predicts as it does."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.selftest.contenders import (
    IN_ONE_PROCESS,
    IN_SEVERAL_PROCESSES,
    all_trials,
    trials_of,
)
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import Trial, TrialEnding, difference, most_difference, train
from tfparallel.selftest.verdicts import CheckFailedError, Passed


def train_reference(bench: Bench) -> Passed:
    """What plain Keras trains on one device, kept for the checks after it; twice the same bits."""
    open_devices()
    trials = [t for t in all_trials() if bench.gpus or t in _asked_without_gpus()]
    with tf.device(bench.devices[0]):
        for trial in trials:
            _write(bench, trial, train(trial))
        again = difference(trials[0], train(trials[0]), _read(bench, trials[0]))
    if again != 0:
        raise CheckFailedError(f"{trials[0]} trained twice on one device differs by {again:.1e}")
    return Passed(f"{len(trials)} trainings on {bench.devices[0]}, one repeated to the bit")


def train_in_one_process(bench: Bench, name: str) -> Passed:
    """A strategy over all devices of this process."""
    open_devices()
    return compare(name, lambda: IN_ONE_PROCESS[name](bench.devices), bench)


def train_as_task(bench: Bench, name: str) -> Passed:
    """A strategy of several processes, in one of them."""
    open_devices()
    strategy = IN_SEVERAL_PROCESSES[name]()
    return compare(name, lambda: strategy, bench)


def compare(name: str, make: Callable[[], tf.distribute.Strategy], bench: Bench) -> Passed:
    """Asks a strategy all that it is asked here.

    Raises:
        CheckFailedError: naming every training that ends elsewhere than one device's.
    """
    asked = trials_of(name, on_gpus=bool(bench.gpus))
    apart = {t: difference(t, train(t, make()), _read(bench, t)) for t in asked}
    wrong = [f"{t} by {d:.1e}" for t, d in apart.items() if not d <= most_difference(t)]
    if wrong:
        raise CheckFailedError(f"differs from one device: {', '.join(wrong)}")
    figures: dict[str, object] = {str(trial): value for trial, value in apart.items()}
    return Passed(
        f"trainings: {len(asked)}; at most {_largest(apart):.1e} from one device", figures
    )


def _largest(apart: dict[Trial, float]) -> float:
    return max(value for trial, value in apart.items() if trial.dtype == "float32")


def _asked_without_gpus() -> set[Trial]:
    names: Iterable[str] = (*IN_ONE_PROCESS, *IN_SEVERAL_PROCESSES)
    return {trial for name in names for trial in trials_of(name, on_gpus=False)}


def _write(bench: Bench, trial: Trial, ending: TrialEnding) -> None:
    arrays: dict[str, Any] = {f"weight_{i:03}": value for i, value in enumerate(ending.weights)}
    arrays |= {"evaluation": ending.evaluation, "predictions": ending.predictions}
    np.savez(bench.path / f"{trial}.npz", **arrays)


def _read(bench: Bench, trial: Trial) -> TrialEnding:
    with np.load(bench.path / f"{trial}.npz") as file:
        weights = [file[name] for name in sorted(file.files) if name.startswith("weight_")]
        return TrialEnding(weights, file["evaluation"], file["predictions"])
