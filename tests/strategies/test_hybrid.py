"""HybridStrategy: what the conformance suite cannot ask."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, tiny_data, tiny_model, train
from tests.helpers import cpu_mesh_of as mesh
from tests.hybrid.meshes import hybrid
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel import HybridStrategy, PipelineOptions, PipelineStrategy, Sharding

pytestmark = pytest.mark.turns


def two_pipelines(num_microbatches=2, **options):
    return HybridStrategy(
        mesh(data=2, pipeline=2), pipeline=PipelineOptions(num_microbatches, **options)
    )


def batch_norm_model():
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(5),
        keras.layers.BatchNormalization(momentum=0.9),
    ]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def weights(training):
    return training.model.get_weights()


def device_number(variable):
    return tf.DeviceSpec.from_string(variable.device).device_index


def test_each_pipeline_has_a_copy_of_a_weight_on_its_stage_and_slots_exist_once():
    training = train(two_pipelines())
    first, *_, last = training.model.trainable_weights
    assert [device_number(copy) for copy in first.value.values] == [0, 2]
    assert [device_number(copy) for copy in last.value.values] == [1, 3]
    slots = [v for v in training.model.optimizer.variables if "momentum" in v.path]
    assert [device_number(copy) for copy in slots[0].value.values] == [0, 0]


class Counting(keras.layers.Layer):
    """Counts how often Python calls it in a step that is traced."""

    calls = 0

    def call(self, x):
        Counting.calls += 1
        return x


def calls_of_python(strategy):
    def build():
        return keras.Sequential([keras.Input((6,)), Counting(), keras.layers.Dense(3)])

    with strategy.scope():
        model = build()
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = tiny_data(16)
    strategy.extended._stages_of(model)
    Counting.calls = 0
    model.train_on_batch(x, y)
    return Counting.calls


def test_tracing_does_not_grow_with_the_axis_of_data():
    one = calls_of_python(HybridStrategy(mesh(pipeline=2), pipeline=PipelineOptions(2)))
    assert one > 0
    assert calls_of_python(two_pipelines()) == one


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_rows_may_be_uneven_or_fewer_than_microbatches(schedule):
    for batch_size in (13, 3):
        rows = 2 * batch_size
        reference = train(None, rows=rows, batch_size=batch_size)
        strategy = two_pipelines(3, schedule=schedule)
        assert_same_training(reference, train(strategy, rows=rows, batch_size=batch_size))


def test_options_of_a_pipeline_are_options_beside_data():
    reference = train(None)
    for options in ({"rematerialize": "full"}, {"offload": True}):
        assert_same_training(reference, train(two_pipelines(**options)))
    on_host = HybridStrategy(
        mesh(data=2, pipeline=2),
        pipeline=PipelineOptions(2),
        memory=tfparallel.MemoryPolicy(offload="full"),
    )
    assert_same_training(reference, train(on_host))
    interleaved = HybridStrategy(
        mesh(data=2, pipeline=1),
        pipeline=PipelineOptions(2, "interleaved_1f1b", chunks_per_device=2),
    )
    assert_same_training(reference, train(interleaved))


@pytest.mark.parametrize(
    ("options", "offload", "message"),
    [
        ({"offload": True}, "full", "What is kept is said once"),
        ({}, {"dense*"}, "goes to the host as a whole. Received: offload={'dense"),
    ],
)
def test_what_stages_keep_is_said_once_and_of_all(options, offload, message):
    with pytest.raises(ValueError, match=message):
        HybridStrategy(
            mesh(data=2, pipeline=2),
            pipeline=PipelineOptions(2, **options),
            memory=tfparallel.MemoryPolicy(offload=offload),
        )


def test_deferred_batch_norm_takes_in_the_rows_of_all_pipelines():
    """As one pipeline does that has the same microbatches."""
    one = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], 4, batch_norm="deferred")
    reference = train(one, batch_norm_model)
    both = train(two_pipelines(2, batch_norm="deferred"), batch_norm_model)
    for ours, theirs in zip(weights(both), weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_averages_of_batch_norm_are_the_mean_of_the_pipelines_weighted_by_rows():
    def build():
        first = keras.layers.BatchNormalization(momentum=0.9)
        return keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(3)])

    training = train(two_pipelines(), build, rows=13, batch_size=13, epochs=1)
    x = tiny_data(13)[0]
    pipelines = [x[:4], x[4:7]], [x[7:10], x[10:13]]  # rows 4, 3 and 3, 3
    expected = np.zeros(6)
    for microbatches in pipelines:
        moving = np.zeros(6)
        for microbatch in microbatches:
            moving = 0.9 * moving + 0.1 * microbatch.mean(0)
        expected += sum(map(len, microbatches)) / 13 * moving
    averages = training.model.layers[0].moving_mean
    np.testing.assert_allclose(averages.numpy(), expected, atol=1e-6)
    for copy in averages.value.values:
        np.testing.assert_allclose(copy.numpy(), expected, atol=1e-6)


def masks(strategy, rows=4, width=64, steps=1):
    """What Dropout leaves of each row, seen in the gradient of a weight for each number."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        dropout = keras.layers.Dropout(0.5, seed=7)
        model = keras.Sequential([keras.Input((rows * width,)), dropout, dense])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: p)
    x = np.kron(np.eye(rows), np.ones(width)).astype("float32")
    for _ in range(steps):
        before = model.get_weights()[0]
        model.train_on_batch(x, np.zeros((rows, 1)))
    return (before - model.get_weights()[0]).reshape(rows, width) > 0, model


