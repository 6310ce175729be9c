"""Lanes of a step: what they say of boxes that are written out, and of a step that ran."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.measure.lanes import Box, lanes_of
from tfparallel.measure.operation_kinds import kind_of_operation

MS = 1e-3
BOXES = [
    Box(0, "compute", "MatMul", 100.0, 100.0 + 4 * MS),
    Box(0, "compute", "Relu", 100.0 + 3 * MS, 100.0 + 6 * MS),  # on another thread
    Box(0, "update", "Assign", 100.0 + 8 * MS, 100.0 + 10 * MS),
    Box(1, "send", "gradient", 100.0 + 6 * MS, 100.0 + 7 * MS),
]


def test_what_overlaps_counts_once_and_idle_is_the_rest():
    lanes = lanes_of(("CPU:0", "CPU:0 > CPU:1"), BOXES, gap_s=0.0)
    assert lanes.seconds == pytest.approx(10 * MS)
    assert lanes.busy_s() == pytest.approx([8 * MS, 1 * MS])
    assert lanes.busy_s("compute") == pytest.approx([6 * MS, 0.0])
    assert lanes.idle_s == pytest.approx([2 * MS, 9 * MS])


def test_short_pauses_are_not_shown():
    lanes = lanes_of(("a", "b"), [BOXES[0], BOXES[2]._replace(kind="compute")], gap_s=4.5 * MS)
    assert [(box.start, box.end) for box in lanes.boxes] == [(0.0, pytest.approx(10 * MS))]


def test_text_shows_what_took_most_of_a_column():
    text = lanes_of(("CPU:0", "CPU:0 > CPU:1"), BOXES, gap_s=0.0).text(15 + 10).splitlines()
    assert text[0] == "CPU:0          cccccc..uu"
    assert text[1] == "CPU:0 > CPU:1  ......s..."
    assert "CPU:0: compute 60%, update 20%, idle 20%" in text


def test_trace_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    lanes = lanes_of(("CPU:0", "CPU:0 > CPU:1"), BOXES, gap_s=0.0)
    lanes.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [event["cat"] for event in events if event["ph"] == "X"] == [
        "compute",
        "send",
        "update",
    ]
    lanes.save_png(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "operation", "kind"),
    [
        ("sequential_1/dense_1/MatMul", "_MklMatMul", "compute"),
        ("gradient_tape/adam/Mul", "Mul", "update"),
        ("replica_1/adam/update_1_3/Mul_2", "Mul", "update"),
        ("replica_1/adam_dense/Mul", "Mul", "compute"),
        ("all_reduce_2/AddN", "AddN", "reduce"),
        ("ring_collective", "PyFunc", "reduce"),
        ("x", "CollectiveReduceV2", "reduce"),
        ("x", "HorovodAllreduce", "reduce"),
        ("AddN_2/_11", "_Send", "send"),
        ("AddN_2/_12", "_Recv", "receive"),
        ("x", "ResourceApplyAdam", "update"),
    ],
)
def test_what_operations_are_for(name, operation, kind):
    assert kind_of_operation(name, operation, {"adam"}) == kind


def test_the_second_optimizer_of_a_process_is_known():
    assert kind_of_operation("replica_1/adam_1/Mul", "Mul", ["adam_1"]) == "update"


def test_a_journal_is_on_the_clock_of_all_processes():
    journal = LinkJournal()
    began = time.monotonic()
    time.sleep(0.05)
    journal.note("send", began)
    ((kind, start, end),) = journal.since_1970()
    assert kind == "send" and end - start >= 0.05
    assert abs(end - time.time()) < 1.0


class Pause(keras.layers.Layer):
    """Takes its time in the forward pass."""

    def call(self, inputs):
        @tf.custom_gradient
        def paused(x):
            def pause(rows):
                time.sleep(0.1)
                return rows

            return tf.ensure_shape(tf.numpy_function(pause, [x], x.dtype), x.shape), lambda dy: dy

        return paused(inputs)


@pytest.fixture(scope="module")
def drawn():
    """Two replicas with a layer that takes 100 ms."""
    strategy = tfparallel.MirroredStrategy(2)
    with strategy.scope():
        model = keras.Sequential([*tiny_model().layers[:1], Pause(), keras.layers.Dense(3)])
        model.compile("adam", **tiny_compile_options())
    return strategy.profile(model, tiny_data(12))


def test_a_layer_that_takes_long_is_seen_on_each_device(drawn):
    assert drawn.lanes[:2] == ("CPU:0", "CPU:1")
    for lane in range(2):
        (pause,) = [b for b in drawn.boxes if b.lane == lane and b.end - b.start > 0.09]
        assert pause.kind == "compute"
    assert drawn.seconds > 0.1
    assert min(drawn.busy_s("compute")[:2]) > 0.09


def test_gradients_meet_after_they_are_computed_and_before_the_update(drawn):
    pauses = [box.start for box in drawn.boxes if box.end - box.start > 0.09]
    reduced = [box for box in drawn.boxes if box.kind == "reduce"]
    # A box may end with what follows it, after a gap that is too short to be shown.
    assert reduced and min(box.start for box in reduced) >= max(pauses) + 0.09
    assert {box.lane for box in drawn.boxes if box.kind == "update"} >= {0, 1}
    assert any(">" in name for name in drawn.lanes)


class WithoutCall(keras.Model):
    """As a GAN or a VAE is written: its `train_step` says all, and nobody calls it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.dense(x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.dense.variables)
        return {"loss": loss}


def test_a_model_that_is_never_called_is_drawn():
    strategy = tfparallel.MirroredStrategy(2)
    with strategy.scope():
        model = WithoutCall()
        model.compile("sgd")
    step = strategy.profile(model, tiny_data(4))
    assert len(model.dense.variables) == 2 and min(step.busy_s("compute")[:2]) > 0


def test_models_of_others_are_refused():
    strategy = tfparallel.MirroredStrategy(2)
    with strategy.scope():
        model = tiny_model()
    with pytest.raises(ValueError, match="compiled model"):
        strategy.profile(model, tiny_data(4))
    with strategy.scope(), pytest.raises(ValueError, match="scope"):
        strategy.profile(model, tiny_data(4))


def test_it_changes_no_weight_and_no_seed():
    strategy = tfparallel.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = tiny_model()
        model.compile("adam", **tiny_compile_options())
    before = [*model.get_weights(), np.random.get_state()[2]]
    strategy.profile(model, tiny_data(8))
    for one, other in zip(before, [*model.get_weights(), np.random.get_state()[2]], strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations.numpy()) == 0
