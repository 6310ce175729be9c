"""The variables of a compiled model: weights, seeds, optimizer, metrics.

State that is equal on all replicas is kept once. A metric's variable is a sum whose terms differ by
replica, and every term is kept: floating-point sums depend on where a batch's value was added.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.internals import SyncOnReadVariable
from tfparallel.replicas.model_optimizers import optimizers_of


def mirrored_state(model: keras.Model) -> dict[str, Any]:
    """The variables that are equal on all replicas of all workers."""
    variables = _mirrored_variables(model)
    return {
        "paths": [v.path for v in variables],
        "arrays": [_snapshot(_copies(v)[0]) for v in variables],
    }


def count_mirrored(model: keras.Model) -> int:
    """How many variables `mirrored_state` has."""
    return len(_mirrored_variables(model))


def set_mirrored_state(model: keras.Model, state: dict[str, Any]) -> None:
    """Sets what `mirrored_state` returned.

    Raises:
        BackupError: if it is the state of another model.
    """
    variables = _mirrored_variables(model)
    _check_same_model(variables, state)
    for variable, array in zip(variables, state["arrays"], strict=True):
        variable.assign(array)


def replica_state(model: keras.Model) -> list[list[np.ndarray]]:
    """The terms of every variable that is a sum over replicas, for the replicas of this process."""
    return [[_snapshot(copy) for copy in _copies(v)] for v in _summed_variables(model)]


def set_replica_state(model: keras.Model, state: list[list[np.ndarray]]) -> None:
    """Sets what `replica_state` returned, of as many replicas."""
    for variable, terms in zip(_summed_variables(model), state, strict=True):
        for copy, term in zip(_copies(variable), terms, strict=True):
            copy.assign(term)


def num_replicas_of(state: list[list[np.ndarray]]) -> int:
    """How many replicas of a process a `replica_state` has the terms of."""
    return len(state[0]) if state else 0


def with_one_term(
    states: Sequence[list[list[np.ndarray]]], num_replicas: int, is_first: bool
) -> list[list[np.ndarray]]:
    """The same sums for other replicas than those that saved them: all in the first one's term.

    Args:
        states: the `replica_state` of every process that saved.
        num_replicas: how many this process has.
        is_first: whether this process has the first replica.
    """
    merged = []
    for terms_by_process in zip(*states, strict=True):
        terms = [term for terms in terms_by_process for term in terms]
        total = np.sum(terms, axis=0, dtype=terms[0].dtype)
        others = [np.zeros_like(total)] * num_replicas
        merged.append([total, *others[1:]] if is_first else others)
    return merged


def compression_state(model: keras.Model) -> dict[str, np.ndarray]:
    """What this worker's gradient compression remembers; empty where nothing is compressed."""
    return {
        prefix + name: array
        for prefix, compression in _compressions_of(model).items()
        for name, array in compression.state().items()
    }


def set_compression_state(
    model: keras.Model, states: Sequence[dict[str, np.ndarray]], num_workers: int
) -> None:
    """Sets what `compression_state` returned: on this worker, or, if they were others, on all.

    Raises:
        BackupError: if gradients were compressed otherwise.
    """
    if not any(states):
        return  # to begin, or to end, compressing is a change of the script that loses nothing else
    for prefix, compression in _compressions_of(model).items():
        try:
            compression.set_state([_of_prefix(prefix, state) for state in states], num_workers)
        except (KeyError, ValueError) as error:
            raise BackupError(
                "A backup restores a training whose gradients are compressed as they were. "
                f"Received: {compression.compressor!r}, and a backup of another compressor "
                f"({error}). Use another backup_dir, or the compression of the backup."
            ) from error


def _compressions_of(model: keras.Model) -> dict[str, Any]:
    """What compresses the gradients of each optimizer, by how its arrays' names begin."""
    extended = getattr(model.distribute_strategy, "extended", None)
    compression_of = getattr(extended, "compression_of", lambda optimizer: None)
    numbered = [(i, each) for i, each in enumerate(optimizers_of(model)) if each.built]
    found = {f"optimizer_{i}/" if i else "": compression_of(each) for i, each in numbered}
    return {prefix: each for prefix, each in found.items() if each is not None}


def _of_prefix(prefix: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not prefix:
        return {name: array for name, array in state.items() if not name.startswith("optimizer_")}
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state[name] for name in names}


def _mirrored_variables(model: keras.Model) -> list[keras.Variable]:
    summed = {id(v) for v in _summed_variables(model)}
    of_optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    return [v for v in _unique([*model.variables, *of_optimizers]) if id(v) not in summed]


def _summed_variables(model: keras.Model) -> list[keras.Variable]:
    of_layers = [v for v in model.variables if isinstance(v._value, SyncOnReadVariable)]
    return _unique([*model.metrics_variables, *of_layers])


def _unique(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())


def _copies(variable: keras.Variable) -> Sequence[Any]:
    if hasattr(variable._value, "parts"):  # one variable, on several parameter servers
        return (variable._value,)
    return getattr(variable._value, "values", (variable._value,))


def _snapshot(variable: Any) -> np.ndarray:
    """The value of a variable as it is now, read-only.

    On the host nothing is copied here: an update of a variable whose value somebody holds writes
    to memory of its own (`PrepareToUpdateVariable` in TensorFlow's kernels, and XLA likewise).
    """
    return np.asarray(tf.convert_to_tensor(variable))


def _check_same_model(variables: Sequence[keras.Variable], state: dict[str, Any]) -> None:
    """Compares shapes, dtypes and last names: what comes before depends on who built the model."""
    mine = [_describe(v.path, v.shape, keras.backend.standardize_dtype(v.dtype)) for v in variables]
    theirs = [
        _describe(path, array.shape, array.dtype.name)
        for path, array in zip(state["paths"], state["arrays"], strict=True)
    ]
    if mine == theirs:
        return
    pairs = zip([*mine, "nothing"], [*theirs, "nothing"], strict=False)
    expected, received = next((a, b) for a, b in pairs if a != b)
    raise BackupError(
        "A backup restores the model it was made of, compiled as it was. Received: a model with "
        f"{len(mine)} variables and a backup with {len(theirs)}; the first that differs is "
        f"{expected} in the model and {received} in the backup. Train with the model of the "
        "backup, or use another backup_dir for this one."
    )


def _describe(path: str, shape: Sequence[int], dtype: str) -> str:
    name = re.sub(r"_[0-9]+(?=_|$)", "", path.rpartition("/")[2])  # Keras numbers equal names
    return f"{name} {dtype}{list(shape)}"