def test_rows_of_all_pipelines_get_masks_of_their_own():
    own, _ = masks(two_pipelines())
    assert 0.3 < own.mean() < 0.7
    for i in range(4):
        for j in range(i):
            assert (own[i] != own[j]).any(), (i, j)
    again, _ = masks(two_pipelines())
    np.testing.assert_array_equal(own, again)


def test_streams_of_pipelines_go_on_after_a_checkpoint(tmp_path):
    expected, _ = masks(two_pipelines(), steps=2)
    _, model = masks(two_pipelines())
    file = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    strategy = two_pipelines()
    _, other = masks(strategy)
    tf.train.Checkpoint(model=other).restore(file)
    x = np.kron(np.eye(4), np.ones(64)).astype("float32")
    before = other.get_weights()[0]
    other.train_on_batch(x, np.zeros((4, 1)))
    after = (before - other.get_weights()[0]).reshape(4, 64) > 0
    np.testing.assert_array_equal(after, expected)


def test_a_model_goes_from_one_mesh_to_any_other(tmp_path):
    layout = keras.distribution.LayoutMap(None)
    layout[".*dense.*kernel"] = (None, "model")
    meshes = [
        lambda: two_pipelines(),
        lambda: HybridStrategy(mesh(data=2, shard=2), shard=Sharding(min_size=1)),
        lambda: HybridStrategy(mesh(data=2, model=2), layout_map=layout),
        lambda: HybridStrategy(mesh(data=3)),
        lambda: HybridStrategy(
            mesh(pipeline=2, model=2), pipeline=PipelineOptions(2), layout_map=layout
        ),
    ]
    x, y = tiny_data(26)
    reference = train(None, rows=26)
    reference.model.fit(x, y, 13, epochs=1, shuffle=False, verbose=0)
    for i, source in enumerate(meshes):
        file = str(tmp_path / f"{i}.keras")
        train(source(), rows=26).model.save(file)
        with meshes[(i + 1) % len(meshes)]().scope():
            model = keras.models.load_model(file)
        model.fit(x, y, 13, epochs=1, shuffle=False, verbose=0)
        for ours, theirs in zip(model.get_weights(), reference.model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_shards_are_divided_among_the_devices_of_a_copy():
    strategy = HybridStrategy(mesh(data=2, shard=2), shard=Sharding(min_size=1))
    kernel = train(strategy).model.trainable_weights[0]
    parts = [part.numpy() for part in kernel.value.parts]
    assert [part.size for part in parts] == [24] * 4
    np.testing.assert_array_equal(parts[0], parts[2])
    np.testing.assert_array_equal(np.concatenate(parts[:2]), kernel.numpy().flatten())


def test_the_stages_of_all_pipelines_are_told_and_follow_the_schedule():
    strategy = two_pipelines(4)
    training = train(strategy)
    text = str(strategy.summary(training.model))
    assert "CPU:0" in text
    assert "CPU:2" in text
    lanes = strategy.profile(training.model, tiny_data(16))
    assert lanes.devices == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
    for device, order in enumerate(lanes.timeline.schedule.orders):
        events = [event for event in lanes.timeline.events if event.device == device]
        assert [event.action for event in events] == list(order)
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))


def test_a_mesh_of_one_axis_is_what_the_strategy_of_that_axis_is():
    two = ["CPU:0", "CPU:1"]
    layout = LayoutOfAnything(mesh(model=2))
    alone = {
        "data": tfparallel.MirroredStrategy(two),
        "shard": tfparallel.ShardedStrategy(two),
        "pipeline": PipelineStrategy(two, 2),
        "model": tfparallel.TensorParallelStrategy(layout),
    }
    for axis, strategy in alone.items():
        assert type(hybrid({axis: 2}).extended) is type(strategy.extended)


def test_more_stages_than_layers_are_refused_by_numbers():
    with pytest.raises(ValueError, match="4 stages for .* of 1 layers. Use at most 1 stages"):
        train(HybridStrategy(mesh(pipeline=4), pipeline=PipelineOptions(4)), one_layer)


