"""What replicas send one another in a step, and where it meets, as read from its graph."""

import functools
from unittest import mock

import keras
import pytest
import tensorflow as tf

from tests.gpu.audit import audit
from tests.gpu.steps import GPUS, STRATEGIES, make_variables, scope_of, step_of
from tests.hybrid.meshes import hybrid
from tfparallel.internals import keras_integers

pytestmark = pytest.mark.turns

ROWS = 12


class Norm(keras.layers.BatchNormalization):
    """Without weights that have gradients: all that its replicas exchange is statistics."""

    def __init__(self, **options):
        super().__init__(center=False, scale=False, **options)


def audited(strategy_name, layers, labels="int32", metrics=(lambda: "accuracy",)):
    """A training step for `[12, 6]` rows and 3 classes, by `layers` and a Dense behind them."""
    strategy = STRATEGIES[strategy_name]()
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((6,)), *[make() for make in layers]])
        model.add(keras.layers.Dense(3))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=[make() for make in metrics], jit_compile=False)
    x, y = tf.random.normal([ROWS, 6]), tf.zeros([ROWS], labels)
    make_variables(strategy, model, (x, y))
    with mock.patch.object(keras_integers, "has_gpu", return_value=True):  # of stand-ins
        return audit(step_of(strategy, model).get_concrete_function((x, y)).graph)


def test_statistics_of_any_number_of_layers_cross_as_one_tensor_of_each_type():
    def copies(*layers):
        return audited("mirrored", layers).totals()["between_devices"]

    none, one = copies(), copies(Norm)
    assert one == none + 2  # from the second replica to the first, and the mean back
    assert copies(Norm, Norm, Norm) == one
    assert copies(Norm, lambda: Norm(dtype="float64"), Norm) == one + 2


def test_a_central_storage_sums_gradients_where_its_variables_are():
    copies = audited("central_storage", [lambda: keras.layers.Dense(4)]).copies
    gradients = {edge for edge in copies["to_host"] if edge.endswith("-> AddN (float32)")}
    assert gradients == {"MatMul -> AddN (float32)", "BiasAddGrad -> AddN (float32)"}
    assert sum(copies["to_host"][edge] for edge in gradients) == 2 * 4  # replicas, variables
    for direction in ("to_device", "between_devices"):  # no sum comes back
        assert not [edge for edge in copies[direction] if edge.startswith("AddN")]
        added = {edge for edge in copies[direction] if "-> AddN" in edge}
        assert added <= {"Pack -> AddN (float32)"}, copies[direction]  # all metrics of a replica


def test_metrics_cross_as_one_tensor_however_many_there_are():
    def copies(count):
        make = keras.metrics.SparseCategoricalCrossentropy
        metrics = [lambda i=i: make(str(i), from_logits=True) for i in range(count)]
        return audited("mirrored", [], metrics=metrics).totals()["between_devices"]

    assert copies(0) == copies(1) == copies(3)


@pytest.mark.parametrize("strategy", ["central_storage", "pipeline"])
def test_steps_are_counted_on_the_host_where_the_counter_is(strategy):
    found = audited(strategy, [lambda: keras.layers.Dense(4)])
    for direction in ("to_host", "to_device"):
        assert not [edge for edge in found.copies[direction] if "int64" in edge], found.copies


@pytest.mark.parametrize("strategy", ["mirrored", "sharded"])
def test_neither_metrics_nor_seeds_nor_counters_wait_for_a_gpu(strategy):
    """An accuracy, Dropout, and an optimizer's count of steps, for batches of a known size."""
    found = audited(strategy, [lambda: keras.layers.Dropout(0.5)])
    assert found.totals()["to_host"] == 0, found.copies["to_host"]


THAT_DRAW = {
    "noise": [lambda: keras.layers.GaussianNoise(0.1), lambda: keras.layers.GaussianDropout(0.2)],
    "lstm": [
        lambda: keras.layers.Reshape((2, 3)),
        lambda: keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
    ],
    "alpha": [lambda: keras.layers.AlphaDropout(0.1)],
    "spatial": [lambda: keras.layers.Reshape((2, 3)), lambda: keras.layers.SpatialDropout1D(0.2)],
}


@pytest.mark.parametrize("layers", THAT_DRAW)
@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "tensor_parallel", "pipeline"])
def test_layers_draw_by_seeds_that_stay_where_they_are(strategy, layers):
    flat = [keras.layers.Flatten] if layers == "spatial" else []
    found = audited(strategy, [*THAT_DRAW[layers], *flat])
    assert not found.faults()
    assert not found.copies["to_host"]


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_rows_that_draw_for_themselves_ask_no_gpu(axis):
    strategy = functools.partial(hybrid, {axis: 2}, seed_by="row", devices=GPUS)
    with mock.patch.dict(STRATEGIES, by_row=strategy):
        found = audited("by_row", [lambda: keras.layers.Dropout(0.5)])
    assert not found.faults()
    assert not found.copies["to_host"]


def test_a_loop_of_the_users_draws_where_its_replicas_are():
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope():
        generator = keras.random.SeedGenerator(1)

    @tf.function
    def step():
        return strategy.run(lambda: keras.random.normal([3], seed=generator))

    with mock.patch.object(keras_integers, "has_gpu", return_value=True):
        found = audit(step.get_concrete_function().graph)
    assert not found.faults()
    assert not found.copies["to_host"]


def test_tokens_and_labels_that_a_model_computes_are_looked_up_without_the_host():
    strategy = STRATEGIES["tensor_parallel"]()
    with strategy.scope():
        words = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(11, 4)(keras.layers.Lambda(lambda x: (2 * x) % 11)(words))
        model = keras.Model(words, keras.layers.Dense(6)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        model.compile("sgd", loss, jit_compile=False)
    batch = tf.ones([ROWS, 4], tf.int32), tf.ones([ROWS, 4], tf.int32)
    make_variables(strategy, model, batch)
    with mock.patch.object(keras_integers, "has_gpu", return_value=True):
        found = audit(step_of(strategy, model).get_concrete_function(batch).graph)
    assert not found.faults()
    assert not found.copies["to_host"]


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_gradients_in_bfloat16_have_kernels_where_they_are_weighed():
    """A step of the user's has losses of its replicas' rows, so that gradients are weighed."""
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope():
        model = OwnStep([keras.Input((6,)), keras.layers.Dense(3, dtype="bfloat16")])
        model.compile("sgd", "mse", jit_compile=False)
    batch = tf.random.normal([ROWS, 6]), tf.zeros([ROWS, 3])
    make_variables(strategy, model, batch)
    found = audit(step_of(strategy, model).get_concrete_function(batch).graph)
    assert not [each for each in found.without_kernel if each.startswith("Mul")]


def test_tokens_stay_on_their_gpu():
    found = audited("one_device", [_TakesRows])
    assert found.totals()["to_host"] == 0, found.copies["to_host"]


class _TakesRows(keras.layers.Layer):
    """An Embedding of the signs of its inputs, as int32 on the device."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(2, 3)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        rows = self.table(keras.ops.cast(x > 0, "int32"))
        return keras.ops.reshape(rows, [-1, 18])
