"""Gradients that workers hand in compressed: what arrives, what is kept, and what it saves."""

import weakref

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.parameter_server.compressed_gradient import (
    CompressionMemory,
    GradientsHandedIn,
    checked_compressor,
)
from tfparallel.parameter_server.effects import Effects
from tfparallel.parameter_server.worker_state import Remembered, WorkerStates
from tfparallel.strategies.parameter_server import _check_arguments

pytestmark = pytest.mark.turns

# By how much the training loss after 4 epochs may exceed that without compression.
MARGINS = {
    "fp16": 0.02,
    "qsgd": 0.02,
    "tern_grad": 0.15,
    "sign_sgd": 0.05,
    "TopK(0.1)": 0.05,
}


@pytest.mark.long
def test_trains_to_nearly_the_same_loss_in_fewer_bytes(run_case):
    results = run_case("compression")
    plain = results["None"]
    assert plain["reported"] == []
    for name, margin in MARGINS.items():
        each = results[name]
        assert each["iterations"] == plain["iterations"] == 64
        assert each["loss"] <= plain["loss"] * (1 + margin), (name, each, plain)
        ((sent, uncompressed),) = each["reported"]
        assert plain["bytes"] - each["bytes"] == uncompressed - sent  # as measured
    of_plain = {name: results[name]["bytes"] / plain["bytes"] for name in MARGINS}
    assert of_plain["fp16"] < 0.51
    assert of_plain["qsgd"] < 0.27
    assert of_plain["TopK(0.1)"] < 0.22
    assert of_plain["tern_grad"] < 0.09
    assert of_plain["sign_sgd"] < 0.06


def test_what_is_left_out_is_kept_by_each_worker_and_arrives_later(run_case):
    """Also if the loss is scaled, by a factor that changes while steps are under way."""
    results = run_case("error_feedback")
    for name in ("top_k False", "top_k True", "sign_sgd False", "sign_sgd True"):
        each = results[name]
        assert each["iterations"] == 30
        assert each["workers"] == 2
        assert each["kept"] > 1, name  # there is something to be exact about
        assert each["relative"] < 1e-5, (name, each)
        assert each["scale"] > 2.0**10 if "True" in name else each["scale"] == 1


def test_killed_and_resumed_with_fewer_servers_equals_uninterrupted(make_servers, start_chief):
    """One worker, so that the order of updates is fixed; a variable in parts, and residuals."""
    two = make_servers(num_workers=1, num_ps=2)
    killed = start_chief("compressed_with_backup", two, CASE_KILL="1")
    one = make_servers(num_workers=1, num_ps=1)
    assert killed.process.wait(60) == -9
    result = start_chief("compressed_with_backup", one).result()
    assert result["difference"] < 1e-6
    assert result["loaded"] == [0.0, 0.0]  # a Keras file, and a checkpoint of TensorFlow
    assert result["devices"] == 1
    assert result["left_out"] > 1e-3
    assert result["names"] == ["0/0/residual", "0/2/residual"]  # of kernels; biases go as they are


@pytest.mark.parametrize("compression", ["power_sgd", "random_k", "adaptive"])
def test_refuses_compressors_that_need_workers_in_step(compression):
    with pytest.raises(ValueError, match="Cast, TopK, QSGD, TernGrad, SignSGD.*Received"):
        checked_compressor(compression)
    assert repr(checked_compressor("top_k")) == repr(tfparallel.compression.TopK())


def test_refuses_compression_in_sync_mode():
    with pytest.raises(ValueError, match='mode="async".*MultiWorkerMirroredStrategy'):
        _check_arguments("sync", None, None, "fp16")


class Owner:
    """Something that can be referred to weakly."""


def test_workers_remember_each_its_own_and_a_lost_one_nothing():
    generations, owner = [0, 0], Owner()
    states = WorkerStates(lambda worker: generations[worker])
    slot = Remembered(weakref.ref(owner), "w/residual", lambda worker: tf.constant(float(worker)))

    @tf.function
    def step() -> tf.Tensor:
        return states.read(slot, tf.TensorSpec([])) + 10

    def run(worker: int, counts: bool = True) -> float:
        with states.of_worker(worker, "CPU:0"):
            result = step()
        if counts:
            states.keep(worker, [slot], [result])
        return float(result)

    assert [run(0), run(1), run(0)] == [10, 11, 20]
    assert [run(1, counts=False), run(1)] == [21, 21]  # one that was given to another worker
    generations[0] += 1
    assert [run(0), run(1)] == [10, 31]


def test_residuals_of_workers_that_are_no_more_go_to_others():
    """Their sum is what gradients lack; what is of another compressor is refused."""
    optimizer = tf.keras.optimizers.SGD()
    optimizer.build([tf.keras.Variable(np.zeros((2, 3), "float32"))])
    states = WorkerStates(lambda worker: 0)
    memory = CompressionMemory(tfparallel.compression.TopK(), states, optimizer, 2, lambda w: True)
    saved = {f"{worker}/0/residual": np.full((2, 3), 10.0**worker) for worker in range(4)}
    memory.set_state([saved], 1)
    restored = memory.state()
    assert {name: value[0, 0] for name, value in restored.items()} == {
        "0/0/residual": 101.0,
        "1/0/residual": 1010.0,
    }
    with pytest.raises(ValueError, match=r"0/counter of shape \(2,\)"):
        memory.set_state([{"0/0/counter": np.zeros(2)}], 1)


def test_rows_of_tables_are_handed_in_as_they_are():
    """Also under a loss scale that has changed on the way."""
    optimizer = tf.keras.optimizers.SGD()
    table = tf.keras.Variable(np.zeros((1000, 4), "float32"), name="table")
    rows = tf.IndexedSlices(tf.fill([2, 4], 3.0), tf.constant([7, 900]), tf.constant([1000, 4]))
    states = WorkerStates(lambda worker: 0)
    handed_in = GradientsHandedIn(tfparallel.compression.TopK(), states)
    payload = handed_in.hand_in(Effects(), optimizer, table, rows, tf.constant(8.0))
    assert payload.tensors == [rows]
    (report,) = handed_in.report()
    assert [row.sent_as for row in report.variables] == ["rows"]
    for scale_now, expected in ((8.0, 3.0), (16.0, 6.0)):
        restored = payload.restore(payload.tensors, tf.constant(8.0), tf.constant(scale_now))
        assert restored.indices.numpy().tolist() == [7, 900]
        assert restored.values.numpy().tolist() == [[expected] * 4] * 2


def test_what_workers_remember_goes_with_its_owner():
    owner = Owner()
    states = WorkerStates(lambda worker: 0)
    states.keep(
        0, [Remembered(weakref.ref(owner), "a", lambda worker: tf.zeros([]))], [tf.zeros([])]
    )
    other = Owner()
    del owner
    states.keep(
        0, [Remembered(weakref.ref(other), "a", lambda worker: tf.zeros([]))], [tf.zeros([])]
    )
    assert len(states._values[0][1]) == 1
