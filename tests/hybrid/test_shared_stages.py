"""A stage is traced once for all pipelines, also where devices are written into its functions."""

import collections
import itertools
import re

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.graphs import waited_for
from tests.helpers import assert_same_training, in_float64, train
from tests.hybrid.meshes import hybrid
from tests.hybrid.test_tapes import Smooth, TwoLosses, only_loss, three_layers
from tfparallel.internals.graphs import functions_of

pytestmark = pytest.mark.turns

BESIDE = {
    "data x model": ({"data": 2, "pipeline": 1, "model": 2}, {"pipeline": 1, "model": 2}),
    "shard x pipeline": ({"shard": 2, "pipeline": 2}, {"pipeline": 2}),
}


class Counted(layers.Dense):
    """Counts how often it is traced."""

    traces = 0

    def call(self, inputs):
        type(self).traces += not tf.executing_eagerly()
        return super().call(inputs)


def counted():
    x = keras.Input((6,))
    y = Counted(8, "tanh", name="dense_0")(x)
    y = layers.Dropout(0.3)(y)
    y = Counted(8, "tanh", name="dense_1")(y)
    return keras.Model(x, layers.Dense(3, name="dense_2")(y))


@pytest.mark.parametrize("kind", [TwoLosses, Smooth])
@pytest.mark.parametrize("name", BESIDE)
def test_tapes_that_differentiate_the_functions_themselves_are_right(kind, name):
    def build():
        return three_layers(kind)

    with in_float64():
        reference = train(None, build, only_loss)
        candidate = train(hybrid(BESIDE[name][0]), build, only_loss)
        assert_same_training(reference, candidate, atol=1e-9)


class CallsFunction(layers.Dense):
    """Calls a `tf.function` of the program."""

    def build(self, shape):
        super().build(shape)
        self.squashed = tf.function(lambda x: tf.tanh(x) + x)

    def call(self, inputs):
        return self.squashed(super().call(inputs))


@pytest.mark.parametrize("name", BESIDE)
def test_functions_of_the_program_are_called_in_every_pipeline(name):
    def build():
        x = keras.Input((6,))
        y = CallsFunction(8, name="dense_0")(x)
        y = CallsFunction(8, name="dense_1")(y)
        return keras.Model(x, layers.Dense(3, name="dense_2")(y))

    with in_float64():
        reference = train(None, build, only_loss)
        candidate = train(hybrid(BESIDE[name][0]), build, only_loss)
        assert_same_training(reference, candidate, atol=1e-9)


def traces(sizes):
    Counted.traces = 0
    train(hybrid(sizes), counted, rows=13, epochs=1)
    return Counted.traces


def graph_of_step(strategy):
    with strategy.scope():
        model = counted()
        model.compile("sgd", "mse")
    x, y = tf.ones((8, 6)), tf.ones((8, 3))
    model.train_on_batch(x, y)
    step = tf.function(lambda: strategy.run(model.train_step, ((x, y),)))
    return step.get_concrete_function().graph


def devices_by_pipeline(graph, size):
    """On which devices the functions of stages compute that are called in each pipeline.

    What reads a variable is where that is, and has no device of its own.
    """
    definitions = {
        each.cached_definition.signature.name: each.cached_definition
        for each in functions_of(graph)
    }
    found = collections.defaultdict(set)
    for call, place in calls_of_stages(graph):
        name = call.get_attr("f").name
        (body,) = [node for node in definitions[name].node_def if "PartitionedCall" in node.op]
        nodes = definitions[body.attr["f"].func.name].node_def
        found[place // size] |= {
            number(node.device)
            for node in nodes
            if node.device and node.op not in ("ReadVariableOp", "AssignVariableOp")
        }
    return dict(found)


def calls_of_stages(graph):
    """Each call of a stage's function, with the number of the device that it is on."""
    for call in graph.get_operations():
        if call.type not in ("RemoteCall", "PartitionedCall", "StatefulPartitionedCall"):
            continue
        if call.get_attr("f").name.startswith("tfparallel_stage"):
            is_remote = call.type == "RemoteCall"
            place = tf.get_static_value(call.inputs[0]).item().decode() if is_remote else ""
            yield call, number(place or call.device)


def number(device):
    return tf.DeviceSpec.from_string(device).device_index


@pytest.mark.parametrize("name", BESIDE)
def test_a_stage_computes_on_the_devices_of_the_pipeline_that_calls_it(name):
    sizes, _ = BESIDE[name]
    graph = graph_of_step(hybrid(sizes))
    assert devices_by_pipeline(graph, 2) == {0: {0, 1}, 1: {2, 3}}


@pytest.mark.parametrize(
    ("several", "one"), [*BESIDE.values(), ({"data": 4, "pipeline": 1}, {"pipeline": 1})]
)
def test_layers_are_traced_as_often_as_for_one_pipeline(several, one):
    assert traces(several) == traces(one) > 0


def test_two_pipelines_have_the_functions_of_one():
    """Sums over pipelines are those over microbatches."""

    def kinds(data):
        graph = graph_of_step(hybrid({"data": data, "pipeline": 2}))
        names = [each.name.decode() for each in functions_of(graph)]
        return collections.Counter(re.sub(r"[0-9_]+$", "", name) for name in names)

    assert kinds(2) == kinds(1)


def test_in_every_pipeline_a_device_makes_its_passes_one_after_the_other():
    graph, passes = graph_of_step(hybrid({"data": 2, "pipeline": 2})), collections.defaultdict(list)
    waits = waited_for(graph)
    for call, place in calls_of_stages(graph):
        if "functional" in call.name or "backward" in call.name:  # what a metric computes may wait
            passes[place].append(call)
    assert sorted(passes) == [0, 1, 2, 3]
    for on_device in passes.values():
        assert len(on_device) >= 4  # of two microbatches, forward and backward
        for one, another in itertools.combinations(on_device, 2):
            assert one in waits[another] or another in waits[one], (one.name, another.name)
