"""Rows of padding count nowhere: what a TPU computes of batches of any size is one device's.

In float64, over the stock strategy for CPUs (`on_cpus.py`).
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import (
    assert_same_training,
    in_float64,
    momentum_sgd,
    tiny_compile_options,
    tiny_data,
    tiny_model,
    train,
)
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.tpu import spmd_step
from tfparallel.tpu.padded_batches import padded

pytestmark = pytest.mark.turns

EXACT = 1e-9


@pytest.fixture(autouse=True)
def exactly():
    with in_float64():
        yield


@pytest.fixture
def strategy():
    return CpuStrategy(3)  # batches of 4, filled up to 6; the last one has fewer rows than replicas


def pairs(rows):
    """Two inputs and two targets."""
    x, y = tiny_data(rows)
    left, right = x.astype("float64")[:, :3], x.astype("float64")[:, 3:]
    return {"left": left, "right": right}, {"class": y, "value": right.sum(1, keepdims=True)}


def pair_model():
    inputs = {name: keras.Input((3,), name=name) for name in ("left", "right")}
    x = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    x = keras.layers.Dense(5, "tanh")(x)
    outputs = {
        "class": keras.layers.Dense(3, "softmax")(x),
        "value": keras.layers.Dense(1)(x),
    }
    return keras.Model(inputs, outputs)


def pair_options():
    return {
        "loss": {"class": "sparse_categorical_crossentropy", "value": "huber"},
        "loss_weights": {"class": 1.0, "value": 0.3},
        "metrics": {"class": ["accuracy"], "value": ["mae", keras.metrics.R2Score()]},
        "weighted_metrics": {"class": ["sparse_categorical_crossentropy"], "value": ["mse"]},
    }


def one_hot(rows):
    x, y = tiny_data(rows)
    return x.astype("float64"), np.eye(3)[y]


def one_hot_options():
    keras_metrics = keras.metrics
    return {
        "loss": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        "metrics": [
            "accuracy",
            keras_metrics.AUC(num_thresholds=20, name="auc"),
            keras_metrics.Precision(thresholds=0.4, name="precision"),
            keras_metrics.F1Score(average="macro"),
            keras_metrics.RootMeanSquaredError(),
            keras_metrics.CosineSimilarity(),
            keras_metrics.OneHotMeanIoU(3, name="iou"),
            keras_metrics.CategoricalHinge(),
        ],
        "weighted_metrics": [keras_metrics.MeanSquaredError(name="weighted_mse")],
    }


def softmax_model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])


def sure_model():
    """Of probabilities that are 0 and 1, of which a loss needs the logits."""
    steep = keras.initializers.RandomNormal(stddev=60.0, seed=3)
    dense = keras.layers.Dense(3, "softmax", kernel_initializer=steep)
    return keras.Sequential([keras.Input((6,)), dense])


def mean_cross_entropy(y_true, y_pred):
    return keras.ops.mean(keras.losses.categorical_crossentropy(y_true, y_pred))


def sure_options(loss):
    return lambda: {
        "loss": loss,
        "metrics": [mean_cross_entropy],
        "weighted_metrics": ["categorical_crossentropy"],
    }


def tokens(rows):
    """`[rows, 5]` tokens, of which 0 is masked, and a class for each of them, -1 for none."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 7, (rows, 5))
    return x, np.where(rng.random((rows, 5)) < 0.3, -1, rng.integers(0, 3, (rows, 5)))


def token_model(mask_zero):
    def build():
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(7, 4, mask_zero=mask_zero),
                layers.GRU(4, return_sequences=True),
                layers.Dense(3),
            ]
        )

    return build


def ignoring():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return {"loss": loss, "weighted_metrics": []}


def labels_of_tokens(rows):
    x, y = tokens(rows)
    return x, np.abs(y)


def of_tokens():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}


def regularised():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer="l1"),
            layers.ActivityRegularization(l2=0.1),
            layers.Dense(3),
        ]
    )


