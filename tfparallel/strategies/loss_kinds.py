"""What a replica's loss, of its own rows, is to the loss of the whole batch.

kind       of the whole batch                              examples
--------   ---------------------------------------------   -------------------------------------
rows       reduced from values, each of its row alone      all of Keras but those of the last line
masked     likewise, of values that are not masked by      `ignore_class`
           the loss itself
mean       the mean of the replicas', weighted by rows     a function that returns `ops.mean(...)`
sum        the sum of the replicas'                        ... `ops.sum(...)`
coupled    to be computed from all rows                    Dice, Tversky, Circle, CLIP, sum/sum(mask)

A loss says so itself, is known, or is tried (`row_trial.py`).
"""

import copy
import functools
import weakref
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfparallel.strategies.row_trial import (
    GathersRowsError,
    Outcome,
    UntriableError,
    kinds_of,
    trial,
)
from tfparallel.tf_internals import get_keras_mask

Loss = TypeVar("Loss")

_ATTRIBUTE = "_tfparallel_kind"
_known: Any = weakref.WeakKeyDictionary()  # kinds by loss, and by what it is given

# Functions of Keras that give a value for each row, of its row alone, where predictions have more
# axes than that of rows.
_OF_ROWS = {
    function
    for name, function in vars(keras.losses).items()
    if callable(function) and not isinstance(function, type) and name == function.__name__
} - {keras.losses.dice, keras.losses.tversky, keras.losses.circle}


def coupled_loss(loss: Loss) -> Loss:
    """Declares that a loss is a function of all rows of a batch: replicas gather them for it.

    Args:
        loss: what `compile(loss=...)` takes: a function, a `keras.Loss` or a class of it. Can be
            used as a decorator.

    Returns:
        `loss`; a bound method, which cannot be marked, as a function.
    """
    return _declared(loss, "coupled")


def mean_loss(loss: Loss) -> Loss:
    """Declares that what replicas compute of their own rows is to be averaged, weighted by rows.

    So it is for every loss of which that makes the loss of the whole batch, and needs no word. Of a
    loss that couples rows it makes another one, of parts of the batch, which takes no gathering.

    Args:
        loss: as `coupled_loss` takes; or a layer that calls `add_loss`.

    Returns:
        as `coupled_loss`.
    """
    return _declared(loss, "mean")


def sum_loss(loss: Loss) -> Loss:
    """Declares that what replicas compute of their own rows adds up to the loss of the batch.

    Args:
        loss: as `mean_loss` takes.

    Returns:
        as `coupled_loss`.
    """
    return _declared(loss, "sum")


def _declared(loss: Any, kind: str) -> Any:
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
        return _declared(functools.wraps(loss)(functools.partial(loss)), kind)  # a copy of ours
    if not callable(loss):
        raise TypeError(
            f"Expected a loss function, a keras.Loss, a class of it or a layer. Received: {loss!r}."
        )
    try:
        setattr(loss, _ATTRIBUTE, kind)
    except AttributeError:  # a bound method

        @functools.wraps(loss)
        def function(*args: Any, **kwargs: Any) -> Any:
            return loss(*args, **kwargs)

        return _declared(function, kind)
    return loss


def declared_kind(loss: Any) -> str | None:
    """The kind that a loss, or the function that it wraps, has been declared; else None."""
    kind = getattr(loss, _ATTRIBUTE, None)
    return kind if kind is not None else getattr(getattr(loss, "fn", None), _ATTRIBUTE, None)


def kind_of_loss(loss: keras.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> str:
    """The kind of a loss of a compiled model, given these tensors or nests of them.

    Raises:
        TypeError: for ragged or sparse tensors, which are not tried, and a loss that is not known.
    """
    kind = declared_kind(loss)
    if kind is not None:
        return kind
    if _is_of_rows(loss, y_pred):
        return "rows"
    specs = keras.tree.map_structure(_spec, (y_true, y_pred, sample_weight))
    masked = get_keras_mask(y_pred) is not None if tf.is_tensor(y_pred) else False
    kinds = _known.setdefault(loss, {})
    key = (str(specs), masked, loss.reduction)
    if key not in kinds:
        kinds[key] = _tried(loss, specs, masked)
    return kinds[key]


def _is_of_rows(loss: Any, y_pred: Any) -> bool:
    function, options = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
    return (
        type(loss).call is keras.losses.MeanSquaredError.call
        and type(loss).__call__ is keras.Loss.__call__
        and function in _OF_ROWS
        and options.get("axis", -1) == -1
        and options.get("ignore_class") is None
        and all((leaf.shape.rank or 0) > 1 for leaf in keras.tree.flatten(y_pred))
    )


def _spec(tensor: Any) -> tf.TensorSpec | None:
    """What is the same on all workers, however many rows they have."""
    if tensor is None:
        return None
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        raise TypeError(f"Expected a dense tensor with rows. Received: {tensor!r}.")
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def number_and_values(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple:
    """What `loss` gives, and the values, perhaps with a Keras mask, that it reduces to that."""
    values: list = []
    noting = copy.copy(loss)  # not `loss` itself, which another replica's thread may be calling

    def call(*args: Any, **kwargs: Any) -> Any:
        values.append(loss.call(*args, **kwargs))
        return values[-1]

    noting.call = call
    number = noting(y_true, y_pred, sample_weight)
    return number, values[-1] if values else number


def _tried(loss: keras.Loss, specs: Any, masked: bool) -> str:
    masks = []

    def outcome(y_true: Any, y_pred: Any, sample_weight: Any) -> Outcome:
        number, values = number_and_values(loss, y_true, y_pred, sample_weight)
        masks.append(get_keras_mask(values))
        return Outcome(values, number)

    try:
        with trial():
            kinds = kinds_of(outcome, *specs)
    except GathersRowsError:
        return "rows"
    except UntriableError as error:
        tf.get_logger().warning(
            "Loss '%s' cannot be tried on random rows (%r). It is computed on the rows of all "
            "replicas, which is right for any loss. Where that is not needed, declare it: "
            "tfparallel.mean_loss or tfparallel.sum_loss.",
            loss.name,
            error.__cause__,
        )
        return "coupled"
    if "rows" in kinds:
        return "rows" if all(mask is None for mask in masks) else "masked"
    # Keras takes a number of the batch times the mean of a mask.
    return next((kind for kind in ("mean", "sum") if kind in kinds and not masked), "coupled")
