"""Stages in several processes train as one device does."""

import pytest

pytestmark = pytest.mark.turns

CHIEF, WORKER = ("/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0")


def test_two_processes_train_as_one_device(run_case):
    result = run_case("two_stages")
    assert result["status"] == 0
    for what in ("skip_connections", "batch_norm", "sample_weight", "dropout"):
        assert result[what] < 1e-5, what
    for devices in (result["devices"], result["slots"]):
        assert {device.rpartition("/device")[0] for device in devices} == {CHIEF, WORKER}
    assert all(device.startswith(WORKER) for device in result["metrics"])
    assert "chief 0 CPU:0" in result["summary"] and "worker 0 CPU:0" in result["summary"]


def test_three_processes_send_tensors_straight_to_one_another(run_case):
    result = run_case("three_stages")
    assert result["difference"] < 1e-5
    tasks = ["chief 0", "worker 0", "worker 1"]
    assert result["links"] == sorted([a, b] for a in tasks for b in tasks if a != b)
    # Targets, and their weights, at once for all microbatches; of inputs the shapes only; the
    # learning rate.
    assert result["beside_activations"] == {"Placeholder": 2, "Shape": 4, "Identity": 1}


def test_processes_of_one_thread_do_not_spin_and_train_as_one_device(run_case):
    result = run_case("one_thread")
    assert result["difference"] < 1e-5
    assert not result["may_spin"]


def test_forward_passes_and_files_work(run_case):
    result = run_case("files_and_forward_passes")
    for what in ("loaded", "checkpoint", "evaluate", "predict"):
        assert result[what] < 1e-5, what
    assert result["unchanged"]
    assert "worker 0 CPU:0" in result["swimlane"]


def test_training_resumes_from_its_backup(run_case):
    result = run_case("resumes")
    assert result["epochs"] == [1, 2]
    assert result["difference"] < 1e-5