def convolutions(synchronized):
    def build():
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Reshape((2, 3, 1)),
                layers.Conv2D(4, 2, padding="same", use_bias=False),
                layers.BatchNormalization(synchronized=synchronized, momentum=0.7),
                layers.Activation("tanh"),
                layers.Flatten(),
                layers.BatchNormalization(synchronized=synchronized, renorm=synchronized),
                layers.Dense(3),
            ]
        )

    return build


class Block(keras.layers.Layer):
    """A layer of a user's, with BatchNorm in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(5)
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, x, training=False):
        return keras.ops.tanh(self.norm(self.dense(x), training=training))


def with_block():
    x = inputs = keras.Input((6,))
    x = Block()(x)
    x = keras.ops.concatenate([x, keras.ops.sin(x)], -1)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def mean_of_batch(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true)) * 3


def sum_of_batch(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_pred - y_true)) * 0.1


def functions(loss):
    return lambda: {"loss": loss, "metrics": [mean_of_batch, sum_of_batch]}


def reduced(reduction):
    def options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        return {"loss": loss, "metrics": ["accuracy"]}

    return options


def weights(rows):
    return np.random.default_rng(3).uniform(0.1, 2, rows)


CASES = {
    "stock": {},
    "clipping": {"optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)},
    "adam": {"optimizer": lambda: keras.optimizers.Adam(0.01)},
    "sum": {"compile_options": reduced("sum")},
    "mean_with_sample_weight": {
        "compile_options": reduced("mean_with_sample_weight"),
        "sample_weight": weights,
    },
    "sample_weight": {"sample_weight": weights},
    "class_weight": {"class_weight": {0: 1.0, 1: 0.2, 2: 3.0}},
    "several": {"build": pair_model, "compile_options": pair_options, "data": pairs},
    "several_weighted": {
        "build": pair_model,
        "compile_options": pair_options,
        "data": pairs,
        "sample_weight": lambda rows: {"class": weights(rows), "value": weights(rows)[::-1]},
    },
    "metrics": {"build": softmax_model, "compile_options": one_hot_options, "data": one_hot},
    "weighted_metrics": {
        "build": softmax_model,
        "compile_options": one_hot_options,
        "data": one_hot,
        "sample_weight": weights,
    },
    "ignored_classes": {
        "build": token_model(False),
        "compile_options": ignoring,
        "data": tokens,
    },
    "masked": {
        "build": token_model(True),
        "compile_options": of_tokens,
        "data": labels_of_tokens,
    },
    "regularizers": {"build": regularised},
    "batch_norm": {"build": convolutions(True)},
    "layer_of_a_user": {"build": with_block},
    "function_of_a_mean": {"compile_options": functions(mean_of_batch), "data": one_hot},
    "sure": {
        "build": sure_model,
        "compile_options": sure_options("categorical_crossentropy"),
        "data": one_hot,
    },
    "function_of_sure": {
        "build": sure_model,
        "compile_options": sure_options(mean_cross_entropy),
        "data": one_hot,
    },
    "function_of_a_sum": {"compile_options": functions(sum_of_batch), "data": one_hot},
}
ROWS, BATCH = 4 * 3 + 2, 4


def trained(strategy, sample_weight=None, **options):
    """With validation, of another number of rows, and predictions."""
    data = options.pop("data", tiny_data)
    x, y = data(ROWS)
    given = {} if sample_weight is None else {"sample_weight": sample_weight(ROWS)}
    training = train(
        strategy,
        data=None,
        x=x,
        y=y,
        batch_size=BATCH,
        validation_data=data(7),
        validation_batch_size=5,
        **given,
        **options,
    )
    predictions = training.model.predict(data(9)[0], batch_size=5, verbose=0)
    evaluated = training.model.evaluate(*data(9), batch_size=7, verbose=0)
    leaves = keras.tree.flatten([predictions, evaluated])
    training.extra = {f"after/{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    return training


BY_DEFAULT = {"stock", "several_weighted", "batch_norm", "layer_of_a_user"}
PARAMETERS = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_batches_of_any_size_train_as_on_one_device(strategy, case):
    reference, ours = trained(None, **CASES[case]), trained(strategy, **CASES[case])
    assert_same_training(reference.results(), ours.results(), EXACT)


def drawing():
    layers = [keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.1)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def test_a_core_draws_for_its_rows_what_one_device_draws():
    """On CPUs, where the first rows of a larger draw are those of a smaller one."""
    reference, ours = (trained(each, build=drawing) for each in (None, CpuStrategy(1)))
    assert_same_training(reference.results(), ours.results(), EXACT)


def test_several_cores_draw_and_average_statistics_as_our_mirrored_strategy_does(strategy):
    """Of BatchNorm that does not synchronise, and of Dropout, one device is no reference."""

    def build():
        return keras.Sequential([keras.layers.Dropout(0.3), *convolutions(False)().layers])

    mirrored = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(3)])
    # Keras tells another history where BatchNorm's statistics are those of parts of a batch.
    reference, ours = (trained(each, build=build).results() for each in (mirrored, strategy))
    assert_same_training(reference, ours, EXACT)


# ---- how often a step is compiled ----------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch):
    """The shapes that steps are traced for, one entry for each program."""
    steps, step_on_replica = [], spmd_step._step_on_replica

    def noting(step_function, segments):
        on_replica = step_on_replica(step_function, segments)

        def run(batch):
            leaves = [leaf.shape for leaf in keras.tree.flatten(batch) if leaf is not None]
            steps.append((step_function.__name__, leaves[0]))
            return on_replica(batch)

        return run

    monkeypatch.setattr(spmd_step, "_step_on_replica", noting)
    return steps


def compiled(scope, steps_per_execution=1):
    with scope.scope():
        keras.utils.set_random_seed(1)
        model = tiny_model()
        options = {**tiny_compile_options(), "steps_per_execution": steps_per_execution}
        model.compile(momentum_sgd(), **options)
    return model


def of_sizes(*sizes):
    x, y = tiny_data(sum(sizes))

    def batches():
        start = 0
        for size in sizes:
            yield x[start : start + size], y[start : start + size]
            start += size

    specs = tf.TensorSpec([None, 6], x.dtype), tf.TensorSpec([None], y.dtype)
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


SIZES = 3, 8, 1, 5, 7, 2


def test_batches_of_six_sizes_are_one_program(traced):
    strategy = CpuStrategy(2)
    strategy._batch_rows = 9
    model, reference = compiled(strategy), compiled(tf.distribute.get_strategy())
    ours, theirs = (m.fit(of_sizes(*SIZES), epochs=2, verbose=0) for m in (model, reference))
    assert set(traced) == {("train_step", (5, 6))} and len(traced) == 2  # one for each core
    assert_same_training(
        {**theirs.history, "weights": reference.get_weights()[0]},
        {**ours.history, "weights": model.get_weights()[0]},
        EXACT,
    )


@pytest.mark.long
@pytest.mark.parametrize("rows", [24, 26, 5])
def test_arrays_are_one_program_for_training_and_one_for_validation(traced, rows):
    model = compiled(CpuStrategy(2))
    x, y = tiny_data(rows)
    model.fit(x, y, batch_size=12, epochs=2, validation_data=(x, y), verbose=0)
    each = [("train_step", (6, 6)), ("test_step", (6, 6))]
    assert sorted(traced) == sorted(each * 2)  # for each core


def test_a_pipeline_tells_how_many_rows_its_batches_have(traced):
    data = tf.data.Dataset.from_tensor_slices(tiny_data(17)).batch(8).prefetch(2)
    compiled(CpuStrategy(2)).fit(data, epochs=2, verbose=0)
    assert traced == [("train_step", (4, 6))] * 2


def test_batches_of_whole_rows_are_not_touched(traced):
    """Of a known size, a multiple of the number of cores: no row of padding, no weights."""
    model = compiled(CpuStrategy(2))
    data = tf.data.Dataset.from_tensor_slices(tiny_data(17)).batch(8, drop_remainder=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd_step, "without_padding", None)  # calling it fails
        model.fit(data, verbose=0)
    assert traced == [("train_step", (4, 6))] * 2


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_several_steps_an_execution_are_of_known_shapes(traced, drop_remainder):
    """What TensorFlow hands a loop over steps has lost them, which a program needs."""
    data = tf.data.Dataset.from_tensor_slices(tiny_data(17)).batch(8, drop_remainder)
    model, reference = compiled(CpuStrategy(2), 2), compiled(tf.distribute.get_strategy())
    for each in (model, reference):
        each.fit(data, epochs=2, verbose=0)
    assert set(traced) == {("train_step", (4, 6))}
    ours, theirs = ({"weights": each.get_weights()[0]} for each in (model, reference))
    assert_same_training(theirs, ours, EXACT)


# ---- *_on_batch ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("batch_rows", [None, 9])
def test_on_batch_any_number_of_rows_is_one_devices(traced, batch_rows):
    strategy = CpuStrategy(2)
    strategy._batch_rows = batch_rows

    def results(scope):
        model = compiled(scope)
        found = []
        for rows in (8, 7, 3, 8, 1):
            x, y = tiny_data(rows, seed=rows)
            found += [model.train_on_batch(x, y), model.test_on_batch(x, y, weights(rows))]
            found += [model.predict_on_batch(x)]
        return [np.asarray(each) for each in [*found, *model.get_weights()]]

    ours, reference = results(strategy), results(tf.distribute.get_strategy())
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, atol=EXACT)
    rows_of_a_core = {shape[0] for _, shape in traced}
    assert rows_of_a_core == {4} if batch_rows is None else {5}
    # Keras's own function has a trace for the first size, and one for all others.
    assert len(traced) == 2 * 2 * 2


def test_on_batch_each_core_is_sent_its_rows_alone():
    """What enters a core's function has its rows, not those of the batch."""
    strategy, sent = CpuStrategy(2), []

    def run(fn, args=(), kwargs=None, options=None):
        sent.append([leaf.shape for leaf in strategy.experimental_local_results(args[0][0])])
        return stock(fn, args, kwargs, options)

    stock = super(spmd_step.SpmdKerasSteps, strategy).run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute.MirroredStrategy, "run", staticmethod(run))
        compiled(strategy).predict_on_batch(tiny_data(8)[0])
    assert sent == [[(4, 6), (4, 6)]]


