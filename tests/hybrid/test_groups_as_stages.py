"""Pipelines of groups of devices: what the conformance suite cannot ask."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, cpu_mesh_of, tiny_data, train
from tests.hybrid.models_of_matrix import normalized
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel import HybridStrategy, PipelineOptions
from tfparallel.internals import keras_integers
from tfparallel.internals.graphs import functions_of

pytestmark = pytest.mark.turns

MEGATRON = {
    ".*up_./kernel": (None, "model"),
    ".*up_./bias": ("model",),
    ".*down_./kernel": ("model", None),
}
PAIRS = [["up_0", "down_0"], ["up_1", "down_1"]]


def groups(num_microbatches=2, layouts=None, **options):
    """Two stages of two devices each."""
    mesh = cpu_mesh_of(pipeline=2, model=2)
    layout_map = LayoutOfAnything(mesh)
    if layouts is not None:
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in layouts.items():
            layout_map[pattern] = axes
    options = PipelineOptions(num_microbatches, **options)
    return HybridStrategy(mesh, pipeline=options, layout_map=layout_map)


def two_pairs():
    pairs = [
        (layers.Dense(32, "tanh", name=f"up_{i}"), layers.Dense(16, name=f"down_{i}"))
        for i in range(2)
    ]
    return keras.Sequential([keras.Input((16,)), *(layer for pair in pairs for layer in pair)])


def device_numbers(variables):
    return [tf.DeviceSpec.from_string(each.device).device_index for each in variables]


def test_parts_and_slots_are_on_the_devices_of_their_stage():
    training = train(groups())
    first, _, last, _ = training.model.trainable_weights
    assert device_numbers(first.value.parts[0]) == [0, 1]
    assert device_numbers(last.value.parts[0]) == [2, 3]
    slots = [v for v in training.model.optimizer.variables if "momentum" in v.path]
    assert device_numbers(slots[0].value.parts[0]) == [0, 1]
    assert [part.shape.as_list() for part in first.value.parts[0]] == [[6, 4], [6, 4]]


def graph_of_step(strategy):
    with strategy.scope():
        model = two_pairs()
        model.compile("sgd", "mse")
    x = tf.random.normal((8, 16))
    model.fit(x, x, batch_size=8, verbose=0)
    return (
        tf.function(lambda: strategy.run(model.train_step, ((x, x),))).get_concrete_function().graph
    )


def operations_of_functions(graph):
    """For each function of a pipeline, how many operations of a type each device runs."""
    counts = collections.defaultdict(collections.Counter)
    for function in functions_of(graph):
        name, is_body, _ = function.cached_definition.signature.name.partition("_body_")
        if is_body:
            counts[name.removeprefix("tfparallel_")].update(
                (node.op, tf.DeviceSpec.from_string(node.device).device_index)
                for node in _nodes_that_run(function.cached_definition)
            )
    return counts


def _nodes_that_run(definition):
    """The nodes that a result of the function depends on; TensorFlow removes the others."""
    nodes = {node.name: node for node in definition.node_def}
    todo, found = [*definition.ret.values(), *definition.control_ret.values()], {}
    while todo:
        name = todo.pop().lstrip("^").split(":")[0]
        if name in nodes and name not in found:
            found[name] = nodes[name]
            todo += nodes[name].input
    return found.values()


def test_a_stage_computes_and_adds_up_evenly_on_its_devices_and_gathers_nothing():
    graph = graph_of_step(groups(layouts=MEGATRON, partition=PAIRS))
    counts = operations_of_functions(graph)
    for stage, devices in enumerate([(0, 1), (2, 3)]):
        forward, backward = counts[f"stage_{stage}"], counts[f"stage_{stage}_backward"]
        # Backward: both kernels' gradients, the hidden's, and on the last stage the input's.
        assert [forward["MatMul", device] for device in devices] == [2, 2]
        assert [backward["MatMul", device] for device in devices] == [3 + stage] * 2
        assert [backward["TanhGrad", device] for device in devices] == [1, 1]
        assert not {"ConcatV2", "SplitV"} & {operation for operation, _ in forward + backward}
    calls = [op for op in graph.get_operations() if op.type == "RemoteCall"]
    sums = [op for op in calls if "tfparallel_sum" in op.get_attr("f").name]
    devices = {str(tf.get_static_value(op.inputs[0]))[-2] for op in sums}
    assert devices == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zero_bubble"},
        pytest.param({"schedule": "gpipe"}, marks=pytest.mark.long),
        pytest.param({"rematerialize": "full"}, marks=pytest.mark.long),
        pytest.param({"offload": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_options_of_a_pipeline_are_options_of_groups(options):
    assert_same_training(train(None), train(groups(3, **options)))


def one_slow_stage(sizes, numbers, **options):
    """A device that is named twice is all that its stage has; layers of both kinds are in parts."""
    devices = [f"cpu:{number}" for number in numbers]
    mesh = keras.distribution.DeviceMesh(tuple(sizes.values()), tuple(sizes), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["dense_[13].*kernel"] = (None, "model")
    layout_map["dense_2.*kernel"] = ("model", None)
    partition = [["dense_0"], ["dense_1", "dense_2"], ["dense_3"]]
    if sizes["pipeline"] == 2:
        partition[1:] = [["dense_[123]"]]
    pipeline = PipelineOptions(4, partition=partition, **options)
    return HybridStrategy(mesh, pipeline=pipeline, layout_map=layout_map)


def four_layers():
    x = y = keras.Input((6,))
    for i in range(3):
        y = layers.Dense(8, "tanh", name=f"dense_{i}")(y)
    return keras.Model(x, layers.Dense(3, name="dense_3")(y))


@pytest.mark.parametrize(
    ("sizes", "numbers", "options"),
    [
        ({"pipeline": 3, "model": 2}, [0, 0, 1, 2, 3, 3], {}),
        ({"pipeline": 3, "model": 2}, [0, 0, 1, 2, 3, 3], {"schedule": "zero_bubble"}),
        ({"pipeline": 3, "model": 2}, [0, 0, 1, 2, 3, 3], {"rematerialize": "full"}),
        ({"data": 2, "pipeline": 2, "model": 2}, [0, 0, 1, 1, 2, 2, 3, 3], {}),
        ({"shard": 2, "pipeline": 2, "model": 2}, [0, 0, 1, 1, 2, 2, 3, 3], {}),
    ],
    ids=str,
)
def test_a_stage_may_have_fewer_devices_than_others(sizes, numbers, options):
    strategy = one_slow_stage(sizes, numbers, **options)
    training = train(strategy, four_layers, optimizer=clipped_adam)
    assert_same_training(train(None, four_layers, optimizer=clipped_adam), training)
    stages, _ = strategy.summary(training.model).tables
    own = [stage.device for stage in stages.stages]
    by_stages = {2: ["CPU:0, CPU:2", "CPU:1, CPU:3"], 3: ["CPU:0", "CPU:1, CPU:2", "CPU:3"]}
    assert own == by_stages[sizes["pipeline"]]


def test_batch_norm_in_parts_on_the_one_stage_that_has_several_devices():
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ("pipeline", "model"), ["cpu:0", "cpu:1", "cpu:2", "cpu:2"]
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["dense_0.*kernel"] = (None, "model")
    layout_map["norm.*"] = ("model",)
    layout_map["dense_1.*kernel"] = ("model", None)
    partition = [["dense_0", "norm", "activation*", "dense_1"], ["dense_2"]]
    pipeline = PipelineOptions(2, partition=partition, batch_norm="deferred")
    strategy = HybridStrategy(mesh, pipeline=pipeline, layout_map=layout_map)
    options = {"rows": 14, "batch_size": 7}
    training = train(strategy, normalized, **options)
    assert_same_training(train(None, functools.partial(normalized, 2), **options), training)
    for weight in training.model.get_layer("norm").trainable_weights:
        assert device_numbers(weight.value.parts[0]) == [0, 1]


def test_a_device_of_two_stages_is_refused():
    with pytest.raises(ValueError, match="must name each device once. Received: 'CPU:1' and"):
        one_slow_stage({"pipeline": 3, "model": 2}, [0, 1, 1, 2, 3, 3])


def test_one_microbatch_needs_no_schedule():
    assert_same_training(train(None), train(groups(1)))


def with_loop():
    x = keras.Input((4,), dtype="int32")
    y = layers.Embedding(11, 8, name="embedding")(x)
    y = layers.LSTM(6, name="lstm")(y)
    return keras.Model(x, layers.Dense(3, name="dense")(y))


def sequences(rows):
    random = np.random.default_rng(0)
    return random.integers(0, 11, (rows, 4)), random.integers(0, 3, rows)


@pytest.mark.parametrize(
    "dim", [0, pytest.param(1, marks=pytest.mark.long)], ids=["rows", "columns"]
)
def test_rows_of_a_table_and_loops_are_trained_as_by_one_device(dim):
    """The norm of a table's gradient is that of a row for each token, as one device has it."""
    layouts = {
        ".*embeddings": ("model", None) if dim == 0 else (None, "model"),
        ".*lstm.*kernel": (None, "model"),
        ".*dense.*kernel": ("model", None),
    }
    reference, candidate = (
        train(strategy, with_loop, data=sequences, optimizer=clipped_adam)
        for strategy in (None, groups(layouts=layouts))
    )
    assert_same_training(reference, candidate, atol=2e-5)


