"""How a number comes of a batch's rows: tried on random rows, all at once and in two parts.

    all rows at once             f(rows 0..5)
    in parts                     f(rows 0..1), f(rows 2..5)
    of models also in            f(rows 0..2), f(rows 3..5)

Whether a part is enough to know its own rows is a property of the program, so any rows will do that
it can compute: no batch is read for it, and all workers come to the same answer.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

NUM_ROWS = 6
_PARTS = slice(0, 2), slice(2, 6)  # of different sizes; even, as some programs halve a batch
_ODD_PARTS = slice(0, 3), slice(3, 6)  # of which the halves are not the whole
_UNKNOWN_DIM = 3
# What rounding may do, and of dtypes of few digits so many of their last; parts of coupled rows are
# far apart.
_RELATIVE, _OF_LARGEST, _OF_FEW_DIGITS = 1e-4, 1e-5, 4
_OF_A_MODEL = 1e-3  # relative, of what comes out of many layers
_OF_DIFFERENCES = 1e-2  # of that, as it may be all that is left of numbers of about 1


@dataclass(frozen=True)
class Draw:
    """How rows are drawn for one trial.

    Attributes:
        labels: what integers are drawn from, and floats of targets if `are_labels`.
        are_labels: whether floats among targets are labels, too.
        spread: of predictions, drawn from a normal distribution; None draws them from (0, 1).
    """

    labels: tuple[int, ...]
    are_labels: bool
    spread: float | None


_LARGE = 20.0
# Classes and probabilities, regressions; and labels by which programs leave positions out.
_DRAWS = (
    Draw((0, 1), True, None),
    Draw((0, 1), False, 1.0),
    Draw((0, 1), True, _LARGE),
    Draw((0, 1, -1), True, None),
    Draw((0, 1, -100), True, 1.0),
    Draw((0, 1, 255), True, 1.0),
)
_WITHOUT_LABELS = 3  # draws that differ where there are none


@dataclass(frozen=True)
class TrialOutcome:
    """What a function gave for some rows.

    Attributes:
        values: one for each row, or one for all.
        number: what `values` are reduced to; NaN where only they matter.
        is_masked: whether the function has masked some of the values.
        sizes: of what each of `number` is a sum of, if they are to be compared one by one.
    """

    values: Any
    number: Any
    is_masked: bool = False
    sizes: np.ndarray | None = None


@dataclass(frozen=True)
class Found:
    """What the trials of a function agree on.

    Attributes:
        kinds: out of "rows" (values of a part are those of its rows), "mean" (the mean of parts
            weighted by rows is the number of all) and "sum". None: the rows are coupled.
        is_masked: as of `TrialOutcome`, in any trial.
    """

    kinds: frozenset[str]
    is_masked: bool = False

    def __and__(self, other: "Found") -> "Found":
        return Found(self.kinds & other.kinds, self.is_masked or other.is_masked)


class UntriableError(Exception):
    """The function cannot be computed on any of the random rows."""


class GathersRowsError(Exception):
    """The function that is tried gathers rows by itself."""


class TakesTensorsError(Exception):
    """The function takes tensors of the step beside its arguments: they are of its own rows."""


T = TypeVar("T")
_Parts = tuple[slice, slice]

_thread = threading.local()


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Within it, a function is tried while a step is traced; Keras's variables stay as they are."""
    _thread.is_trial = True
    scope = keras.StatelessScope(collect_losses=True)
    try:
        # On this process's CPU, even if the step is for another's device.
        with tf.init_scope(), tf.device(None), tf.device("CPU:0"), scope:
            yield
    finally:
        _thread.is_trial = False


def is_trial() -> bool:
    """Whether the calling thread tries a function."""
    return getattr(_thread, "is_trial", False)


def check_is_no_trial() -> None:
    """Ends the trial of a function that gathers rows by itself."""
    if is_trial():
        raise GathersRowsError