# ---- padding itself ------------------------------------------------------------------------------


def test_rows_of_padding_repeat_rows_of_the_batch():
    batch = padded({"x": tf.range(7)[:, None]}, num_replicas=2, rows=5)
    np.testing.assert_array_equal(batch.data["x"][:, 0], [0, 1, 2, 3, 4, 4, 5, 6, 6, 6])
    np.testing.assert_array_equal(batch.totals, [7, 7, 7, 7, 0, 7, 7, 7, 0, 0])
    batch = padded(tf.constant([9]), num_replicas=3, rows=1)
    np.testing.assert_array_equal(batch.data, [9, 9, 9])
    np.testing.assert_array_equal(batch.totals, [1, 0, 0])


# ---- what cannot be exact is refused -------------------------------------------------------------


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnMetric(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred[:, 0])


class Centring(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, 0, keepdims=True)


class CentringInTraining(Centring):
    def call(self, x, training=False):
        return super().call(x) if training else x


class Largest(keras.regularizers.Regularizer):
    def __call__(self, x):
        return keras.ops.max(x)


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.seen.assign_add(keras.ops.sum(x))
        return x


def then_dense(layer, model=keras.Sequential):
    return lambda: model([keras.Input((6,)), layer(), keras.layers.Dense(3)])


def centred():
    inputs = keras.Input((6,))
    x = inputs - keras.ops.mean(inputs, 0, keepdims=True)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def own_metric():
    return {**tiny_compile_options(), "metrics": [OwnMetric(name="own")]}


