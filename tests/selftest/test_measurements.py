"""What `tfparallel selftest` measures of speed and memory, at sizes of a machine without GPU."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.internals.profile_planes import Ran
from tfparallel.selftest import bandwidth_checks, memory_checks, pipeline_checks, speed_checks
from tfparallel.selftest.bandwidth_checks import NCCL, judge_bandwidth
from tfparallel.selftest.contenders import IN_ONE_PROCESS
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.memory_checks import Growth, judge_growth
from tfparallel.selftest.pipeline_checks import (
    MemoryUse,
    computing_s,
    judge_balance,
    judge_memory,
)
from tfparallel.selftest.speed_checks import judge_input
from tfparallel.selftest.verdicts import CheckFailedError

CPUS = ["CPU:0", "CPU:1"]


def test_what_sums_slower_than_nccl_fails():
    assert judge_bandwidth({NCCL: 1e11, "mirrored": 9e10}).text == (
        "NCCL alone 100.0 GB/s, mirrored 90.0 GB/s"
    )
    with pytest.raises(CheckFailedError, match="horovod 79.0 GB/s"):
        judge_bandwidth({NCCL: 1e11, "mirrored": 9e10, "horovod": 7.9e10})


def test_a_strategy_and_the_operation_sum_the_same():
    one, size = tf.ones([]), 1024
    own = bandwidth_checks._sums(IN_ONE_PROCESS["mirrored"](CPUS), size)(one)
    alone = bandwidth_checks._raw_sums(CPUS, size, "ring")(one)
    assert list(map(float, own)) == list(map(float, alone)) == [1024.0, 1024.0]  # 2 ** _SUMS


def test_bus_bandwidth_is_of_what_each_device_has_to_send(monkeypatch):
    monkeypatch.setattr(bandwidth_checks.time, "perf_counter", itertools.count().__next__)
    found = bandwidth_checks._bytes_per_s(lambda one: [one], replicas=4, size_bytes=100)
    assert found == 1.5 * 100 / 0.1  # ten sums in a second


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_strategy_is_measured_in_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth_checks, "_SIZE_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth_checks, "_LEAST_OF_NCCL", 0.0)
    found = bandwidth_checks.compare_bandwidth(Bench((), str(tmp_path))).figures
    assert found.keys() | {"horovod"} == {NCCL, "mirrored", "multi_worker_mirrored", "horovod"}


def test_steps_of_batches_on_devices_are_those_of_fit(monkeypatch):
    for name, value in {"_IMAGE": (12, 12, 3), "_IMAGES_A_GPU": 2, "_CHANNELS": 2}.items():
        monkeypatch.setattr(speed_checks, name, value)
    monkeypatch.setattr(speed_checks, "_EPOCHS", 1)
    strategy = IN_ONE_PROCESS["mirrored"](CPUS)
    monkeypatch.setattr(speed_checks, "STEPS", 2)  # of two epochs
    model, batch = speed_checks._image_model(strategy, len(CPUS))
    assert len(speed_checks.seconds_of_fit(model, batch, epochs=1)) == 1
    monkeypatch.setattr(speed_checks, "STEPS", 3)  # and one before
    other, batch = speed_checks._image_model(strategy, len(CPUS))
    assert len(speed_checks._seconds_on_devices(strategy, other, batch)) == 1
    for own, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-7)


def test_input_that_steps_wait_for_fails():
    assert judge_input(1.0, 0.95).figures["steps_per_s"] == 20
    with pytest.raises(CheckFailedError, match="20.0 steps/s, 25.0 with batches on the GPUs"):
        judge_input(1.0, 0.8)


def test_a_device_computes_while_any_of_its_streams_does():
    ran = [
        Ran("a", "MatMul", "GPU:0", 10.0, 12.0),
        Ran("b", "Relu", "GPU:0", 11.0, 13.0),  # beside it
        Ran("c", "MemcpyP2P", "GPU:0", 13.0, 20.0),
        Ran("d", "MatMul", "GPU:0", 21.0, 22.0),
        Ran("e", "MatMul", "GPU:1", 10.0, 30.0),
        Ran("a", "MatMul", "", 9.0, 31.0),  # its launch
    ]
    assert [computing_s(ran, device) for device in ("GPU:0", "GPU:1", "GPU:2")] == [4.0, 20.0, 0.0]


def test_stages_that_take_longer_than_others_fail():
    text = "stages take 52%, 48% of the time; predicted 50%, 50%"
    assert judge_balance([0.5, 0.5], [5.2, 4.8]).text == text
    with pytest.raises(CheckFailedError, match="61%, 39%"):
        judge_balance([0.5, 0.5], [6.1, 3.9])
    with pytest.raises(CheckFailedError, match="nothing on some GPUs"):
        judge_balance([0.5, 0.5], [6.1, 0.0])


@pytest.mark.parametrize(
    ("many", "lowered", "message"),
    [
        ([(95, 100), (50, 60)], 0.5, None),
        ([(101, 100), (50, 60)], 0.5, "4: 90 MiB, 64: 101 MiB"),
        ([(90, 100), (80, 60)], 0.5, "to 133% of predictions"),
        ([(90, 100), (30, 60)], 0.5, "50% to"),
        ([(95, 100), (50, 60)], 0.8, "with offload 80%"),
    ],
)
def test_memory_is_held_against_fewer_microbatches_the_prediction_and_policies(
    many, lowered, message
):
    few = [(90, 100), (50, 60)]
    uses = {
        number: [MemoryUse(*(n << 20 for n in each)) for each in own]
        for number, own in ((4, few), (64, many))
    }
    if message is None:
        assert judge_memory(uses, {"offload": lowered}).text == (
            "peaks by microbatches: 4: 90 MiB, 64: 95 MiB; 83% to 95% of predictions; "
            "with offload 50%"
        )
    else:
        with pytest.raises(CheckFailedError, match=message):
            judge_memory(uses, {"offload": lowered})


@pytest.mark.turns
def test_the_memory_of_pipelines_is_asked_of_their_devices(monkeypatch):
    """CPUs tell of no peak, so that it is made up here: what runs is the rest."""
    asked = []
    info = lambda device: asked.append(device) or {"peak": 3 << 20}  # noqa: E731
    monkeypatch.setattr(pipeline_checks, "open_devices", lambda: None)  # this process goes on
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: None)
    for name, value in {"_MICROBATCH_ROWS": 2, "_WIDTH": 8, "_MICROBATCHES": (2,)}.items():
        monkeypatch.setattr(pipeline_checks, name, value)
    monkeypatch.setattr(pipeline_checks, "judge_memory", lambda *found: found)
    by_number, lowered = pipeline_checks.measure_memory(Bench((), ""))
    assert asked == CPUS * 4 and lowered == {"offload": 1.0, "rematerialize": 1.0}
    assert [use.measured for use in by_number[2]] == [3 << 20] * 2
    # All weights, and two copies of their gradients, wherever layers this small are put.
    assert sum(use.predicted for use in by_number[2]) > 3 * 23 * 8 * 8 * 4


@pytest.mark.parametrize("kept_bytes", [0, 128 << 20])
def test_what_steps_leave_behind_is_found(tmp_path, monkeypatch, kept_bytes):
    kept, fit = [], keras.Model.fit

    def keep_and_fit(*args, **kwargs):
        kept.append(np.ones(kept_bytes // 8))
        return fit(*args, **kwargs)

    monkeypatch.setattr(keras.Model, "fit", keep_and_fit)
    for name in ("_FIRST_STEPS", "_STEPS"):
        monkeypatch.setattr(memory_checks, name, 4)
    found = {"mirrored": memory_checks._growth("mirrored", Bench((), str(tmp_path)))}
    if kept_bytes:
        with pytest.raises(CheckFailedError, match="mirrored [+]1[0-9][0-9] MiB on the host"):
            judge_growth(found)
    else:
        judge_growth(found)


def test_a_peak_that_grows_fails():
    judge_growth({"mirrored": Growth(0, 1.05)})
    with pytest.raises(CheckFailedError, match="peaks of GPUs x1.20"):
        judge_growth({"mirrored": Growth(0, 1.05), "pipeline_1f1b": Growth(0, 1.2)})