def one_layer():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("sizes", "tables"),
    [
        ({"data": 4}, []),
        ({"data": 2, "shard": 2}, ["Bytes that a step"]),
        ({"data": 2, "pipeline": 2}, ["Stages of"]),
        ({"shard": 2, "model": 2}, ["largest bytes"]),
        ({"pipeline": 2, "model": 2}, ["Stages of", "largest bytes"]),
    ],
    ids=str,
)
def test_the_summary_has_a_table_for_each_axis_and_says_that_none_leaves_the_process(sizes, tables):
    strategy = hybrid(sizes)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *map(keras.layers.Dense, (8, 3))])
        model.compile("sgd", "mse")
    text = str(strategy.summary(model))
    known = ("Bytes that a step", "Stages of", "largest bytes")
    assert [heading for heading in known if heading in text] == tables
    for axis, size in sizes.items():
        assert f"Axis '{axis}' ({size}) stays inside of a process." in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: HybridStrategy({"data": 4}),
        lambda: HybridStrategy({"data": 2, "pipeline": 2}),
        lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"]),
        lambda: tfparallel.ShardedStrategy(["CPU:0", "CPU:1"]),
        lambda: tfparallel.TensorParallelStrategy("auto"),
    ],
)
def test_what_is_no_model_has_no_summary(make):
    with pytest.raises(TypeError, match="Expected a keras.Model. Received: 'text', of type str"):
        make().summary("text")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HybridStrategy(3), TypeError, "mesh: expected DeviceMesh . Mapping.str, int."),
        (lambda: HybridStrategy({}), TypeError, "size of each axis by its name"),
        (lambda: HybridStrategy(), TypeError, r"HybridStrategy\.__init__.*'mesh'"),
        (
            lambda: HybridStrategy((2, 2), ("data", "model")),
            TypeError,
            "HybridStrategy.*positional",
        ),
        (lambda: HybridStrategy({"data": 3}), ValueError, "would fit: data 4 = 4"),
        (
            lambda: HybridStrategy({"data": -1, "pipeline": 2}),
            ValueError,
            "1 or more. Received: .* for 4 devices. What would fit: data 2 x pipeline 2 = 4",
        ),
        (lambda: HybridStrategy(mesh(data=2, pipes=2)), ValueError, "'pipes'"),
        (
            lambda: HybridStrategy(mesh(data=2), pipeline=PipelineOptions(2)),
            ValueError,
            "'pipeline'",
        ),
        (lambda: HybridStrategy(mesh(data=2, model=2)), ValueError, "layout_map"),
        (
            lambda: HybridStrategy(mesh(pipeline=2), shard=Sharding()),
            ValueError,
            "'shard' or 'data'",
        ),
        (lambda: two_pipelines(0), ValueError, "num_microbatches"),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("pattern", "axes", "message"),
    [
        (".*kernel", (None, "tensor"), "'model' of the mesh.*None, 'tensor'.* for '.*kernel'"),
        (".*kernel", ("pipeline", "model"), "'pipeline'. divide no weights"),
        ("*kernel", (None, "model"), "regular expressions.*Received: '.kernel', which is none"),
    ],
)
def test_a_layout_by_which_nothing_would_be_in_parts_is_refused(pattern, axes, message):
    layout_map = keras.distribution.LayoutMap(None)  # which knows no names
    layout_map[pattern] = axes
    with pytest.raises(ValueError, match=message):
        HybridStrategy({"pipeline": 2, "model": 2}, layout_map=layout_map)


@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"data": 4}], ids=str)
def test_only_a_compiled_model_of_its_own_is_profiled(sizes):
    strategy, batch = HybridStrategy(sizes), tiny_data(8)
    for scope, message in (
        (strategy.scope, "profile takes a compiled model. Received: model 'sequential"),
        (contextlib.nullcontext, "Expected a model built under this HybridStrategy"),
    ):
        with scope():
            model = tiny_model()
        with pytest.raises(ValueError, match=message):
            strategy.profile(model, batch)


@pytest.mark.long
def test_the_quick_example_trains_on_eight_devices():
    run = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "examples" / "hybrid_gpt.py", "--quick"],
        capture_output=True,
        timeout=400,
        env={**os.environ, "TF_NUM_INTEROP_THREADS": "8"},
    )
    output = run.stdout.decode()
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    assert "CPU:0, CPU:4" in output
    assert "CPU:3, CPU:7" in output
    loss = float(re.search(r"^loss ([\d.]+)$", output, re.MULTILINE)[1])
    assert loss < 4.8  # nats; that of equal odds is log(128) = 4.85


class TwoLosses(keras.Model):
    """Takes two gradients from one persistent tape, as a step of a user's may."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            scores = self(x, training=True)
            first = self.compute_loss(x, y, scores)
            second = tf.reduce_mean(tf.reduce_sum(scores**2, -1))
        weights = self.trainable_variables
        pairs = zip(tape.gradient(first, weights), tape.gradient(second, weights), strict=True)
        self.optimizer.apply([a + 0.1 * b for a, b in pairs], weights)
        return {"loss": first}


def test_a_persistent_tape_gets_gradients_of_each_pipelines_copy():
    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        return TwoLosses(inputs, keras.layers.Dense(3)(hidden))

    def only_loss():
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    assert_same_training(train(None, build, only_loss), train(two_pipelines(), build, only_loss))


def test_a_single_rank_trains_as_its_inner_strategy_does():
    pytest.importorskip("horovod.tensorflow")
    strategy = tfparallel.HorovodStrategy(inner=PipelineStrategy(["CPU:0", "CPU:1"], 2))
    assert_same_training(train(strategy), train(PipelineStrategy(["CPU:0", "CPU:1"], 2)))