ROWS_MEET = {
    "a row's result depends on the other rows": {"build": then_dense(Centring)},
    "depends on the other rows of its batch": {"build": then_dense(CentringInTraining)},
    "result depends on the other rows": {"build": centred},
}
REFUSED = {
    "OwnStep.train_step is not Keras's own": {
        "build": then_dense(lambda: keras.layers.Activation("tanh"), OwnStep)
    },
    r"Metric 'own' \(OwnMetric\)": {"compile_options": own_metric},
    "function of all rows": {"compile_options": lambda: {"loss": "dice"}, "data": one_hot},
    "adds a loss of all rows": {"build": then_dense(Adding)},
    "keeps a state, which may depend": {"build": then_dense(Counting)},
    "activity_regularizer, Largest, that is not": {
        "build": then_dense(lambda: keras.layers.Dense(6, activity_regularizer=Largest()))
    },
    "reduction='none'": {"compile_options": reduced("none")},
}


@pytest.mark.parametrize(
    ("message", "cores"), [*((m, 1) for m in ROWS_MEET), *((m, 2) for m in REFUSED)]
)
def test_what_would_count_padding_is_refused(message, cores):
    options = {"rows": 10, "batch_size": 4, **{**ROWS_MEET, **REFUSED}[message]}
    with pytest.raises(ValueError, match=message) as refused:
        train(CpuStrategy(cores), **options)
    assert "drop_remainder=True" in str(refused.value)


