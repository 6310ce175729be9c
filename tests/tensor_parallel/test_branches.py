"""Branches of a model on devices of their own: found, exact, and with a backward pass there."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_graph
from tests.tensor_parallel.layouts import cpu_mesh
from tfparallel.tensor_parallel.branches import places
from tfparallel.tensor_parallel.pairing import Call

pytestmark = pytest.mark.turns


def _call(name, inputs, output, flops=10):
    return Call(name, tuple(inputs), (output,), flops=flops)


def _devices(calls, ends=("in", "out"), parts=2):
    return {layer: place.device for layer, place in places(calls, ends, parts).items()}


def test_the_dearest_branch_comes_first_and_the_others_share_a_device():
    calls = [
        _call("first", ["in"], "x"),
        _call("small", ["x"], "a", 20),
        _call("large", ["x"], "b", 60),
        _call("relu", ["b"], "c", 0),
        _call("medium", ["x"], "d", 30),
        _call("join", ["a", "c", "d"], "y", 0),
        _call("last", ["y"], "out"),
    ]
    assert _devices(calls) == {
        "first": None,
        "small": 1,
        "large": 0,
        "relu": 0,
        "medium": 1,
        "join": None,
        "last": None,
    }


def test_a_residual_is_no_second_branch():
    calls = [_call("f", ["in"], "x"), _call("g", ["x"], "y"), _call("add", ["x", "y"], "out", 0)]
    assert set(_devices(calls).values()) == {None}


def test_a_branch_within_a_branch_stays_with_it():
    calls = [
        _call("a1", ["in"], "a1"),
        _call("a2", ["in"], "a2"),
        _call("a", ["a1", "a2"], "a", 0),
        _call("b", ["in"], "b"),
        _call("join", ["a", "b"], "out", 0),
    ]
    assert _devices(calls) == {"a1": 0, "a2": 0, "a": 0, "b": 1, "join": None}


def test_what_another_branch_reads_too_is_in_none():
    calls = [
        _call("shared", ["in"], "s"),
        _call("a", ["s"], "a"),
        _call("b", ["s"], "b"),
        _call("join", ["a", "b"], "j", 0),
        _call("end", ["j", "s"], "out", 5),
    ]
    assert _devices(calls) == {"shared": None, "a": 0, "b": 1, "join": None, "end": None}


def test_a_layer_that_is_called_in_two_branches_is_in_none():
    calls = [
        _call("twin", ["in1"], "a"),
        _call("twin", ["in2"], "b"),
        _call("one", ["a"], "c"),
        _call("two", ["b"], "d"),
        _call("join", ["c", "d"], "out", 0),
    ]
    found = places(calls, ("in1", "in2", "out"), 2)
    assert found["twin"].device is None and "several branches" in found["twin"].reason
    assert {found["one"].device, found["two"].device} == {0, 1}


def test_outputs_of_a_model_are_ends_of_branches():
    calls = [
        _call("body", ["in"], "x"),
        _call("a", ["x"], "out1"),
        _call("b", ["x"], "out2"),
    ]
    assert _devices(calls, ("in", "out1", "out2")) == {"body": None, "a": 0, "b": 1}


def _inception():
    """BatchNorm, Dropout, an inner branch, an Embedding's sparse gradient, two inputs."""
    images = keras.Input((8, 8, 3), name="images")
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="stem")(images)
    a = layers.Conv2D(6, 1, name="a1")(x)
    b = layers.Conv2D(4, 1, use_bias=False, name="b1")(x)
    b = layers.BatchNormalization(name="b2")(b)
    b = layers.Conv2D(6, 3, padding="same", name="b3", kernel_regularizer="l2")(b)
    c = layers.Conv2D(5, 1, name="c1")(layers.AveragePooling2D(3, 1, "same", name="c0")(x))
    c = layers.Dropout(0.3, seed=4, name="c2")(c)
    x = layers.Flatten()(layers.Concatenate()([a, b, c]))
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    t = layers.Embedding(9, 4, mask_zero=True, name="t1")(tokens)
    t = layers.LSTM(4, name="t2")(t)
    return keras.Model([images, tokens], layers.Dense(3, name="scores")(layers.concatenate([x, t])))


def _data(rows):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, 8, 8, 3)).astype("float32")
    return {"images": images, "tokens": rng.integers(0, 9, (rows, 5))}, rng.integers(0, 3, rows)


def _on(model):
    """The number of the device of each weight's first part."""
    found = {}
    for weight in model.trainable_weights:
        parts = getattr(weight.value, "parts", None)
        name = "/".join(weight.path.split("/")[-2:])
        found[name] = 0 if parts is None else int(parts[0][0].device[-1])
    return found