def found_for(
    function: Callable,
    targets: object,
    predictions: object,
    weights: object,
    computed_in: str | None = None,
    has_model: bool = False,
    at_most: int | None = None,
) -> Found:
    """Tries a function of the rows of a batch.

    Args:
        function: of targets, predictions and weights, to an `TrialOutcome`.
        targets, predictions, weights: nests of specs `[rows, ...]` of dense tensors, or None.
        computed_in: the dtype of what the function computes, if not that of its outcomes.
        has_model: whether the function is a model and its loss, whose rounding adds up.
        at_most: how many draws that suit the function are enough; None: as many as there are.

    Raises:
        UntriableError: from the last error, or as no trial gave a finite value.
        GathersRowsError: from the function.
        TakesTensorsError: from its first use of a tensor that is no argument of it.
    """
    found: Found | None = None
    outcomes = _outcomes(function, targets, predictions, weights, has_model)
    tells = (outcome for outcome in outcomes if np.all(np.isfinite(_numbers(outcome[0].values))))
    for whole, first, second, parts in itertools.islice(tells, at_most):
        least = _rounding(whole.values, whole.number, computed_in)
        least = max(least, _OF_A_MODEL if has_model else 0.0)
        own = _compared(whole, first, second, parts, least)
        found = own if found is None else found & own
    if found is None:
        raise UntriableError from ArithmeticError("what it gives for them is not finite")
    return found


def adds_up(
    update: Callable,
    targets: object,
    predictions: object,
    weights: object,
    computed_in: str | None = None,
) -> bool:
    """Tries whether a state may be updated in parts of a batch's rows, each from another state.

    Args:
        update: of targets, predictions and weights, to a list of arrays before two updates with
            them, such a list after the first, and one after the second.
        targets, predictions, weights, computed_in: as `found_for` takes them.

    Raises:
        UntriableError, GathersRowsError, TakesTensorsError: as `found_for`.
    """
    told = [
        _add_up(whole, first, second, computed_in)
        for whole, first, second, _ in _outcomes(update, targets, predictions, weights)
        if not any(np.isnan(value).any() for value in whole[1])
    ]
    return bool(told) and all(told)


def _outcomes(
    function: Callable[..., T],
    targets: object,
    predictions: object,
    weights: object,
    has_model: bool = False,
) -> Iterator[tuple[T, T, T, _Parts]]:
    """What `function` gives for all rows, and for each of two parts; for each draw that it takes.

    Raises:
        UntriableError, GathersRowsError, TakesTensorsError: as `found_for`.
    """
    error: Exception | None = None
    is_tried = False
    has_labels = _have_labels(targets, [predictions, weights])
    for seed, draw in enumerate(_DRAWS if has_labels else _DRAWS[:_WITHOUT_LABELS]):
        if has_model and draw.spread == _LARGE:
            continue  # what layers make of them is large enough to be rounded
        rng = np.random.default_rng(seed)
        rows = [
            _drawn(targets, draw, rng, is_target=True),
            _drawn(predictions, draw, rng, is_target=False),
            _drawn(weights, Draw((0, 1), False, None), rng, is_target=False),
        ]
        for parts in (_ODD_PARTS, _PARTS) if has_model and seed % 2 else (_PARTS,):
            try:
                whole, first, second = [
                    function(*_part(rows, part)) for part in (slice(None), *parts)
                ]
            except GathersRowsError:
                raise
            except Exception as raised:  # these rows do not suit the program
                if "out of scope" in str(raised):  # TensorFlow's errors of it are of several types
                    raise TakesTensorsError from raised
                error = raised
                continue
            is_tried = True
            yield whole, first, second, parts
            break
    if not is_tried:
        raise UntriableError from error


def _have_labels(targets: object, others: object) -> bool:
    """Whether anything is drawn from a draw's labels."""
    specs = [each for each in keras.tree.flatten([targets, others]) if each is not None]
    has_targets = any(each is not None for each in keras.tree.flatten(targets))
    return has_targets or not all(tf.as_dtype(each.dtype).is_floating for each in specs)


def _add_up(whole: tuple, first: tuple, second: tuple, computed_in: str | None) -> bool:
    """Whether what parts add to a state is what all rows add, whatever the state before."""
    rounding = _rounding(0.0, 0.0, computed_in)
    added = []
    for before, after, behind in (whole, first, second):
        own = [b - a for a, b in zip(before, after, strict=True)]
        again = [b - a for a, b in zip(after, behind, strict=True)]
        if not all(_equal(a, b, rounding) for a, b in zip(own, again, strict=True)):
            return False
        added.append(own)
    return all(_equal(a, b + c, rounding) for a, b, c in zip(*added, strict=True))


