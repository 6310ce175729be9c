"""Weights in pieces that are kept whole in a step: `Sharding("gradients")`, `("optimizer")`."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, tiny_data, train
from tests.hybrid.meshes import hybrid
from tests.hybrid.test_shards import stored
from tfparallel.hybrid.kept_wholes import KeptStageVariable
from tfparallel.tensor_parallel.rows import Rows

pytestmark = pytest.mark.turns

MESHES = [{"shard": 2, "pipeline": 2}, {"shard": 2, "model": 2}]


def whole(variable):
    """Device and shape of what each replica keeps."""
    return [
        [(tf.DeviceSpec.from_string(x.device).device_index, tuple(x.shape)) for x in own]
        for own in variable.value._wholes
    ]


@pytest.mark.parametrize("what", ["gradients", pytest.param("optimizer", marks=pytest.mark.long)])
def test_weights_are_whole_and_slots_in_pieces_in_a_pipeline(what):
    training = train(hybrid(MESHES[0], what=what))
    first, _, last, _ = training.model.trainable_weights
    assert whole(first) == [[(0, (6, 8))], [(2, (6, 8))]]  # in each of two pipelines
    assert whole(last) == [[(1, (8, 3))], [(3, (8, 3))]]
    slot = next(v for v in training.model.optimizer.variables if "kernel_momentum" in v.path)
    assert stored(slot) == [[(0, (3, 8)), (2, (3, 8))]]
    assert_same_training(train(None), training)


def test_each_device_of_a_group_keeps_its_part():
    training = train(hybrid(MESHES[1], what="gradients"))
    first = training.model.trainable_weights[0]
    assert whole(first) == [[(0, (6, 4)), (1, (6, 4))], [(2, (6, 4)), (3, (6, 4))]]
    assert_same_training(train(None), training)


def test_what_is_kept_is_of_the_copy_whose_pieces_its_replica_shares():
    kept = SimpleNamespace(_number_kept=lambda part: (3, 1), shards=2, stored=Rows(0, (2,) * 4))
    assert KeptStageVariable.place_of(kept, None) == (1, 4 + 1)  # replicas 2 and 3 share copy 1


class TwoRounds(keras.Model):
    """Goes forward again behind its own update, as a GAN does: with the weights of now."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Halving(keras.Model):
    """Assigns a weight itself before it goes forward."""

    def train_step(self, data):
        kernel = self.layers[1].kernel
        kernel.assign(kernel * 0.5)
        return super().train_step(data)


def of_three_layers(kind):
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", name="dense_0")(x)
    y = layers.Dense(8, "tanh", name="dense_1")(y)
    return kind(x, layers.Dense(3, name="dense_2")(y))


def only_loss():
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (TwoRounds, MESHES[0]),
        pytest.param(TwoRounds, MESHES[1], marks=pytest.mark.long),
        # Beside a model's axis a weight in pieces that a layer or a step assigns is refused.
        pytest.param(Halving, MESHES[0], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_layers_read_what_was_assigned_last_in_a_step(kind, sizes):
    def build():
        return of_three_layers(kind)

    training = train(hybrid(sizes, what="gradients"), build, only_loss)
    assert_same_training(train(None, build, only_loss), training)


@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_is_assigned_between_steps_is_what_the_next_one_reads(sizes):
    x, y = tiny_data(12)
    results = []
    for strategy in (hybrid(sizes, what="gradients"), None):
        keras.backend.clear_session()
        model = train(strategy, rows=12, batch_size=12).model
        model.set_weights([w * 0.5 + 0.1 for w in model.get_weights()])
        predicted = model.predict(x, verbose=0)
        loss = model.train_on_batch(x, y)[0]
        model.trainable_weights[0].assign_add(np.ones((6, 8), "float32"))
        results.append([predicted, loss, model.evaluate(x, y, verbose=0), *model.get_weights()])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def joins_in_stages(what):
    """How many functions of stages put weights together."""
    strategy = hybrid({"shard": 2, "pipeline": 2}, what=what)
    with strategy.scope():
        model = of_three_layers(keras.Model)
        model.compile("sgd", "mse")
    x, _ = tiny_data(8)
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    step = tf.function(lambda: strategy.run(model.train_step, ((x, x[:, :3]),)))
    graph = step.get_concrete_function().graph
    bodies = [
        graph._get_function(name).cached_definition.node_def
        for name in map(str, graph._functions)
        if "tfparallel_stage_" in name and "_body_" in name
    ]
    joins = [
        node for body in bodies for node in body if node.op == "ConcatV2" and node.attr["N"].i > 1
    ]
    assert bodies
    return len(joins)


@pytest.mark.long
def test_stages_put_nothing_together():
    assert joins_in_stages("parameters") > 0
    assert joins_in_stages("gradients") == 0
