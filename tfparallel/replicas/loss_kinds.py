"""What a replica's loss, of its own rows, is to the loss of the whole batch.

kind       of the whole batch                              examples
--------   ---------------------------------------------   -------------------------------------
rows       reduced from values, each of its row alone      most of Keras
masked     likewise, of values that are not masked by      `ignore_class`
           the loss itself
mean       the mean of the replicas', weighted by rows     a function that returns `ops.mean(...)`
sum        the sum of the replicas'                        ... `ops.sum(...)`
coupled    to be computed from all rows                    Dice, Circle, CLIP, sum/sum(mask);
                                                           what assigns variables of its own

A loss says so itself, is known, or is tried (`row_trial.py`).
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask
from tfparallel.internals.gradients_asked_for import has_own_gradients
from tfparallel.internals.keras_layers import function_of_metric, options_of_loss
from tfparallel.replicas.assigning_code import (
    class_mentions_assignment,
    function_mentions_assignment,
)
from tfparallel.replicas.row_trial import (
    NUM_ROWS,
    GathersRowsError,
    TakesTensorsError,
    TrialOutcome,
    UntriableError,
    found_for,
    trial,
)

Loss = TypeVar("Loss")

_ATTRIBUTE = "_tfparallel_kind"
_SCALES = 2.0**-20, 2.0**-10, 1.0, 2.0**10, 2.0**20  # of gradients; powers of two round nothing

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
        def function(*args: object, **kwargs: object) -> object:
            return loss(*args, **kwargs)

        return _declared(function, kind)
    return loss


def declared_kind(loss: object) -> str | None:
    """The kind that a loss, or the function that it wraps, has been declared; else None."""
    kind = getattr(loss, _ATTRIBUTE, None)
    return kind if kind is not None else getattr(getattr(loss, "fn", None), _ATTRIBUTE, None)


def declare_alike(loss: object, other: object) -> None:
    """Declares `other` what `loss` has been declared itself, if it has."""
    kind = getattr(loss, _ATTRIBUTE, None)
    if kind is not None:
        _declared(other, kind)


def kind_of_loss(
    loss: keras.Loss, y_true: object, y_pred: object, sample_weight: tf.Tensor | None
) -> str:
    """The kind of a loss of a compiled model, given these tensors or nests of them."""
    if (kind := declared_kind(loss)) is not None:
        return kind
    if _is_of_rows(loss, y_pred):
        return "rows"
    if keeps_state(loss):
        return "coupled"  # all replicas assign alike what comes of the rows of all

    slopes_of = functools.cache(lambda: _slopes_of(loss))  # made only where the loss is tried

    def outcome(*arguments: object) -> TrialOutcome:
        number, values = number_and_values(loss, *arguments)
        is_masked = get_keras_mask(values) is not None
        of_number, of_values = slopes_of()(*arguments)
        if values.shape.rank:
            values = _beside(values, of_values)
        if number.shape.rank == 0:
            number = _beside(number[None], tf.reduce_sum(of_number, 0, keepdims=True))[0]
        return TrialOutcome(values, number, is_masked)

    return _tried(loss, outcome, (y_true, y_pred, sample_weight))


def has_own_backward(
    loss: keras.Loss, y_true: object, y_pred: object, sample_weight: tf.Tensor | None
) -> bool:
    """Whether a coupled loss has a `tf.custom_gradient` of a user's, which need not be linear.

    Raises:
        ValueError: if it reads trainable weights, too, whose gradients each replica weighs.
    """
    arguments = (y_true, y_pred, sample_weight)
    known = _known.setdefault(loss, {})
    key = "backward", str(keras.tree.map_structure(_spec, arguments))
    if key not in known:
        with trial():
            values = functools.partial(number_and_values, _named(loss))
            graph = _traced(tf.function(values, autograph=False), arguments)
        weights = () if graph is None else graph.trainable_variables
        is_own = graph is not None and has_own_gradients(graph, is_stopped=False)
        if is_own and weights:
            names = ", ".join(f"'{weight.name}'" for weight in weights)
            raise ValueError(
                "A loss that couples rows, computed by each replica from those of all, may have a "
                "tf.custom_gradient, or read trainable weights, not both: their gradients would be "
                f"counted once for each replica. Received: loss '{loss.name}', with a "
                f"tf.custom_gradient, which reads {names}. Read weights in a layer, and let it "
                "give the loss what it needs of them."
            )
        known[key] = is_own
    return known[key]


def _slopes_of(loss: keras.Loss) -> Callable:
    """What gives the slopes, by rows of predictions, of a loss and of the sum of its values.

    A loss may be one of all rows in its gradient alone, where it says what that is: divided by a
    `tf.stop_gradient` of itself, say, or clipped by a `tf.custom_gradient`. Slopes are linear in
    the gradient: those of parts make that of all rows as it does. They are taken at several scales
    of what comes back to the loss: to values what comes back on one device, to a number of a part
    its share of that (`ReplicaStep.weight`).

    Returns:
        A function of targets, predictions and weights, to two `[rows, columns]`; of no columns
        where a loss does not say anything of its gradient.
    """
    named = _named(loss)

    @tf.function(autograph=False)  # tapes do not record in a trial
    def slopes(y_true: object, y_pred: object, sample_weight: object) -> list[tf.Tensor]:
        leaves = keras.tree.flatten(y_pred)
        rows = [leaf for leaf in leaves if leaf.dtype.is_floating]
        number, values = number_and_values(named, y_true, y_pred, sample_weight)
        share = tf.cast(tf.shape(leaves[0])[0], number.dtype) / NUM_ROWS
        return [_slopes(number, rows, share), _slopes(values, rows, tf.ones((), values.dtype))]

    is_told: list[bool] = []

    def slopes_if_told(*arguments: object) -> Sequence[tf.Tensor]:
        if not is_told:
            graph = _traced(slopes, arguments)
            is_told.append(graph is not None and has_own_gradients(graph))
        if is_told[0]:
            return slopes(*arguments)
        first = keras.tree.flatten(arguments[1])[0]
        return [tf.zeros([len(first), 0])] * 2

    return slopes_if_told


def _named(loss: keras.Loss) -> keras.Loss:
    """A copy: of a name that no graph may have, Keras would keep the scope it opened."""
    named = copy_with_call(loss, loss.call)
    named.name = "loss"
    return named


def _traced(function: tf.types.experimental.GenericFunction, arguments: tuple) -> tf.Graph | None:
    """The graph of a function of such rows; None if it can be evaluated only, or eagerly."""
    specs = keras.tree.map_structure(_spec, arguments)
    try:
        return function.get_concrete_function(*specs).graph
    except Exception:  # values have to tell
        return None


def _slopes(outcome: tf.Tensor, rows: Sequence[tf.Tensor], share: tf.Tensor) -> tf.Tensor:
    """`[rows, scales * tensors of predictions]`, as of an upstream gradient of 1."""
    dtype = outcome.dtype
    if dtype not in (tf.float32, tf.float64):  # others have few digits
        return tf.zeros([tf.shape(rows[0])[0], 0], dtype)
    columns = []
    for scale in _SCALES:
        upstream = scale * share
        for gradient, leaf in zip(
            tf.gradients(outcome, rows, tf.fill(tf.shape(outcome), upstream)), rows, strict=True
        ):
            count = tf.shape(leaf)[0]
            if gradient is None:
                columns.append(tf.zeros([count], dtype))
                continue
            numbers = tf.cast(tf.convert_to_tensor(gradient), dtype) / upstream
            if numbers.shape.rank > 1:  # with other factors, as those of a softmax add up to zero
                numbers *= tf.cos(tf.cast(tf.range(tf.shape(numbers)[-1]), dtype))
            own = tf.reduce_sum(tf.reshape(numbers, [count, -1]), 1)
            columns.append(tf.where(tf.math.is_finite(own), own, tf.zeros_like(own)))
    return tf.stack(columns, 1)


def _beside(values: tf.Tensor, slopes: tf.Tensor) -> tf.Tensor:
    """`[rows, all that either has of a row]`; values alone where they are not of rows."""
    if len(values) != len(slopes):
        return values
    flat = tf.reshape(values, [len(values), -1])
    return tf.concat([flat, tf.cast(slopes, values.dtype)], 1)


def kind_of_metric(
    metric: keras.Metric, y_true: object, y_pred: object, sample_weight: object
) -> str:
    """The kind of the function of a `MeanMetricWrapper`; "masked" rows are "rows" for it."""
    function, options = function_of_metric(metric)
    if (kind := declared_kind(function)) is not None:
        return kind
    is_known = _is_known(function) or function.__module__.startswith("keras.src.metrics")
    if is_known and options.get("axis", -1) == -1 and _have_columns(y_pred):
        return "rows"

    def outcome(y_true: object, y_pred: object, sample_weight: object) -> TrialOutcome:
        del sample_weight  # Keras takes none for a number of the batch
        values = function(y_true, y_pred, **options)
        number = values if len(values.shape) == 0 else float("nan")
        return TrialOutcome(values, number)

    kind = _tried(metric, outcome, (y_true, y_pred, sample_weight))
    return "rows" if kind == "masked" else kind


def _is_of_rows(loss: keras.Loss, y_pred: object) -> bool:
    function, options = getattr(loss, "fn", None), options_of_loss(loss)
    return (
        type(loss).call is keras.losses.MeanSquaredError.call
        and type(loss).__call__ is keras.Loss.__call__
        and _is_known(function)
        and options.get("axis", -1) == -1
        and options.get("ignore_class") is None
        and _have_columns(y_pred)
    )


def keeps_state(loss: keras.Loss) -> bool:
    """Whether a loss of a user's own, or the function that it wraps, mentions an assignment."""
    function = getattr(loss, "fn", None)
    own = getattr(function, "__module__", None) or ""
    is_of_keras = function is None or own.startswith("keras.src.")
    return class_mentions_assignment(type(loss)) or (
        not is_of_keras and function_mentions_assignment(function)
    )


