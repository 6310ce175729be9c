"""Layers for which rows of padding are not there, and models whose layers would notice them.

Keras's layers compute each row of its own, but for BatchNorm's statistics and what a regularizer
makes of activities: those leave rows of padding out. What a user's own code does is tried once, on
random rows: if a row changes when the others do, padding would change it too.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib, in_stateless_scope, is_stock_step
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import (
    call_takes_training,
    compile_loss_of,
    compiled_metrics_of,
    flat_losses,
    has_stock_moments,
    layers_of,
    loss_tracker_of,
    moments_method,
    own_losses,
)
from tfparallel.replicas.checks import check_is_method
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_trial import trial
from tfparallel.replicas.whole_batch_layers import may_keep_state
from tfparallel.tpu.padded_losses import loss_of_real_rows
from tfparallel.tpu.padded_metrics import update_of_real_rows
from tfparallel.tpu.padded_step import PaddedStep, padded_step

_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_MIXING = tuple(
    getattr(keras.layers, name)
    for name in ("MixUp", "CutMix", "Equalization")
    if hasattr(keras.layers, name)
)
_WAY_OUT = (
    "Leave a smaller last batch out (tf.data's batch(drop_remainder=True)), with batches of a "
    "multiple of the number of replicas."
)
_OWN_METHODS = ("train_step", "test_step", "predict_step")
_tried: weakref.WeakSet = weakref.WeakSet()  # models that compute each row of its own


def why_never_padded(model: keras.Model) -> str | None:
    """Why no step of `model` can have rows of padding, before one is traced; None if it may."""
    for name in _OWN_METHODS:
        check_is_method(getattr(model, name))
    own = [name for name in _OWN_METHODS if not is_stock_step(getattr(model, name))]
    trainer = keras.Model
    own += [
        name
        for name in ("compute_loss", "compute_metrics")
        if getattr(type(model), name) is not getattr(trainer, name)
    ]
    if not own:
        return None
    return f"{type(model).__name__}.{own[0]} is not Keras's own, and may count every row it gets"


@contextlib.contextmanager
def without_padding(model: keras.Model) -> Iterator[None]:
    """Within it, a `PaddedStep` of `model` computes what one without padding does.

    Raises:
        ValueError: for a model of which that cannot be said.
    """
    layers = layers_of(model)
    for layer in layers:
        _check_layer(layer)
    with contextlib.ExitStack() as hooks:
        losses = flat_losses(model)
        if losses:
            hooks.enter_context(
                shadowed(
                    compile_loss_of(model),
                    "_flat_losses",
                    [entry._replace(loss=loss_of_real_rows(entry.loss)) for entry in losses],
                    during="a step with rows of padding",
                    why="Rows of padding have no part in a loss.",
                )
            )
        compiled = compiled_metrics_of(model)
        metrics = [metric for metric in model.metrics if metric is not compiled]
        for metric in [*metrics, *getattr(compiled, "metrics", ())]:
            hooks.enter_context(
                shadowed(
                    metric,
                    "update_state",
                    update_of_real_rows(metric, counts_rows=metric is loss_tracker_of(model)),
                    during="a step with rows of padding",
                    why="Rows of padding are not counted by metrics.",
                )
            )
        for layer in layers:
            _enter_hooks_of(layer, hooks)
        yield


def _enter_hooks_of(layer: keras.Layer, hooks: contextlib.ExitStack) -> None:
    if isinstance(layer, keras.layers.BatchNormalization):
        hooks.enter_context(
            shadowed(
                layer,
                "_moments",
                _moments_of_real_rows(layer),
                during="a step with rows of padding",
                why="Rows of padding have no part in a batch's statistics.",
            )
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        hooks.enter_context(
            shadowed(
                layer,
                "activity_regularizer",
                _regularizer_of_real_rows(layer.activity_regularizer),
                during="a step with rows of padding",
                why="Activities in rows of padding are not penalised.",
            )
        )
    if not _is_of_keras(layer):
        hooks.enter_context(
            shadowed(
                layer,
                "_get_own_losses",
                _no_own_losses(layer),
                during="a step with rows of padding",
                why="What a layer adds to the loss would be of rows of padding, too.",
            )
        )


# ---- layers --------------------------------------------------------------------------------------


def _moments_of_real_rows(layer: keras.Layer) -> Callable:
    """`BatchNormalization._moments`, of the rows that are no padding; of all replicas if it syncs.

    A replica without such rows has zeros.
    """
    moments = moments_method(layer)

    def mean_and_variance(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple:
        step = current_replica_step()
        if not isinstance(step, PaddedStep):
            return moments(inputs, mask)
        channels = inputs.shape[layer.axis]
        if in_stateless_scope():  # a trial, in which no row is to see the others
            return tf.zeros([channels], inputs.dtype), tf.ones([channels], inputs.dtype)
        rank, axis = inputs.shape.rank, layer.axis % inputs.shape.rank
        reduced = [i for i in range(rank) if i != axis]
        weights = step.weights_of_rows(rank, inputs.dtype)
        if mask is not None:
            weights = weights * tf.cast(mask, inputs.dtype)[..., tf.newaxis]

        def total(values: tf.Tensor) -> tf.Tensor:
            own = tf.reduce_sum(weights * values, reduced, keepdims=True)
            context = distribute_lib.get_replica_context()
            return context.all_reduce(ReduceOp.SUM, own) if layer.synchronized else own

        count = total(tf.ones_like(inputs))
        if mask is not None:
            count = count + keras.backend.epsilon()  # as Keras does
        mean = tf.math.divide_no_nan(total(inputs), count)
        deviation = inputs - mean if mask is None else weights * inputs - mean
        variance = tf.math.divide_no_nan(total(tf.square(deviation)), count)
        return tf.reshape(mean, [channels]), tf.reshape(variance, [channels])

    return mean_and_variance


def _regularizer_of_real_rows(regularizer: Callable) -> Callable:
    """Keras divides what it gives by the number of rows, with those of padding."""

    def penalty(outputs: tf.Tensor) -> tf.Tensor:
        step = padded_step()
        if step is None:
            return regularizer(outputs)
        return step.mean_over_rows(regularizer(step.without_padding(outputs)))

    return penalty


def _no_own_losses(layer: keras.Layer) -> Callable:
    get_own_losses = own_losses(layer)

    def none() -> list:
        losses = get_own_losses()
        if losses and padded_step() is not None:
            raise ValueError(
                f"Layer '{layer.name}' adds a loss of all rows it gets, of which some are padding "
                f"here. {_WAY_OUT}"
            )
        return losses

    return none


def _check_layer(layer: keras.Layer) -> None:
    problem = None
    regularizer = getattr(layer, "activity_regularizer", None)
    if isinstance(layer, keras.layers.BatchNormalization) and not has_stock_moments(layer):
        problem = "computes a batch's statistics in a way of its own"
    elif regularizer is not None and type(regularizer) not in _ADDITIVE:
        problem = f"has an activity_regularizer, {type(regularizer).__name__}, that is not L1 or L2"
    elif isinstance(layer, _MIXING):
        problem = "mixes the rows of a batch"
    elif not isinstance(layer, keras.Model) and may_keep_state(layer):
        problem = "keeps a state, which may depend on all rows"
    if problem is not None:
        raise ValueError(
            f"Layer '{layer.name}' ({type(layer).__name__}) {problem}, and some rows are padding "
            f"here. {_WAY_OUT}"
        )


# ---- models --------------------------------------------------------------------------------------


def check_rows_are_apart(model: keras.Model, inputs: object) -> None:
    """Refuses a model in which a row of padding may change others; called where a step is traced.

    Keras's layers are known. Of anything else the whole model is computed twice, on four random
    rows of which the last two differ: without training, and with it, unless it draws at random.

    Args:
        model: of the step.
        inputs: what it is called with.

    Raises:
        ValueError: naming what is to be done.
    """
    if model in _tried:
        return
    if not all(map(_is_known, _operations_of(model))):
        _try(model, inputs)
    _tried.add(model)


def _operations_of(model: keras.Model) -> list:
    """The layers, and what a functional model computes without one."""
    functional = [each for each in layers_of(model) if isinstance(each, keras.Model)]
    plain = [op for each in functional for op in getattr(each, "operations", ())]
    return [*layers_of(model), *plain]


def _is_known(operation: keras.Operation) -> bool:
    """Whether it is a layer of Keras's, which computes each row of its own."""
    is_layer = isinstance(operation, keras.Layer) and _is_of_keras(operation)
    axes = getattr(operation, "axis", None)
    along_rows = 0 in (axes if isinstance(axes, list | tuple) else [axes])
    return is_layer and not along_rows and not isinstance(operation, keras.layers.Lambda)