def clipped_adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


class Normalized(layers.Dense):
    """Changes its own kernel when it is called."""

    def call(self, inputs, training=None):
        if training:
            self.kernel.assign(self.kernel / 2)
        return super().call(inputs, training=training)


def test_a_layer_that_assigns_a_weight_in_parts_is_refused_by_name():
    def build():
        return keras.Sequential([keras.Input((6,)), Normalized(8), layers.Dense(3)])

    with pytest.raises(ValueError, match="part of .*normalized/kernel"):
        train(groups(layouts={".*normalized.*kernel": (None, "model")}), build)


class MovesThere(keras.Model):
    """Moves a weight, and computes with it."""

    def train_step(self, data):
        x, y = data
        self.layers[1].kernel.assign(self.layers[1].kernel * 0.9)
        loss = self.compute_loss(x, y, self(x, training=True))
        return {"loss": loss}


def test_a_step_that_computes_with_a_weight_it_has_assigned_is_refused_by_name():
    def build():
        given = keras.Input((6,))
        return MovesThere(given, layers.Dense(3)(layers.Dense(8, name="moved")(given)))

    with pytest.raises(ValueError, match="after it has assigned it.* 'moved/kernel'"):
        train(groups(), build)


def test_a_layout_that_matches_nothing_is_refused_by_name():
    with pytest.raises(ValueError, match="nothing_like_it"):
        train(groups(layouts={"nothing_like_it": (None, "model")}))