def _is_known(function: object) -> bool:
    return any(function is each for each in _OF_ROWS)


def _have_columns(y_pred: object) -> bool:
    return all((leaf.shape.rank or 0) > 1 for leaf in keras.tree.flatten(y_pred))


def _spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
    """What is the same on all workers, however many rows they have."""
    return None if tensor is None else tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def number_and_values(
    loss: keras.Loss, y_true: object, y_pred: object, sample_weight: object
) -> tuple:
    """What `loss` gives, and the values, perhaps with a Keras mask, that it reduces to that."""
    values: list = []

    def call(*args: object, **kwargs: object) -> tf.Tensor:
        values.append(loss.call(*args, **kwargs))
        return values[-1]

    number = copy_with_call(loss, call)(y_true, y_pred, sample_weight)
    return number, values[-1] if values else number


def copy_with_call(loss: keras.Loss, call: Callable) -> keras.Loss:
    """A copy of a Keras loss that calls `call` in the place of its own.

    Not `loss` itself, which another replica's thread may be calling; and no `copy`, for which Keras
    would serialize it.
    """
    own = object.__new__(type(loss))
    vars(own).update(vars(loss))
    own.call = call
    return own


def _tried(owner: keras.Loss | keras.Metric, outcome: Callable, arguments: tuple) -> str:
    """The kind of `outcome`, a function of such arguments, that a loss or metric computes.

    Raises:
        NotImplementedError: for ragged and sparse tensors.
    """
    leaves = [leaf for leaf in keras.tree.flatten(arguments) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        raise NotImplementedError(
            "A function of a batch is tried on dense tensors, to find out whether it couples rows. "
            f"Received: '{owner.name}', of {[type(leaf).__name__ for leaf in leaves]}. Declare it "
            "by tfparallel.mean_loss or tfparallel.sum_loss, or make the targets dense."
        )
    if not all(leaf.shape.rank for leaf in leaves):
        return "rows"  # of what has no rows nothing can be gathered
    specs = keras.tree.map_structure(_spec, arguments)
    is_masked = any(get_keras_mask(leaf) is not None for leaf in keras.tree.flatten(arguments[1]))
    key = (str(specs), is_masked, getattr(owner, "reduction", None))
    known = _known.setdefault(owner, {})
    if key not in known:
        known[key] = _kind_of_outcome(owner, outcome, specs, is_masked)
    return known[key]


def _kind_of_outcome(owner: object, outcome: Callable, specs: tuple, is_masked: bool) -> str:
    try:
        with trial():
            found = found_for(outcome, *specs)
    except (GathersRowsError, TakesTensorsError):
        return "rows"
    except UntriableError as error:
        return _not_tried(owner, error.__cause__)
    if "rows" in found.kinds:
        return "masked" if found.is_masked else "rows"
    # Keras takes a number of the batch times the mean of a mask.
    kinds = [kind for kind in ("mean", "sum") if kind in found.kinds and not is_masked]
    return kinds[0] if kinds else "coupled"


def _not_tried(owner: keras.Loss | keras.Metric, error: BaseException | None) -> str:
    tf.get_logger().warning(
        "'%s' cannot be tried on random rows (%r). It is computed on the rows of all replicas, "
        "which is right for any function of a batch. Where that is not needed, declare it: "
        "tfparallel.mean_loss or tfparallel.sum_loss.",
        owner.name,
        error,
    )
    return "coupled"
