"""Layers in parts on devices of several real processes train as on one device."""

from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.parameter_server.program import Program
from tests.parameter_server.spawner import Spawner
from tfparallel.tensor_parallel.extended import _check_first_devices
from tfparallel.tensor_parallel.mesh_groups import mesh_groups

CASES = "tests.tensor_parallel.process_cases"
CHIEF, WORKER = ("/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0")


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner]:
    """Forks chiefs."""
    spawner = Spawner(CASES)
    yield spawner
    spawner.close()


@pytest.fixture
def run_case(spawner: Spawner, tmp_path: Path) -> Callable[[str], dict]:
    """Runs a program; gives what it returned, or fails with the end of its log."""
    return lambda name: Program(spawner, CASES, tmp_path, name).result()


def test_two_processes_train_save_and_predict_as_one_device(run_case):
    result = run_case("a_layout_map")
    assert result["status"] == 0
    assert result["difference"] < 1e-5
    assert result["loaded"] < 1e-5
    assert [d.rpartition("/device")[0] for d in result["devices"]] == [CHIEF, WORKER]
    assert "chief 0 CPU:0+worker 0 CPU:0" in result["name"]
    assert result["axes"].startswith("Axis 'model' (2) crosses 2 processes")


@pytest.mark.long
def test_three_processes_train_a_transformer_as_one_device(run_case):
    assert run_case("a_transformer_of_three_processes")["difference"] < 1e-5


@pytest.mark.long
def test_two_processes_train_an_rnn_and_branches_as_one_device(run_case):
    result = run_case("an_rnn_and_branches")
    assert result["units"] < 1e-5
    assert result["branches"] < 1e-5


@pytest.mark.long
def test_variables_of_before_are_refused_and_functions_of_before_do_no_harm(run_case):
    result = run_case("trained_before_it_is_connected")
    assert "to be made before any variable" in result["refused"]
    assert "mine" in result["refused"] and "(worker 0 is speaking.)" in result["refused"]
    assert result["difference"] < 1e-5
    assert "remove non-existent function" not in result["log"]


@pytest.mark.long
def test_a_process_that_is_killed_is_named(run_case):
    error = run_case("a_process_is_killed")["error"]
    assert "no answer from worker 0 (127.0.0.1:" in error


def _mesh(*names):
    return keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), np.array(names))


def test_a_mesh_counts_the_devices_of_all_processes():
    of_cluster = [f"{CHIEF}/device:CPU:0", f"{WORKER}/device:CPU:0"]
    groups = mesh_groups(_mesh("cpu:1", "cpu:0"), None, of_cluster)
    assert groups.groups == ((of_cluster[1], of_cluster[0]),)
    with pytest.raises(ValueError, match="of the 2 of all processes.*Received: .*cpu:2"):
        mesh_groups(_mesh("cpu:0", "cpu:2"), None, of_cluster)


def test_refuses_replicas_that_begin_in_different_processes():
    groups = [[f"{CHIEF}/device:CPU:0"], [f"{WORKER}/device:CPU:0"]]
    with pytest.raises(ValueError, match="must be one of the first process"):
        _check_first_devices(groups)