def _compared(
    whole: TrialOutcome,
    first: TrialOutcome,
    second: TrialOutcome,
    parts: _Parts,
    rounding: float,
) -> Found:
    values, number = _numbers(whole.values), _numbers(whole.number)
    kinds = []
    in_parts = _joined([_numbers(part.values) for part in (first, second)])
    if values.shape[:1] == (NUM_ROWS,) and _equal(values, in_parts, rounding):
        kinds.append("rows")
    a, b = _numbers(first.number), _numbers(second.number)
    if whole.sizes is not None:
        number, a, b = (each / whole.sizes for each in (number, a, b))
    if a.shape == b.shape == number.shape:
        shares = [(part.stop - part.start) / NUM_ROWS for part in parts]
        kinds += ["mean"] if _equal(number, a * shares[0] + b * shares[1], rounding) else []
        kinds += ["sum"] if _equal(number, a + b, rounding) else []
    return Found(frozenset(kinds), whole.is_masked)


def _numbers(value: tf.Tensor) -> np.ndarray:
    """In float64: numpy has no bfloat16, and sums of what is tried shall not be rounded."""
    is_floating = tf.is_tensor(value) and value.dtype.is_floating
    return np.asarray(tf.cast(value, tf.float64) if is_floating else value)


def _rounding(values: object, number: object, computed_in: str | None) -> float:
    """The relative error of a dtype of few digits among those of an outcome; else 0."""
    of_outcome = [getattr(each, "dtype", "float32") for each in (values, number)]
    dtypes = {tf.as_dtype(each) for each in (*of_outcome, computed_in or "float32")}
    digits = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}
    return _OF_FEW_DIGITS * max(digits.get(dtype, 0.0) for dtype in dtypes)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray | None:
    fit = all(part.ndim for part in parts) and len({part.shape[1:] for part in parts}) == 1
    return np.concatenate(parts) if fit else None


def _equal(whole: np.ndarray, parts: np.ndarray | None, rounding: float) -> bool:
    if parts is None or whole.shape != parts.shape or not np.all(np.isfinite(whole)):
        return False
    whole, parts = whole.astype("float64"), parts.astype("float64")
    of_largest = max(_OF_LARGEST, rounding) * np.max(np.abs(whole), initial=0)
    absolute = of_largest + rounding * _OF_DIFFERENCES
    return np.allclose(whole, parts, max(_RELATIVE, rounding), absolute)


def _part(rows: list, part: slice) -> list:
    return keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else tf.constant(leaf[part]), rows
    )


def _drawn(specs: object, draw: Draw, rng: np.random.Generator, is_target: bool) -> object:
    return keras.tree.map_structure(
        lambda spec: None if spec is None else _drawn_leaf(spec, draw, rng, is_target), specs
    )


def _drawn_leaf(
    spec: tf.TensorSpec, draw: Draw, rng: np.random.Generator, is_target: bool
) -> np.ndarray:
    """Rows that differ in size as a whole, so that means of many positions differ too."""
    dims = [_UNKNOWN_DIM if dim is None else dim for dim in spec.shape[1:]]
    shape, of_rows = (NUM_ROWS, *dims), (NUM_ROWS, *[1 for _ in dims])
    dtype = tf.as_dtype(spec.dtype)
    size = rng.uniform(0.2, 1, of_rows)
    if dtype == tf.bool:
        return rng.uniform(size=shape) < size
    if not dtype.is_floating or (is_target and draw.are_labels):
        is_first = rng.uniform(size=shape) < size / 2
        chosen = np.where(is_first, draw.labels[0], rng.choice(draw.labels[1:], shape))
        return chosen.astype(dtype.as_numpy_dtype)
    if draw.spread is None:
        return (rng.uniform(size=shape) * size).astype(dtype.as_numpy_dtype)
    return (rng.normal(size=shape) * size * draw.spread).astype(dtype.as_numpy_dtype)
