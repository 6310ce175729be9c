"""The variables of a compiled model: weights, seeds, optimizer, metrics.

State that is equal on all replicas is kept once. A metric's variable is a sum whose terms differ by
replica, and every term is kept: floating-point sums depend on where a batch's value was added.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks.backup.plain_variables import plain_variables
from tfparallel.callbacks.backup.saved_shards import shapes_of
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.internals import SyncOnReadVariable
from tfparallel.internals.keras_layers import behind
from tfparallel.replicas.local_copies import copies_of
from tfparallel.replicas.model_optimizers import optimizers_of


def mirrored_state(model: keras.Model) -> dict[str, Any]:
    """The variables that are equal on all replicas of all workers.

    Of those that workers hold in shards, how they are cut: what is in them is `shards_here`.
    """
    variables = _mirrored_variables(model)
    cut = {
        str(k): {
            "shape": list(v.shape),
            "dtype": keras.backend.standardize_dtype(v.dtype),
            "bounds": list(_bounds(v)),
        }
        for k, v in enumerate(variables)
        if _bounds(v)
    }
    arrays = [None if _bounds(v) else _snapshot(copies_of(v)[0]) for v in variables]
    plain = plain_variables(model)
    of_attributes = {
        "paths": [*plain],
        "arrays": [_snapshot(copies_of(v)[0]) for v in plain.values()],
    }
    return {
        "paths": [v.path for v in variables],
        "arrays": arrays,
        **({"cut": cut} if cut else {}),
        **({"plain": of_attributes} if plain else {}),
    }


def shards_here(model: keras.Model) -> dict[str, np.ndarray]:
    """This worker's numbers of each variable that workers hold in shards, by its position.

    Of several copies of them only the first is saved.
    """
    variables = enumerate(_mirrored_variables(model))
    cut = ((k, behind(v)) for k, v in variables if _bounds(v))
    return {str(k): np.asarray(v.numbers_here()) for k, v in cut if v.is_saved_here}


def ranges_here(model: keras.Model) -> Callable[[int, int], tuple[int, int]]:
    """What this worker restores of a flat variable of a backup, by its position and its size."""
    variables = _mirrored_variables(model)

    def range_of(position: int, size: int) -> tuple[int, int]:
        own = variables[position] if position < len(variables) else None  # or not built yet
        if own is None or not _bounds(own) or _bounds(own)[-1] != size:
            return 0, size
        return behind(own).range_here

    return range_of


def is_read_together(model: keras.Model) -> bool:
    """Whether reading the model's variables gathers parts: every worker has to, then."""
    variables = _mirrored_variables(model)
    return any(hasattr(behind(v), "parts") and not _bounds(v) for v in variables)


def count_mirrored(model: keras.Model) -> int:
    """How many variables `mirrored_state` has."""
    return len(_mirrored_variables(model))


def set_mirrored_state(
    model: keras.Model, state: dict[str, Any], shards: Mapping[int, np.ndarray]
) -> None:
    """Sets what `mirrored_state` returned.

    Args:
        shards: of what is cut in it, the numbers of `ranges_here`, by position.

    Raises:
        BackupError: if it is the state of another model.
    """
    variables, plain = _mirrored_variables(model), plain_variables(model)
    paths = [v.path for v in variables]
    _check_same_model(paths, variables, state)
    if "plain" in state:
        _check_same_model([*plain], [*plain.values()], state["plain"])
    elif plain:
        tf.get_logger().warning(
            "The backup was made before tf.Variables in attributes were saved. They keep the "
            "values that they have: %s.",
            ", ".join(plain),
        )
    for k, (variable, array) in enumerate(zip(variables, state["arrays"], strict=True)):
        if array is not None:
            variable.assign(array)
        elif _bounds(variable) and shards[k].size < _bounds(variable)[-1]:
            behind(variable).assign_here(shards[k])
        else:
            variable.assign(shards[k].reshape(variable.shape))
    for variable, array in zip(plain.values(), _plain_arrays(state), strict=False):
        variable.assign(array)


def replica_state(model: keras.Model) -> list[list[np.ndarray]]:
    """The terms of every variable that is a sum over replicas, for the replicas of this process."""
    return [[_snapshot(copy) for copy in copies_of(v)] for v in _summed_variables(model)]


def set_replica_state(model: keras.Model, state: list[list[np.ndarray]]) -> None:
    """Sets what `replica_state` returned, of as many replicas."""
    for variable, terms in zip(_summed_variables(model), state, strict=True):
        for copy, term in zip(copies_of(variable), terms, strict=True):
            copy.assign(term)


def num_terms(state: list[list[np.ndarray]]) -> int:
    """How many replicas of a process a `replica_state` has the terms of."""
    return len(state[0]) if state else 0


def with_one_term(
    states: Sequence[list[list[np.ndarray]]], num_replicas: int, has_sum: bool
) -> list[list[np.ndarray]]:
    """The same sums for other replicas than those that saved them: all in the first one's term.

    Args:
        states: the `replica_state` of each process whose terms are summed.
        num_replicas: how many this process has.
        has_sum: whether the sum is in this process; in others all terms are zero.
    """
    merged = []
    for terms_by_process in zip(*states, strict=True):
        terms = [term for terms in terms_by_process for term in terms]
        total = np.sum(terms, axis=0, dtype=terms[0].dtype)
        others = [np.zeros_like(total)] * num_replicas
        merged.append([total, *others[1:]] if has_sum else others)
    return merged


def _mirrored_variables(model: keras.Model) -> list[keras.Variable]:
    summed = {id(v) for v in _summed_variables(model)}
    of_optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    return [v for v in _unique([*model.variables, *of_optimizers]) if id(v) not in summed]


def _summed_variables(model: keras.Model) -> list[keras.Variable]:
    of_layers = [v for v in model.variables if isinstance(behind(v), SyncOnReadVariable)]
    return _unique([*model.metrics_variables, *of_layers])


def _unique(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())


def _bounds(variable: keras.Variable) -> Any:
    """How several workers hold a variable in shards; None if each has all of it."""
    return getattr(behind(variable), "worker_bounds", None)


def _snapshot(variable: keras.Variable | tf.Variable) -> np.ndarray:
    """The value of a variable as it is now, read-only.

    On the host nothing is copied here: an update of a variable whose value somebody holds writes
    to memory of its own (`PrepareToUpdateVariable` in TensorFlow's kernels, and XLA likewise).
    """
    return np.asarray(tf.convert_to_tensor(variable))


def _plain_arrays(state: dict[str, Any]) -> Sequence[np.ndarray]:
    return state["plain"]["arrays"] if "plain" in state else ()


def _check_same_model(
    paths: Sequence[str], variables: Sequence[keras.Variable], state: dict[str, Any]
) -> None:
    """Compares shapes, dtypes and last names: what comes before depends on who built the model."""
    mine = [
        _describe(path, v.shape, keras.backend.standardize_dtype(v.dtype))
        for path, v in zip(paths, variables, strict=True)
    ]
    theirs = [
        _describe(path, *described)
        for path, described in zip(state["paths"], shapes_of(state), strict=True)
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
