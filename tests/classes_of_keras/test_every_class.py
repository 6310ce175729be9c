"""Keras's layers, losses and metrics, all there are, train as on one device under each strategy."""

import contextlib
import inspect
from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics

import tfparallel
from tests.classes_of_keras.examples_of_layers import (
    BY_INPUTS,
    INTEGERS,
    MEET_ROWS,
    OF_RANDOM_IMAGES,
    OTHER_LAYERS,
    SHAPES,
)
from tests.classes_of_keras.examples_of_losses import CLASSES, KINDS, OTHER_LOSSES, OTHER_METRICS
from tests.helpers import Training, assert_same_training, cpu_mesh_of, in_float64, numbered

pytestmark = pytest.mark.turns

ROWS, BATCH = 14, 7  # no two parts of it are even; one shape, as each takes long to trace
CPUS = ["CPU:0", "CPU:1"]
STRATEGIES: Mapping[str, Callable] = {
    "mirrored": lambda: tfparallel.MirroredStrategy(CPUS),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(CPUS),
    "sharded": lambda: tfparallel.ShardedStrategy(CPUS),
    "pipeline": lambda: tfparallel.PipelineStrategy(2, num_microbatches=3),
    "tensor": lambda: tfparallel.TensorParallelStrategy(
        "auto", device_mesh=cpu_mesh_of(batch=1, model=2)
    ),
}
under_each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# Of these TensorFlow computes nothing in float64 on a CPU.
FLOAT32 = dict.fromkeys(("volumes", "ranked", "ranked_classes"), 1e-5)


def assert_trains_alike(train: Callable, strategy: str, kind: str) -> None:
    """Compares what `train` gives without a strategy, and under one."""
    in_dtype = contextlib.nullcontext if kind in FLOAT32 else in_float64
    with in_dtype():
        keras.backend.clear_session()  # metrics are named by their number
        expected = train(None)
        keras.backend.clear_session()
        assert_same_training(expected, train(STRATEGIES[strategy]()), FLOAT32.get(kind, 1e-10))


def trained(build: Callable, strategy, x, y, options: dict) -> Training:
    """What `build` compiles in the strategy's scope, after two steps, with what it predicts."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
    data = (x, y, *options.values())
    options = {**options, "validation_data": data, "validation_batch_size": BATCH}
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)
    predicted = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    return Training(model, history.history, numbered("predicted", predicted))


def sgd() -> keras.Optimizer:
    """Slow: what all of these outputs ask of what they share adds up."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


@under_each_strategy
@pytest.mark.parametrize("kind", BY_INPUTS)
def test_layers(kind, strategy):
    """All of a kind in one model, an output each; their loss tells which differs."""
    num_inputs, examples = BY_INPUTS[kind]
    shape = SHAPES[kind.removeprefix("two_")]
    is_integer = kind == "integers"
    if strategy == "pipeline":  # which refuses what is synchronised
        examples = {name: own for name, own in examples.items() if name != "BatchNormalization"}

    def build():
        x = keras.Input(shape, dtype="int32" if is_integer else None)
        given = [
            x if is_integer else layers.Dense(shape[-1], "sigmoid")(x) for _ in range(num_inputs)
        ]
        outputs = [_output(call(*given), name) for name, call in examples.items()]
        model = keras.Model(x, outputs)
        model.compile(sgd(), ["mse"] * len(outputs))
        return model

    rng = np.random.default_rng(0)
    size = (ROWS, *shape)
    x = rng.integers(0, INTEGERS, size) if is_integer else rng.uniform(0, 1, size)
    y = [rng.normal(size=(ROWS, 2))] * len(examples)
    assert_trains_alike(lambda strategy: trained(build, strategy, x, y, {}), strategy, kind)


def _output(value, name: str):
    value = layers.Flatten()(value)
    if "int" in value.dtype:
        value = keras.ops.cast(value, keras.config.floatx())
    return layers.Dense(2, name=name)(value)


