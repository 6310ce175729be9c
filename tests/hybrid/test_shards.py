"""State in pieces beside pipelines and matrices in parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, cpu_mesh_of, in_float64, tiny_data, train
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel import HybridStrategy, PipelineOptions, Sharding

pytestmark = pytest.mark.turns


def sharded(what="parameters", min_size=1, **sizes):
    mesh = cpu_mesh_of(**sizes)
    options = {"shard": Sharding(what, min_size)}
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(mesh)
    if "pipeline" in sizes:
        options["pipeline"] = PipelineOptions(2)
    return HybridStrategy(mesh, **options)


def stored(variable):
    """Device and shape of what is stored of each copy."""
    return [
        [(tf.DeviceSpec.from_string(x.device).device_index, tuple(x.shape)) for x in copy]
        for copy in variable.value.parts
    ]


def test_pieces_of_a_stage_are_on_its_devices_in_all_pipelines():
    training = train(sharded(shard=2, pipeline=2))
    first, _, last, _ = training.model.trainable_weights
    assert stored(first) == [[(0, (3, 8)), (2, (3, 8))]]
    assert stored(last) == [[(1, (4, 3)), (3, (4, 3))]]
    slot = next(v for v in training.model.optimizer.variables if "kernel_momentum" in v.path)
    assert stored(slot) == stored(first)


def test_pieces_of_parts_are_on_the_devices_of_their_part():
    training = train(sharded(shard=2, model=2))
    first = training.model.trainable_weights[0]
    assert stored(first) == [[(0, (6, 2)), (2, (6, 2)), (1, (6, 2)), (3, (6, 2))]]
    joined = np.concatenate([piece.numpy() for piece in first.value.parts[0]], 1)
    np.testing.assert_array_equal(joined, first.numpy())


def clipped():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1)


def scaled_and_clipped():
    return keras.optimizers.LossScaleOptimizer(clipped(), 2.0**10, dynamic_growth_steps=2)


@pytest.mark.parametrize(
    ("sizes", "optimizer"),
    [
        ({"model": 2}, clipped),
        ({"pipeline": 2}, clipped),
        ({"pipeline": 2}, scaled_and_clipped),
        pytest.param({"model": 2}, scaled_and_clipped, marks=pytest.mark.long),
    ],
)
def test_an_accumulated_norm_is_that_of_all_gradients_on_every_replica(sizes, optimizer):
    """Copies of a bias, which is not in pieces, were 2e-3 apart after an update."""
    with in_float64():
        options = {"optimizer": optimizer, "epochs": 3}
        candidate = train(sharded(**{"shard": 2, **sizes}, min_size=20), **options)
        weights = [weight.value for weight in candidate.model.trainable_weights]
        assert {getattr(value, "shards", 1) for value in weights} == {1, 2}
        assert_same_training(train(None, **options), candidate, atol=1e-9)


def averaged():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)


@pytest.mark.parametrize("axis", ["pipeline", pytest.param("model", marks=pytest.mark.long)])
def test_averages_replace_the_weights_of_all_copies(axis):
    """Outside of a step, where copies are assigned one after another."""
    strategy = sharded(data=2, shard=2, **{axis: 1})
    assert_same_training(train(None, optimizer=averaged), train(strategy, optimizer=averaged))


def test_an_axis_of_data_holds_the_pieces_where_there_is_none_of_shards():
    training = train(sharded(data=2, model=2))
    assert len(stored(training.model.trainable_weights[0])) == 1
    assert_same_training(train(None), training)


@pytest.mark.parametrize(("shape", "piece"), [((1, 8), (1, 4)), ((2, 3), (1, 3))], ids=str)
def test_a_weight_is_cut_along_its_first_dim_with_an_index_for_each_piece(shape, piece):
    with sharded(shard=2, model=1).scope():
        layer = layers.Dense(shape[1])
        layer.build((None, shape[0]))
    assert [each for _, each in stored(layer.kernel)[0]] == [piece, piece]


def test_small_weights_are_whole():
    training = train(sharded(min_size=20, shard=2, pipeline=2))
    kernel, bias, *_ = training.model.trainable_weights
    assert len(stored(kernel)[0]) == 2
    assert len(bias.value.values) == 2  # one in each pipeline
    assert_same_training(train(None), training)


class Clipped(keras.constraints.Constraint):
    """Looks at the whole of a weight."""

    def __call__(self, w):
        return w * keras.ops.minimum(1.0, 0.5 / keras.ops.norm(w))


def constrained():
    dense = layers.Dense(8, "tanh", kernel_constraint=Clipped())
    return keras.Sequential([keras.Input((6,)), dense, layers.Dense(3)])


@pytest.mark.parametrize("sizes", [{"shard": 2, "model": 2}, {"shard": 2, "pipeline": 2}], ids=str)
def test_what_looks_at_whole_weights_is_computed_as_by_one_device(sizes):
    options = {"build": constrained, "optimizer": lambda: keras.optimizers.Lamb(0.01)}
    assert_same_training(train(None, **options), train(sharded(**sizes), **options))


class Halved(layers.Dense):
    """Changes its own kernel when it is called."""

    def call(self, inputs, training=None):
        if training:
            self.kernel.assign(self.kernel / 2)
        return super().call(inputs, training=training)


@pytest.mark.parametrize("sizes", [{"shard": 2, "model": 2}, {"shard": 2, "pipeline": 2}], ids=str)
def test_a_layer_that_assigns_a_weight_in_shards_is_refused_by_name(sizes):
    def build():
        return keras.Sequential([keras.Input((6,)), Halved(8), layers.Dense(3)])

    with pytest.raises(ValueError, match="halved.*kernel"):
        train(sharded(**sizes), build)


@pytest.mark.parametrize(
    "option",
    [
        {"units": "dense"},
        {"reshard_after_forward": False},
        {"prefetch": 2},
        {"gather_dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", ["pipeline", "model"])
def test_options_of_units_are_refused_by_name_where_there_are_none(axis, option):
    mesh = cpu_mesh_of(shard=2, **{axis: 2})
    options = {"pipeline": PipelineOptions(2)}
    if axis == "model":
        options = {"layout_map": LayoutOfAnything(mesh)}
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}="):
        HybridStrategy(mesh, shard=Sharding(**option), **options)


def test_kept_activations_of_a_stage_hold_no_gathered_weights():
    """A stage gathers again in its backward pass: else each microbatch would hold a copy."""
    strategy = sharded(shard=2, pipeline=2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "tanh", name="first"), layers.Dense(3, name="last")]
        )
        model.compile("sgd", "mse")
    x, _ = tiny_data(8)
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    step = tf.function(lambda: strategy.run(model.train_step, ((x, x[:, :3]),)))
    graph = step.get_concrete_function().graph
    bodies = {
        name: graph._get_function(name).cached_definition
        for name in map(str, graph._functions)
        if "stage_1_backward_body" in name
    }
    joins = [node for body in bodies.values() for node in body.node_def if node.op == "ConcatV2"]
    assert joins