def test_a_layout_of_another_mesh_is_refused():
    layout_map = keras.distribution.LayoutMap(cpu_mesh_of(data=2, model=2))
    with pytest.raises(ValueError, match="data 2 x model 2"):
        HybridStrategy(cpu_mesh_of(pipeline=2, model=2), layout_map=layout_map)


def test_the_summary_tells_the_devices_of_a_stage_and_its_weights_in_parts():
    strategy = groups(layouts={".*dense.*kernel": (None, "model")})
    training = train(strategy)
    text = str(strategy.summary(training.model))
    assert "CPU:0, CPU:1" in text
    assert "CPU:2, CPU:3" in text
    assert "4 + 4" in text
    assert "CPU:2" in str(strategy.profile(training.model, tiny_data(12)))


def words_by_words():
    tokens = keras.Input((4,), dtype="int32")
    vectors = layers.Embedding(6, 4, name="table")(tokens)
    return keras.Model(tokens, layers.Dense(5, name="scores")(vectors))


def of_words(last=5):
    def data(rows):
        numbers = np.arange(4 * rows).reshape(rows, 4)
        tokens = numbers % 6
        return np.where(tokens == 5, last, tokens), numbers % 5

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"build": words_by_words, "compile_options": lambda: {"loss": loss}, "data": data}


BY_WORDS = {"table/embeddings": ("model", None), "scores/kernel": (None, "model")}


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("last", [5, -1])
def test_words_of_a_stage_are_those_of_one_device(monkeypatch, has_gpus, last):
    reference = train(None, **of_words(last))
    monkeypatch.setattr(keras_integers, "has_gpu", lambda devices: has_gpus)
    assert_same_training(reference, train(groups(layouts=BY_WORDS), **of_words(last)))


@pytest.mark.parametrize("last", [6, -7])
def test_a_word_that_is_none_is_an_error_and_nan_on_gpus(monkeypatch, last):
    with pytest.raises(tf.errors.OpError):
        train(groups(layouts=BY_WORDS), **of_words(last))
    monkeypatch.setattr(keras_integers, "has_gpu", lambda devices: True)
    assert np.isnan(train(groups(layouts=BY_WORDS), **of_words(last)).history["loss"][-1])
