"""What the tests share: a tiny model, one way to train it, one way to compare trainings."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

SEED = 1
BATCH = 12  # divides evenly over 1, 2, 3 and 4 replicas
EVEN_ROWS = 2 * BATCH
UNEVEN_ROWS = BATCH + 5  # the last batch is smaller, and uneven for any number of replicas
ODD_BATCH = 13  # uneven for any number of replicas; one shape is traced in half the time of two
ODD_ROWS = 2 * ODD_BATCH
MIN_LAYERS_VARIABLE = "TEST_MIN_LAYERS"  # of a process's models: a pipeline's stages need one each


def open_logical_cpus(count: int) -> None:
    """Split the CPU into `count` devices; must run before TensorFlow starts."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * count,
    )


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """All of Keras in float64: layers, losses, metrics, optimizers."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def lengthened(model: keras.Model) -> keras.Model:
    """`model`, with as many layers that do nothing as the process asks for, if it is Sequential."""
    if type(model) is keras.Sequential:
        for _ in range(len(model.layers), int(os.environ.get(MIN_LAYERS_VARIABLE, "0"))):
            model.add(keras.layers.Activation("linear"))
    return model


def tiny_model() -> keras.Model:
    """Six features in, three class scores out, 83 weights."""
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return lengthened(keras.Sequential(layers))


def tiny_data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`[rows, 6]` features and `[rows]` class numbers out of three."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)


def tiny_compile_options() -> dict:
    """Loss and metrics that suit `tiny_model`."""
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


def cpu_mesh_of(
    devices: Sequence[str] | None = None, /, **sizes: int
) -> keras.distribution.DeviceMesh:
    """Logical CPUs as a mesh of these axes; in their order, or as `devices` says."""
    devices = devices or [f"cpu:{i}" for i in range(math.prod(sizes.values()))]
    return keras.distribution.DeviceMesh(tuple(sizes.values()), tuple(sizes), devices)


def momentum_sgd() -> keras.Optimizer:
    """The default optimizer of the tests: linear in the gradient, so rounding stays rounding.

    Adam divides a gradient by its own size: where the true gradient is zero (a bias in front of
    BatchNorm) it turns rounding noise into full steps.
    """
    return keras.optimizers.SGD(0.1, momentum=0.9)


@dataclass
class Training:
    """A trained model, its History and whatever else shall be compared."""

    model: keras.Model
    history: Mapping[str, list]
    extra: dict = field(default_factory=dict)

    def results(self) -> dict[str, np.ndarray]:
        """Every weight, optimizer variable and logged number, by name."""
        return {
            **numbered("weights", self.model.get_weights()),
            **numbered("optimizer", [v.numpy() for v in self.model.optimizer.variables]),
            **{f"history/{key}": np.asarray(value) for key, value in self.history.items()},
            **self.extra,
        }


def numbered(prefix: str, arrays) -> dict[str, np.ndarray]:
    """`[a, b]` as `{"prefix/0": a, "prefix/1": b}`."""
    return {f"{prefix}/{i}": np.asarray(array) for i, array in enumerate(arrays)}


def train(
    strategy: tf.distribute.Strategy | None,
    build: Callable[[], keras.Model] = tiny_model,
    compile_options: Callable[[], dict] = tiny_compile_options,
    data: Callable[[int], tuple] | None = tiny_data,
    optimizer: Callable[[], keras.Optimizer] = momentum_sgd,
    rows: int = ODD_ROWS,
    batch_size: int = ODD_BATCH,
    **fit_options,
) -> Training:
    """Build, compile and fit a model for two epochs, under `strategy` if there is one.

    Args:
        strategy: `None` trains plain Keras, the reference.
        build, compile_options, optimizer: called inside the strategy's scope.
        data: gives `(x, y)` for a number of rows; `None` if `fit_options` hold the data.
        rows, batch_size: by default two batches that no number of replicas divides.
        **fit_options: for `Model.fit`; here too `epochs` and `shuffle` can change.
    """
    keras.utils.set_random_seed(SEED)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = lengthened(build())
        model.compile(**{"optimizer": optimizer(), **compile_options()})
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **fit_options}
    if data is not None:
        x, y = data(rows)
        options = {"x": x, "y": y, "batch_size": batch_size, **options}
    history = model.fit(**options)
    assert_replicas_agree(model)
    return Training(model, history.history)


def steps_outside_of_run(training: Training, strategy: tf.distribute.Strategy | None) -> Training:
    """`training`, gone on with by four steps in the scope that are not given to `strategy.run`."""
    model, (x, y) = training.model, tiny_data(BATCH)
    with strategy.scope() if strategy else contextlib.nullcontext():
        weights = model.trainable_weights
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            model.optimizer.apply(tape.gradient(loss, weights), weights)
        model.optimizer.finalize_variable_values(weights)  # as `fit` does
    assert_replicas_agree(model)
    return training


def assert_replicas_agree(model: keras.Model) -> None:
    """Fail if a trainable weight has different values on different local replicas.

    Of one in parts, each part is compared; of one in shards, each has another by design.
    """
    for weight in model.trainable_weights:
        copies = [getattr(weight.value, "values", [weight.value])]
        parts = getattr(weight.value, "parts", None)
        if parts and isinstance(parts[0], tuple):
            copies = list(zip(*parts, strict=True))  # the same part of each
        elif np.asarray(copies[0][0]).size < np.prod(weight.shape):
            continue
        for first, *others in [[np.asarray(copy) for copy in own] for own in copies]:
            for other in others:
                np.testing.assert_array_equal(first, other, f"Replicas disagree on {weight.path}")


def assert_same_training(
    reference: Training | Mapping[str, np.ndarray],
    candidate: Training | Mapping[str, np.ndarray],
    atol: float = 1e-5,
) -> None:
    """Fail unless both trainings hold the same names with the same numbers.

    Args:
        reference, candidate: a `Training`, or the dictionary of its `results()`.
        atol: largest allowed difference; numbers above 1 are compared relatively.
    """
    reference, candidate = (
        r.results() if isinstance(r, Training) else r for r in (reference, candidate)
    )
    assert sorted(reference) == sorted(candidate), _names_that_differ(reference, candidate)
    problems = [_difference(name, reference[name], candidate[name], atol) for name in reference]
    problems = [problem for problem in problems if problem]
    assert not problems, "Differs from one device:\n  " + "\n  ".join(problems)


def _names_that_differ(reference: Mapping, candidate: Mapping) -> str:
    missing, added = set(reference) - set(candidate), set(candidate) - set(reference)
    return f"Different results. Missing: {sorted(missing)}, added: {sorted(added)}."


def _difference(name: str, expected, received, atol: float) -> str | None:
    expected, received = np.asarray(expected), np.asarray(received)
    if expected.shape != received.shape:
        return f"{name}: expected shape {expected.shape}, received {received.shape}"
    if expected.dtype.kind not in "fiub":
        same = np.array_equal(expected, received)
        return None if same else f"{name}: expected {expected}, received {received}"
    if expected.dtype.kind == "u":  # seeds: equal or not
        return None if np.array_equal(expected, received) else f"{name}: differs"
    expected, received = expected.astype("float64"), received.astype("float64")
    if np.allclose(received, expected, rtol=atol, atol=atol, equal_nan=True):
        return None
    largest = np.max(np.abs(received - expected))
    example = f": expected {expected}, received {received}" if expected.size <= 4 else ""
    return f"{name}: largest difference {largest:.3g}{example}"
