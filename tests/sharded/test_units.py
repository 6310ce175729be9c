"""Units: weights are gathered when a layer is called, freed after it, and gathered again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.models import MODELS
from tests.helpers import assert_same_training, tiny_data, train
from tfparallel.segments import step_segments
from tfparallel.sharded.extended import ShardedExtended

pytestmark = pytest.mark.turns

optimizers = keras.optimizers


def sharded(devices: int = 2, **options):
    options = {"min_size": 1, **options}
    return tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(devices)], **options)


@pytest.fixture
def segments(monkeypatch):
    """Those of all steps that are traced, with the operations of their graph."""
    found = []
    rewire = step_segments.rewire

    def spy(graph, own, in_xla):
        rewire(graph, own, in_xla)
        found.extend((segment, graph.get_operations()) for segment in own)

    monkeypatch.setattr(step_segments, "rewire", spy)
    return found


def taken_late(segment, operations) -> list[str]:
    """Operations of the backward pass that take what was gathered for the forward pass."""
    late = operations[segment.backward_from :]
    gathered = {id(tensor) for tensor in segment.weights}
    return [op.type for op in late if any(id(x) in gathered for x in op.inputs)]


def step(name: str, **options) -> None:
    model = MODELS[name]
    with sharded(**options).scope():
        net = model.build()
        net.compile("sgd", **model.compile_options())
    x, y = model.data(6)
    net.train_on_batch(x, y)


@pytest.mark.parametrize("name", ["mlp", "lstm", "attention", "nested"])
def test_the_backward_pass_takes_nothing_that_the_forward_pass_gathered(name, segments):
    step(name)
    begun = [(s, operations) for s, operations in segments if s.backward_from is not None]
    assert begun
    assert all(segment.weights for segment, _ in begun)
    assert [taken_late(*each) for each in begun] == [[]] * len(begun)


def test_what_is_kept_is_taken_again(segments):
    step("mlp", reshard_after_forward=False)
    assert any(taken_late(s, operations) for s, operations in segments)


@pytest.mark.parametrize(("reshard_after_forward", "times"), [(True, 2), (False, 1)])
def test_each_weight_is_gathered_once_or_once_in_each_pass(
    reshard_after_forward, times, monkeypatch
):
    gathered = []
    wholes = ShardedExtended._wholes

    def spy(self, variables, parts, i, *options):
        graph = tf.compat.v1.get_default_graph()
        gathered.extend((id(graph), id(variable), i) for variable in variables)
        return wholes(self, variables, parts, i, *options)

    with sharded(reshard_after_forward=reshard_after_forward).scope():
        net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        net.compile("sgd", "mse")
    monkeypatch.setattr(ShardedExtended, "_wholes", spy)
    net.train_on_batch(np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32"))
    step = next(graph for graph, _, i in gathered if i == 1)  # another graph builds the model
    of_step = [each for each in gathered if each[0] == step]
    assert len(set(of_step)) == 4 * 2
    assert {of_step.count(each) for each in of_step} == {times}


def ahead(prefetch: int, segments) -> list[int]:
    """For each unit of a chain of 4, how many units before it its gather waits for."""
    with sharded(prefetch=prefetch).scope():
        layers = [keras.layers.Dense(6) for _ in range(4)]
        net = keras.Sequential([keras.Input((6,)), *layers])
        net.compile("sgd", "mse")
    net.predict_on_batch(np.zeros((4, 6), "float32"))
    own = [segment for segment, _ in segments[:4]]  # of the first replica
    inputs = [segment.inputs[0].op for segment in own]
    return [
        number - max(k for k, op in enumerate(inputs) if op in _waits_for(segment.weights[0].op))
        for number, segment in enumerate(own)
    ]


def _waits_for(operation) -> set:
    found, todo = set(), [operation]
    while todo:
        op = todo.pop()
        if op not in found:
            found.add(op)
            todo += [*op.control_inputs, *(x.op for x in op.inputs)]
    return found


@pytest.mark.parametrize(("prefetch", "expected"), [(0, [0, 0, 0, 0]), (2, [0, 1, 2, 2])])
def test_weights_are_gathered_so_many_units_ahead(prefetch, expected, segments):
    assert ahead(prefetch, segments) == expected


@pytest.mark.parametrize("shard", ["parameters", "gradients", "optimizer"])
def test_whole_gradients_do_not_reach_the_end_of_the_backward_pass(shard, monkeypatch):
    shapes = []
    reduce = ShardedExtended._weigh_and_reduce

    def spy(self, gradients):
        shapes.append([tuple(g.shape) for g in gradients])
        return reduce(self, gradients)

    monkeypatch.setattr(ShardedExtended, "_weigh_and_reduce", spy)
    step("mlp", shard=shard)
    is_whole = shard == "optimizer"
    assert shapes
    for each in shapes:
        assert [len(shape) > 1 for shape in each[::2]] == [is_whole] * len(each[::2])


def above_stored(call, units, width: int, num_layers: int) -> int:
    """Bytes that TensorFlow has in use while a step of a chain runs, above those before it."""
    with sharded(units=units).scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(num_layers)]
        net = keras.Sequential([keras.Input((width,)), *layers])
        net.compile("sgd", "mse")
    rows = np.zeros((2, width), "float32")
    call(net, rows)  # traces
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    call(net, rows)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def test_no_more_than_two_units_are_gathered_at_a_time():
    width, num_layers, replicas = 512, 12, 2
    unit = 4 * width * width
    peaks = {
        units: above_stored(lambda net, x: net.predict_on_batch(x), units, width, num_layers)
        for units in ("*", ())
    }
    assert peaks["*"] <= 1.25 * replicas * 2 * unit
    assert peaks[()] >= 2 * peaks["*"]  # nothing orders them, nor frees them


def test_a_step_of_training_holds_two_units_and_the_parts_of_gradients():
    """With the whole gradient of one unit, and what its layer before computes from."""
    width, num_layers, replicas = 512, 12, 2
    unit = 4 * width * width
    peak = above_stored(lambda net, x: net.train_on_batch(x, x), "*", width, num_layers)
    parts = num_layers * unit
    assert peak <= parts + replicas * 5 * unit


class Tied(keras.Model):
    """Scores by the table that the tokens are looked up in."""

    def __init__(self, reads_first: bool):
        super().__init__()
        self.embedding = keras.layers.Embedding(20, 4)
        self.reads_first = reads_first

    def call(self, x):
        if self.reads_first and not self.embedding.built:
            self.embedding.build(x.shape)
        if self.reads_first:
            table = tf.identity(self.embedding.embeddings)
            return tf.reduce_mean(self.embedding(x), 1) @ tf.transpose(table)
        looked_up = tf.reduce_mean(self.embedding(x), 1)
        return looked_up @ tf.transpose(tf.convert_to_tensor(self.embedding.embeddings))


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("units", ["*", ()])
def test_a_table_that_is_read_in_two_ways_gets_the_sum_of_both_gradients(reads_first, units):
    def data(rows):
        rng = np.random.default_rng(0)
        return rng.integers(0, 20, (rows, 5)), rng.integers(0, 20, rows)

    def loss():
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    options = {
        "build": lambda: Tied(reads_first),
        "compile_options": loss,
        "data": data,
        "optimizer": lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
    }
    assert_same_training(train(None, **options), train(sharded(units=units), **options))


def test_gathering_in_what_layers_compute_in_changes_nothing():
    def build():
        policy = "mixed_bfloat16"
        layers = [keras.layers.Dense(8, "tanh", dtype=policy), keras.layers.Dense(3, dtype=policy)]
        return keras.Sequential([keras.Input((6,)), *layers])

    whole = train(sharded(), build).results()
    half = train(sharded(gather_dtype="bfloat16"), build).results()
    for name, expected in whole.items():
        np.testing.assert_array_equal(half[name], expected, name)


def test_units_by_name_are_gathered_with_all_layers_in_them(segments):
    def block(name):
        return keras.Sequential([keras.layers.Dense(6), keras.layers.Dense(6)], name=name)

    with sharded(units={"block_*"}).scope():
        net = keras.Sequential([keras.Input((6,)), block("block_0"), block("block_1")])
        net.compile("sgd", "mse")
    x, _ = tiny_data(4)
    net.train_on_batch(x, x)
    assert {len(segment.weights) for segment, _ in segments} == {4}
    assert len(segments) == 2 * 2


def test_a_pattern_that_names_no_layer_is_refused():
    with sharded(units={"blocks"}).scope():
        net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, name="block")])
        net.compile("sgd", "mse")
    x, _ = tiny_data(4)
    with pytest.raises(ValueError, match=r"`units` must name a layer. Received: 'blocks'.*block"):
        net.train_on_batch(x, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "`prefetch` must not be negative. Received: -1"),
        ({"gather_dtype": "int8"}, "`gather_dtype` must be a dtype of floating point"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sharded(**options)