@pytest.mark.parametrize("options", ROWS_MEET.values())
def test_rows_that_meet_are_refused_on_several_cores(options):
    with pytest.raises(ValueError, match="must be computed of that row alone"):
        train(CpuStrategy(2), rows=8, batch_size=4, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("message", "cores"),
    [*((m, 1) for m in ROWS_MEET), *((m, 2) for m in REFUSED if "none" not in m)],
)
def test_what_is_refused_trains_on_whole_batches(message, cores):
    """The way out that the refusal names."""
    options = {"data": tiny_data, **{**ROWS_MEET, **REFUSED}[message]}
    data = tf.data.Dataset.from_tensor_slices(options.pop("data")(10))
    train(CpuStrategy(cores), data=None, x=data.batch(4, drop_remainder=True), **options)


def test_batches_of_an_unknown_size_ask_for_it():
    with pytest.raises(ValueError, match=r"TPUStrategy\(batch_rows=64\)"):
        compiled(CpuStrategy(2)).fit(of_sizes(3, 4), verbose=0)


def test_a_batch_of_more_rows_than_was_said_is_named():
    strategy = CpuStrategy(2)
    strategy._batch_rows = 4
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"TPUStrategy\(batch_rows="):
        compiled(strategy).fit(of_sizes(3, 5), verbose=0)


def test_ragged_rows_are_refused():
    ragged = tf.RaggedTensor.from_row_lengths(np.ones(6), [1, 2, 3])
    data = tf.data.Dataset.from_tensor_slices((ragged, np.ones(3))).batch(2)
    with pytest.raises(ValueError, match="RaggedTensorSpec"):
        compiled(CpuStrategy(2)).fit(data, verbose=0)


def test_a_failed_step_leaves_no_hooks_behind():
    strategy = CpuStrategy(2)
    with contextlib.suppress(ValueError):
        train(strategy, build=then_dense(Adding), rows=10, batch_size=4)
    model = compiled(strategy)
    model.fit(*tiny_data(10), batch_size=4, verbose=0)
    assert "update_state" not in vars(model.metrics[0])
    assert all("_get_own_losses" not in vars(layer) for layer in model.layers)