def _adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


@pytest.mark.parametrize(
    "layout, parts",
    [
        ("branches", 2),
        pytest.param("branches", 3, marks=pytest.mark.long),
        ({"b[123]": 1, "t[12]": 2, "a1": 0}, 3),
    ],
    ids=["two", "three", "patterns"],
)
def test_trains_as_one_device(layout, parts):
    strategy = tfparallel.TensorParallelStrategy(layout, device_mesh=cpu_mesh(1, parts))
    options = {"build": _inception, "data": _data, "optimizer": _adam}
    candidate = helpers.train(strategy, **options)
    helpers.assert_same_training(helpers.train(None, **options), candidate, atol=5e-6)
    devices = _on(candidate.model)
    assert devices["b1/kernel"] == devices["b3/kernel"] == devices["b2/gamma"]
    assert devices["scores/kernel"] == devices["stem/kernel"] == 0
    if isinstance(layout, dict):
        assert [devices[x] for x in ("b3/bias", "t1/embeddings", "a1/kernel")] == [1, 2, 0]
    assert len(set(devices.values())) == parts if layout != "branches" else 2


@pytest.mark.long
def test_two_replicas_of_two_devices():
    def build():
        x = keras.Input((6,))
        heads = [layers.Dense(4, "tanh", name=f"head{i}")(x) for i in range(2)]
        return keras.Model(x, layers.Dense(3)(layers.Average()(heads)))

    strategy = tfparallel.TensorParallelStrategy("branches", device_mesh=cpu_mesh(2, 2))
    candidate = helpers.train(strategy, build=build)
    helpers.assert_same_training(helpers.train(None, build=build), candidate, atol=5e-6)
    kernel = candidate.model.get_layer("head1").kernel.value
    assert [copy[0].device[-1] for copy in kernel.parts] == ["1", "3"]


def test_each_device_computes_its_branch_forward_and_backward():
    def make():
        x = keras.Input((16,))
        a = layers.Dense(16, "tanh", name="a2")(layers.Dense(32, name="a1")(x))
        b = layers.Dense(16, "tanh", name="b2")(layers.Dense(32, name="b1")(x))
        return keras.Model(x, layers.Add()([a, b]))

    counts = test_graph._operations_that_run("branches", make, (12, 16))
    assert [counts[i]["MatMul"] for i in (0, 1)] == [5, 5]
    assert [counts[i]["TanhGrad"] for i in (0, 1)] == [1, 1]
    assert counts[1]["AssignSubVariableOp"] == counts[0]["AssignSubVariableOp"] == 4


def test_refuses_a_device_that_the_group_has_not():
    with pytest.raises(ValueError, match="0 to 1. Received: 2 for 'tower'"):
        tfparallel.TensorParallelStrategy({"tower": 2}, device_mesh=cpu_mesh(1, 2))


def test_refuses_a_pattern_that_matches_nothing_and_two_that_disagree():
    strategy = tfparallel.TensorParallelStrategy({"towre": 1}, device_mesh=cpu_mesh(1, 2))
    with pytest.raises(ValueError, match=r"\['towre'\], which match none of .*dense"):
        helpers.train(strategy, helpers.tiny_model, epochs=1)
    strategy = tfparallel.TensorParallelStrategy(
        {"dense": 1, "dense.*": 0}, device_mesh=cpu_mesh(1, 2)
    )
    with pytest.raises(ValueError, match=r"one device for .*which say \[0, 1\]"):
        helpers.train(strategy, helpers.tiny_model, epochs=1)


def test_the_table_tells_devices_and_copies():
    def make():
        x = keras.Input((16,))
        heads = [layers.Dense(8, name="large")(layers.Dense(32, name="first")(x))]
        return keras.Model(x, layers.Add(name="add")([*heads, layers.Dense(8, name="small")(x)]))

    strategy = tfparallel.TensorParallelStrategy("branches", device_mesh=cpu_mesh(1, 2))
    with strategy.scope():
        model = make()
    lines = {
        line.split()[0]: line.split()[1:]
        for line in str(strategy.summary(model)).splitlines()
        if line
    }
    assert lines["small/kernel"][2:] == ["device", "1", "512", "there"]
    assert lines["small"] == ["device", "1", "14.3%", "copy", "64", "-"]
    assert lines["add"] == ["whole", "0.0%", "copy", "32", "copy", "32"]
    assert "3 copies" in str(strategy.summary(model))