@under_each_strategy
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("kind", [kind for kind, own in KINDS.items() if own.losses])
def test_losses(kind, is_weighted, strategy):
    """All of a kind with each reduction, an output each."""
    own = KINDS[kind]
    reductions = ("sum_over_batch_size", "sum", "mean_with_sample_weight")

    def build():
        x = keras.Input((4,))
        hidden = layers.Dense(5, "tanh")(x)
        outputs, compiled = [], []
        for name, make in own.losses.items():
            for reduction in reductions:
                outputs.append(
                    layers.Dense(CLASSES, own.activation, name=f"{name}_{reduction}")(hidden)
                )
                compiled.append(make(reduction=reduction))
        model = keras.Model(x, outputs)
        model.compile(sgd(), compiled)
        return model

    count = len(own.losses) * len(reductions)
    rng = np.random.default_rng(0)
    x, y, weights = rng.uniform(0, 1, (ROWS, 4)), own.truth(rng, ROWS), rng.uniform(0.1, 2, ROWS)
    options = {"sample_weight": [weights] * count} if is_weighted else {}
    y = [y] * count
    assert_trains_alike(lambda strategy: trained(build, strategy, x, y, options), strategy, kind)


@under_each_strategy
@pytest.mark.parametrize("kind", KINDS)
def test_metrics(kind, strategy):
    """All of a kind."""
    own = KINDS[kind]

    def build():
        x = keras.Input((4,))
        outputs = layers.Dense(CLASSES, own.activation)(layers.Dense(5, "tanh")(x))
        model = keras.Model(x, outputs)
        loss = "mse" if len(y.shape) > 1 else "sparse_categorical_crossentropy"
        model.compile(sgd(), loss, metrics=[make() for make in own.metrics.values()])
        return model

    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (ROWS, 4)), own.truth(rng, ROWS)
    assert_trains_alike(lambda strategy: trained(build, strategy, x, y, {}), strategy, kind)


@under_each_strategy
@pytest.mark.parametrize("name", OF_RANDOM_IMAGES)
def test_layers_that_draw_train(name, strategy):
    """What they draw is the replica's own; what they do in inference is one device's."""
    make = OF_RANDOM_IMAGES[name]

    def built():
        x = keras.Input(SHAPES["images"])
        model = keras.Model(x, layers.Dense(2)(layers.Flatten()(make()(x))))
        model.compile(sgd(), "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (ROWS, *SHAPES["images"])), rng.normal(size=(ROWS, 2))
    with STRATEGIES[strategy]().scope():
        model = built()
    before = model.get_weights()
    if name in MEET_ROWS and strategy != "tensor":  # which has one replica
        with pytest.raises(ValueError, match="Rows may meet in 'equalization"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
        return
    history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert any(not np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    if name == "RandomCrop":  # Keras's does not crop then, and layers behind it get another size
        return
    alone = built()
    alone.set_weights(model.get_weights())
    np.testing.assert_allclose(model.predict(x, verbose=0), alone.predict(x, verbose=0), atol=1e-5)


@under_each_strategy
@pytest.mark.parametrize("name", ["Adadelta", "ScheduleFreeAdamW"])  # others: conformance cases
def test_optimizers(name, strategy):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this version of Keras has no {name}")

    def build():
        x = keras.Input((4,))
        model = keras.Model(x, layers.Dense(2)(layers.Dense(5, "tanh")(x)))
        model.compile(getattr(keras.optimizers, name)(0.01, global_clipnorm=0.1), "mse")
        # Plain `fit` loses what slots begin with (docs/exactness.md).
        model.optimizer.build(model.trainable_variables)
        return model

    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (ROWS, 4)), rng.normal(size=(ROWS, 2))
    assert_trains_alike(lambda strategy: trained(build, strategy, x, y, {}), strategy, name)


def _names(module, of: type) -> set[str]:
    """Those of its public classes, each by its first name."""
    own = {each for _, each in inspect.getmembers(module, inspect.isclass) if issubclass(each, of)}
    return {each.__name__ for each in own}


def test_nothing_is_left_out():
    """A version of Keras that has more fails here: give it an example, or say why not."""
    given = {name for _, examples in BY_INPUTS.values() for name in examples}
    assert _names(layers, keras.Layer) <= given | set(OF_RANDOM_IMAGES) | set(OTHER_LAYERS)
    given = {name for own in KINDS.values() for name in own.losses}
    assert _names(losses, losses.Loss) <= given | set(OTHER_LOSSES)
    given = {name for own in KINDS.values() for name in own.metrics}
    assert _names(metrics, metrics.Metric) <= given | set(OTHER_METRICS)
