"""Updates of shards are those of one device, whatever an optimizer asks of the whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.models import MODELS
from tests.helpers import assert_same_training, tiny_compile_options, tiny_data, tiny_model, train

pytestmark = pytest.mark.turns

optimizers = keras.optimizers


def sharded(devices: int = 3, **options):
    options = {"min_size": 1, **options}
    return tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(devices)], **options)


class OfTheWhole(optimizers.SGD):
    """Looks at all numbers of a gradient, as nobody knows of it."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient / (1e-3 + keras.ops.max(keras.ops.abs(gradient)))
        super().update_step(gradient, variable, learning_rate)


OF_THE_WHOLE = {
    "lamb": lambda: optimizers.Lamb(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "muon": lambda: optimizers.Muon(0.01, adam_lr_ratio=0.5),
    "own": lambda: OfTheWhole(0.05, momentum=0.9),
    "own_with_all_options": lambda: OfTheWhole(
        0.05,
        momentum=0.9,
        weight_decay=0.1,
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "own_with_accumulation": lambda: OfTheWhole(0.05, gradient_accumulation_steps=2),
    "own_with_loss_scale": lambda: optimizers.LossScaleOptimizer(OfTheWhole(0.05), 64.0),
}


@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
@pytest.mark.parametrize("make", OF_THE_WHOLE.values(), ids=OF_THE_WHOLE)
def test_an_optimizer_that_looks_at_the_whole_gets_it(make, shard):
    if shard == "optimizer" and make is not OF_THE_WHOLE["own_with_all_options"]:
        pytest.skip("one optimizer with all options is enough here")
    strategy = sharded(shard=shard)
    assert_same_training(train(None, optimizer=make), train(strategy, optimizer=make))


# An embedding's rows stay apart where one device squares them before it adds them up.
ON_AN_EMBEDDING = {
    "global_clipnorm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.02),
    "clipnorm": lambda: optimizers.SGD(0.5, momentum=0.9, clipnorm=0.02),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "accumulation": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.02
    ),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, global_clipnorm=0.02), 64.0
    ),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
}


@pytest.mark.parametrize("make", ON_AN_EMBEDDING.values(), ids=ON_AN_EMBEDDING)
def test_sparse_gradients_are_those_of_one_device(make):
    model = MODELS["embedding"]
    options = {"compile_options": model.compile_options, "data": model.data, "optimizer": make}
    reference = train(None, model.build, **options)
    assert_same_training(reference, train(sharded(), model.build, **options))


def test_a_sparse_gradient_reaches_the_optimizer_as_rows_of_its_shard():
    seen = []

    def update_step(self, gradient, variable, learning_rate):
        seen.append((type(gradient), tuple(variable.shape)))
        optimizers.SGD.update_step(self, gradient, variable, learning_rate)

    model = MODELS["embedding"]
    keras.utils.set_random_seed(0)
    with sharded().scope():
        net, optimizer = model.build(), optimizers.SGD(0.1)
        optimizer.update_step = update_step.__get__(optimizer)
        net.compile(optimizer, **model.compile_options())
    x, y = model.data(6)
    net.train_on_batch(x, y)
    assert (tf.IndexedSlices, (27,)) in seen, seen  # a third of [20, 4], rounded up


@pytest.mark.parametrize(
    ("shard", "expected"), [("parameters", True), ("gradients", True), ("optimizer", False)]
)
def test_gradients_meet_early_but_where_slots_alone_are_shared(shard, expected):
    strategy = tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], shard=shard)
    with strategy.scope():
        assert strategy.extended.reduces_early(keras.optimizers.SGD(), []) is expected


@pytest.mark.parametrize("shard", ["parameters", "gradients"])
@pytest.mark.parametrize("with_loss_scale", [False, True])
def test_constraints_see_the_whole(shard, with_loss_scale):
    def build():
        constraint = keras.constraints.MaxNorm(0.5)
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, kernel_constraint=constraint),
                keras.layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm()),
            ]
        )

    def make():
        inner = optimizers.SGD(0.5, momentum=0.9)
        return optimizers.LossScaleOptimizer(inner, 64.0) if with_loss_scale else inner

    options = {"build": build, "optimizer": make}
    assert_same_training(train(None, **options), train(sharded(shard=shard), **options))


class TwoOptimizers(keras.Model):
    """The second half is trained on what the first is after its update."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(3)
        self.of_second = optimizers.Adam(0.01, global_clipnorm=0.1)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.of_second)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_follows_an_update_reads_all_of_it(shard, run_eagerly):
    def options():
        return {"loss": tiny_compile_options()["loss"], "run_eagerly": run_eagerly}

    arguments = {"build": TwoOptimizers, "compile_options": options}
    reference = train(None, **arguments)
    assert_same_training(reference, train(sharded(shard=shard), **arguments))


def test_a_custom_loop_is_exact_and_may_be_a_loop_in_a_function():
    results = []
    x, y = map(tf.constant, tiny_data(12))
    for strategy in (tfparallel.MirroredStrategy(["CPU:0"]), sharded(2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = tiny_model(), optimizers.Adam(0.01, global_clipnorm=0.1)
        num_replicas, loss_of = strategy.num_replicas_in_sync, tiny_compile_options()["loss"]
        loss_of.reduction = "none"

        def step(context, model=model, optimizer=optimizer, n=num_replicas, loss_of=loss_of):
            rows = slice(context * 12 // n, (context + 1) * 12 // n)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y[rows], model(x[rows]))) / 12
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        @tf.function
        def steps(strategy=strategy, step=step):
            def on_replica():
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                step(int(tf.get_static_value(replica)))

            for _ in tf.range(3):
                strategy.run(on_replica)

        steps()
        steps()
        results.append(model.get_weights())
    for expected, received in zip(*results, strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-6)
