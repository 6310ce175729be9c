"""Trains what was drawn, under its strategy or without one."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfparallel
from tests.helpers import assert_same_training, in_float64, numbered
from tests.hybrid.meshes import hybrid
from tests.random_models.layers import TOKENS, VOCABULARY, make
from tests.random_models.rounding import SEEDS, beyond_rounding, in_double_precision, move_weights
from tests.random_models.spec import Distribution, Fit, Model, Output, Trial
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh

if TYPE_CHECKING:
    from tests.random_models.pools import Pools


# What two correct trainings may differ by. Of float64, far more than rounding and far less than any
# mistake; below, half of a dtype's digits: what rounding a gradient once for each part makes, after
# two steps of SGD. What differs by more has to pass in float64, and `beyond_rounding`.
ATOL = {
    "float64": 1e-9,
    "float32": float(np.sqrt(np.finfo("float32").eps)),
    "mixed_float16": float(np.sqrt(np.finfo("float16").eps)),
    "mixed_bfloat16": float(np.sqrt(2.0**-7)),
}

LOSS_SCALE = (
    2.0**4
)  # of float16; Keras's 2**15 lets the sum of a part overflow, and not that of all


def assert_trains_as_on_one_device(trial: Trial, pools: "Pools | None" = None) -> None:
    """Trains two steps, evaluates and predicts; all numbers must be those of Keras.

    Args:
        trial: what is trained.
        pools: the processes of trials under several workers.
    """
    policy = trial.model.policy
    expected, differing = results(trial, None), []
    for received in _received(trial, pools):
        try:
            assert_same_training(expected, received, ATOL[policy])
        except AssertionError:
            if policy == "float64":
                raise
            differing.append(received)
    if differing:
        assert_trains_as_on_one_device(in_double_precision(trial), pools)
        moved = [results(trial, None, seed) for seed in SEEDS]
        for received in differing:
            beyond = beyond_rounding(expected, received, moved, ATOL[policy])
            assert not beyond, (
                f"Differs from one device, by (largest difference, allowed): {beyond}"
            )


def _received(trial: Trial, pools: "Pools | None") -> list[dict[str, np.ndarray]]:
    if trial.distribution.name == "Workers":
        return pools.results(trial)
    return [results(trial, _strategy(trial.distribution))]


def _strategy(distribution: Distribution) -> tf.distribute.Strategy:
    if distribution.name == "Hybrid":
        return hybrid(**distribution.arguments)
    make = getattr(tfparallel, f"{distribution.name}Strategy")
    if distribution.name == "TensorParallel":
        return make(LayoutOfAnything(cpu_mesh(*distribution.arguments["mesh"])))
    return make(**distribution.arguments)


@contextlib.contextmanager
def _in_policy(policy: str) -> Iterator[None]:
    if policy == "float64":
        with in_float64():
            yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def results(
    trial: Trial, strategy: tf.distribute.Strategy | None, moved_by: int | None = None
) -> dict[str, np.ndarray]:
    """Weights, optimizer, history, evaluation and predictions, by name.

    Args:
        trial: what is trained.
        strategy: under which; None for one device.
        moved_by: a seed, to begin with weights that differ by one place.
    """
    with _in_policy(trial.model.policy):
        found = _results(trial, strategy, moved_by)
    keras.backend.clear_session()
    return found


def _results(trial: Trial, strategy, moved_by: int | None) -> dict:
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(trial.model)
        compile_(model, trial.model, trial.fit)
    if moved_by is not None:
        move_weights(model, trial.model.policy, moved_by)
    fit = trial.fit
    rows = fit.batch_size + fit.last_rows
    x, y = _inputs(trial.model, rows), _targets(model, trial.model, rows)
    y = y if len(y) > 1 else y[0]  # class weights want it so
    options = {"batch_size": fit.batch_size, "verbose": 0}
    history = model.fit(x, y, shuffle=False, **options, **_weights(model, trial, rows)).history
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    predicted = model.predict(x, **options)
    return {
        **numbered("weights", model.get_weights()),
        **numbered("optimizer", [v.numpy() for v in model.optimizer.variables]),
        **{f"history/{key}": np.asarray(value) for key, value in history.items()},
        **{f"evaluate/{key}": np.asarray(value) for key, value in evaluated.items()},
        **numbered("predict", map(_as_numbers, keras.tree.flatten(predicted))),
    }


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """What numpy can compare: bfloat16 is no type of its own there."""
    return array.astype("float32") if array.dtype.kind == "V" else array


# So steep that the least probability is 0 in float32: a loss has to know the logits.
_SURE = {
    "activation": "softmax",
    "kernel_initializer": keras.initializers.RandomNormal(stddev=30.0, seed=5),
}


def build(spec: Model) -> keras.Model:
    """The functional model; each output ends in a Dense head."""
    inputs = [
        keras.Input((TOKENS,), dtype="int32") if shape == ("tokens",) else keras.Input(shape)
        for shape in spec.inputs
    ]
    values, layers = list(inputs), []
    for node in spec.nodes:
        taken = [values[value] for value in node.values]
        layer = make(node.layer, taken[0].shape[1:]) if node.again is None else layers[node.again]
        layers.append(layer)
        values.append(_call(layer, taken))
    heads = []
    for number, output in enumerate(spec.outputs):
        options = _SURE if output.loss == "of_probabilities" else {}
        name = f"head_{number}"
        head = keras.layers.Dense(output.classes, name=name, dtype=spec.head_policy, **options)
        heads.append(head(values[output.value]))
    return keras.Model(inputs, heads)


def _call(layer: keras.layers.Layer, taken: list):
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return layer(*taken)
    return layer(taken if len(taken) > 1 else taken[0])


def compile_(model: keras.Model, spec: Model, fit: Fit) -> None:
    """Compiles as `fit` and the outputs of `spec` say."""
    optimizer = getattr(keras.optimizers, fit.optimizer)(**fit.optimizer_options)
    if spec.policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE)
    model.compile(
        optimizer,
        loss=[_loss(output) for output in spec.outputs],
        loss_weights=[output.loss_weight for output in spec.outputs],
        metrics=[list(output.metrics) for output in spec.outputs],
        weighted_metrics=[list(output.weighted_metrics) for output in spec.outputs],
        steps_per_execution=fit.steps_per_execution,
    )


def sum_of_squares(y_true, y_pred):
    """One number, which grows with the rows."""
    return _of_loss(ops.sum(ops.square(y_true - y_pred)))


def weighted_ratio(y_true, y_pred):
    """One number that no mean of its values for parts of the rows gives."""
    weights = ops.sigmoid(y_true)
    return _of_loss(ops.sum(weights * ops.square(y_true - y_pred)) / ops.sum(weights))


def _of_loss(value):
    """In the dtype of Keras's losses: it adds no bfloat16 of a function's to those."""
    return ops.cast(value, keras.config.floatx())


def _loss(output: Output) -> keras.losses.Loss | Callable:
    reduction = output.reduction
    if output.loss in ONE_NUMBER:
        return ONE_NUMBER[output.loss]
    if output.loss == "mse":
        return keras.losses.MeanSquaredError(reduction=reduction)
    if output.loss == "huber":
        return keras.losses.Huber(reduction=reduction)
    from_logits = output.loss != "of_probabilities"
    return keras.losses.SparseCategoricalCrossentropy(from_logits, reduction=reduction)


ONE_NUMBER = {"sum_of_squares": sum_of_squares, "weighted_ratio": weighted_ratio}


def _inputs(spec: Model, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [
        rng.integers(0, VOCABULARY, (rows, TOKENS)).astype("int32")
        if shape == ("tokens",)
        else rng.normal(size=(rows, *shape))
        for shape in spec.inputs
    ]


def _targets(model: keras.Model, spec: Model, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = [(rows, *output.shape[1:]) for output in model.outputs]
    return [
        rng.integers(0, output.classes, shape[:-1])
        if output.loss in ("sparse_categorical_crossentropy", "of_probabilities")
        else rng.normal(size=shape)
        for output, shape in zip(spec.outputs, shapes)
    ]


def _weights(model: keras.Model, trial: Trial, rows: int) -> dict:
    if trial.fit.weights == "class":
        return {"class_weight": {0: 0.5, 1: 1.0, 2: 2.5}}
    if trial.fit.weights == "sample":
        shapes = [(rows, *output.shape[1:-1]) for output in model.outputs]
        weights = [np.linspace(0.0, 2.0, math.prod(shape)).reshape(shape) for shape in shapes]
        return {"sample_weight": weights}
    return {}
