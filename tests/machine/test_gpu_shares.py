"""Which worker sees which GPU, from what CUDA and its driver tell. No GPU is needed."""

import os

import pytest

from tfparallel.launch.roles import count_roles, plan_processes
from tfparallel.machine import gpu_shares
from tfparallel.machine.gpu_shares import gpus_in_list, gpus_of_machine, share_gpus

LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d0f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4)
  MIG 3g.20gb     Device  1: (UUID: MIG-17a0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9e1b)
"""


def test_instances_stand_in_the_place_of_the_gpu_they_divide():
    assert gpus_in_list(LISTED) == ["MIG-c6d4", "MIG-17a0", "GPU-9e1b"]
    assert gpus_in_list("No devices found\n") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", ["2", "0"]),
        ("GPU-5d0f,MIG-c6d4", ["GPU-5d0f", "MIG-c6d4"]),
        ("0,-1,1", ["0"]),  # CUDA stops at what is none
        ("-1", []),
        ("", []),
    ],
)
def test_what_the_user_shows_holds(visible, expected):
    assert gpus_of_machine({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_the_tool_the_driver_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_shares.shutil, "which", lambda name: None)
    for bus in ("0000:07:00.0", "0000:0f:00.0"):
        (tmp_path / bus).mkdir()
    assert gpus_of_machine({}, tmp_path) == ["0", "1"]
    assert gpus_of_machine({}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [("01234567", 2, ["0,1,2,3", "4,5,6,7"]), ("012", 2, ["0", "1"]), ("0", 1, ["0"])],
)
def test_shares_are_equal(gpus, workers, expected):
    assert share_gpus(list(gpus), workers) == expected


def test_more_workers_than_gpus_are_refused_or_share():
    with pytest.raises(ValueError, match=r"3 workers, 2 GPUs \(0, GPU-9e1b\)\. Start 2 workers"):
        share_gpus(["0", "GPU-9e1b"], 3)
    assert share_gpus(["0", "GPU-9e1b"], 3, may_share=True) == ["0", "GPU-9e1b", "0"]


def test_who_does_not_compute_sees_no_gpu():
    roles = _addresses(count_roles(2, num_ps=1, evaluator=True))
    planned = plan_processes(roles, os.environ, num_cores=8, gpus=["0,1", "2,3"])
    seen = {process.label: process.env["CUDA_VISIBLE_DEVICES"] for process in planned}
    assert seen == {
        "chief 0": "-1",
        "worker 0": "0,1",
        "worker 1": "2,3",
        "ps 0": "-1",
        "evaluator 0": "-1",
    }
    assert not any("TF_FORCE_GPU_ALLOW_GROWTH" in process.env for process in planned)


def test_who_shares_a_gpu_takes_memory_as_it_needs_it():
    roles = _addresses(count_roles(3))
    gpus = share_gpus(["0", "1"], 3, may_share=True)
    planned = plan_processes(roles, {}, num_cores=8, gpus=gpus)
    grows = [process.env.get("TF_FORCE_GPU_ALLOW_GROWTH") for process in planned]
    assert grows == ["true", None, "true"]


def test_a_machine_without_gpus_is_left_as_it_is():
    roles = _addresses(count_roles(2))
    planned = plan_processes(roles, {}, num_cores=8)
    assert all("CUDA_VISIBLE_DEVICES" not in process.env for process in planned)


def _addresses(counts):
    return {role: [f"{role.name}-{i}:1" for i in range(n)] for role, n in counts.items()}