def _is_of_keras(layer: keras.Layer) -> bool:
    return type(layer).__module__.startswith("keras.src.")


def _try(model: keras.Model, inputs: object) -> None:
    rng = np.random.default_rng(0)
    first = keras.tree.map_structure(lambda leaf: _drawn(leaf, rng), inputs)
    second = keras.tree.map_structure(lambda leaf: _drawn(leaf, rng), inputs)
    both = keras.tree.map_structure(
        lambda a, b: a if a is None else np.concatenate([a[:2], b[2:]]), first, second
    )
    try:
        with trial():
            is_apart = _equal(_outputs(model, first, False), _outputs(model, both, False))
            once, again = (_outputs(model, first, True) for _ in range(2))
            if is_apart and _equal(once, again, rows=4):  # else it draws, and tells nothing
                is_apart = _equal(once, _outputs(model, both, True))
    except Exception as error:
        raise ValueError(
            f"Model '{model.name}' cannot be tried on random rows, to find out whether a row of "
            f"padding changes others. {_WAY_OUT}"
        ) from error
    if not is_apart:
        raise ValueError(
            f"In model '{model.name}' a row's result depends on the other rows of its batch, of "
            f"which some are padding here. {_WAY_OUT}"
        )


def _drawn(leaf: tf.Tensor | None, rng: np.random.Generator) -> np.ndarray | None:
    if leaf is None:
        return None
    shape = [4, *[3 if dim is None else dim for dim in leaf.shape[1:]]]
    if leaf.dtype.is_floating:
        return rng.normal(size=shape).astype(leaf.dtype.as_numpy_dtype)
    return rng.integers(0, 2, shape).astype(leaf.dtype.as_numpy_dtype)


def _outputs(model: keras.Model, inputs: object, training: bool) -> list[np.ndarray]:
    given = keras.tree.map_structure(lambda x: x if x is None else tf.constant(x), inputs)
    own = model(given, training=training) if call_takes_training(model) else model(given)
    return [np.asarray(x) for x in keras.tree.flatten(own) if x is not None]


def _equal(ours: list[np.ndarray], theirs: list[np.ndarray], rows: int = 2) -> bool:
    return all(
        a.shape[:1] == b.shape[:1] == (4,) and np.allclose(a[:rows], b[:rows], 1e-4, 1e-6)
        for a, b in zip(ours, theirs, strict=True)
    )
