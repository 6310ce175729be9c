"""Every strategy trains to one device's weights, evaluates and predicts as it does."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.selftest.contenders import (
    IN_ONE_PROCESS,
    IN_SEVERAL_PROCESSES,
    XLA,
    may_refuse,
    references,
    repeated_of,
    trials_of,
)
from tfparallel.selftest.machine_devices import Bench, open_devices
from tfparallel.selftest.trials import (
    Trial,
    TrialEnding,
    difference,
    most_difference,
    reference_of,
    train,
)
from tfparallel.selftest.verdicts import CheckFailedError, Passed


def train_reference(bench: Bench) -> Passed:
    """What plain Keras trains on one device, kept for the checks after it; twice the same bits."""
    open_devices()
    trials = references(on_gpus=bool(bench.gpus))
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


def train_with_xla(bench: Bench) -> Passed:
    """`jit_compile=True` trains to one device's weights, or is refused as pages say."""
    open_devices(is_deterministic=False)
    endings = {
        name: _ending(name, XLA, make(bench.devices)) for name, make in IN_ONE_PROCESS.items()
    }
    return judge_xla(endings, _read(bench, reference_of(XLA)))


def judge_xla(endings: Mapping[str, TrialEnding | None], reference: TrialEnding) -> Passed:
    """Holds what strategies trained with XLA against one device; None of those that refuse.

    Raises:
        CheckFailedError: naming those that end elsewhere.
    """
    apart = {n: difference(XLA, end, reference) for n, end in endings.items() if end is not None}
    wrong = [f"{name} by {d:.1e}" for name, d in apart.items() if not d <= most_difference(XLA)]
    if wrong:
        raise CheckFailedError(f"differs from one device: {', '.join(wrong)}")
    trained = ", ".join(f"{name} {d:.1e}" for name, d in apart.items())
    refused = ", ".join(name for name, ending in endings.items() if ending is None)
    return Passed(f"from one device: {trained}; refused: {refused}", dict(apart))


def compare(name: str, make: Callable[[], tf.distribute.Strategy], bench: Bench) -> Passed:
    """Asks a strategy all that it is asked here, and some of it twice.

    Raises:
        CheckFailedError: naming every training that ends elsewhere than one device's, or whose bits
            are others when it is repeated.
    """
    on_gpus = bool(bench.gpus)
    endings: dict[Trial, TrialEnding] = {}
    refused = []
    for trial in trials_of(name, on_gpus):
        ending = _ending(name, trial, make())
        if ending is None:
            refused.append(trial.option)
        else:
            endings[trial] = ending
    apart = {t: difference(t, end, _read(bench, reference_of(t))) for t, end in endings.items()}
    wrong = [f"{t} by {d:.1e}" for t, d in apart.items() if not d <= most_difference(t)]
    if wrong:
        raise CheckFailedError(f"differs from one device: {', '.join(wrong)}")
    repeated = repeated_of(name, on_gpus)
    others = [t for t in repeated if difference(t, train(t, make()), endings[t]) != 0]
    if others:
        raise CheckFailedError(f"other bits in the second of two: {', '.join(map(str, others))}")
    figures: dict[str, object] = {str(trial): value for trial, value in apart.items()}
    text = f"trainings: {len(apart)}, at most {_largest(apart):.1e} from one device"
    text += f"; {len(repeated)} repeated to the bit" if repeated else ""
    return Passed(text + (f"; refuses {', '.join(refused)}" if refused else ""), figures)


def _ending(name: str, trial: Trial, strategy: tf.distribute.Strategy) -> TrialEnding | None:
    """What a training ends with; None if the strategy refuses it, as its page says.

    Raises:
        CheckFailedError: for one that was to be compiled with XLA, and that Keras did not compile.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*Proceeding with `jit_compile=False`")
            return train(trial, strategy)
    except UserWarning as warning:
        raise CheckFailedError(str(warning)) from warning
    except ValueError as error:
        if may_refuse(name, trial.option) and f"{trial.option}=True" in str(error):
            return None
        raise


def _largest(apart: dict[Trial, float]) -> float:
    return max(value for trial, value in apart.items() if trial.dtype == "float32")


def _write(bench: Bench, trial: Trial, ending: TrialEnding) -> None:
    arrays: dict[str, Any] = {f"weight_{i:03}": value for i, value in enumerate(ending.weights)}
    arrays |= {"evaluation": ending.evaluation, "predictions": ending.predictions}
    np.savez(bench.path / f"{trial}.npz", **arrays)


def _read(bench: Bench, trial: Trial) -> TrialEnding:
    with np.load(bench.path / f"{trial}.npz") as file:
        weights = [file[name] for name in sorted(file.files) if name.startswith("weight_")]
        return TrialEnding(weights, file["evaluation"], file["predictions"])
