import json

import pytest

from tfparallel.launch.roles import WORKER, Role, plan_processes, tf_config_place

ADDRESSES = ["127.0.0.1:5001", "127.0.0.1:5002"]


def plan(roles=None, base_env=None, num_cores=64, **options):
    return plan_processes(
        roles or {WORKER: ADDRESSES}, base_env or {}, num_cores=num_cores, **options
    )


def tasks(planned):
    return [json.loads(process.env["TF_CONFIG"])["task"] for process in planned]


def test_plans_one_process_per_address():
    planned = plan()
    assert [process.label for process in planned] == ["worker 0", "worker 1"]
    assert tasks(planned) == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    for process in planned:
        assert json.loads(process.env["TF_CONFIG"])["cluster"] == {"worker": ADDRESSES}


def test_another_role_is_another_row():
    planned = plan({Role("chief", tf_config_place): ["127.0.0.1:5000"], WORKER: ADDRESSES})
    assert [process.label for process in planned] == ["chief 0", "worker 0", "worker 1"]
    assert tasks(planned)[0] == {"type": "chief", "index": 0}
    assert all("127.0.0.1:5000" in process.env["TF_CONFIG"] for process in planned)


def test_a_role_can_tell_the_place_in_other_words():
    ranks = Role("rank", lambda addresses, name, i: {"RANK": f"{i} of {len(addresses[name])}"})
    assert [p.env["RANK"] for p in plan({ranks: ADDRESSES})] == ["0 of 2", "1 of 2"]


def test_inherits_the_environment_but_not_its_place():
    (first, _) = plan(base_env={"HOME": "/root", "TF_CONFIG": "another job's"})
    assert first.env["HOME"] == "/root"
    assert "another" not in first.env["TF_CONFIG"]


@pytest.mark.parametrize("num_cores, expected", [(1, "8"), (7, "8"), (8, None), (64, None)])
def test_small_machines_get_enough_inter_op_threads(num_cores, expected):
    assert plan(num_cores=num_cores)[0].env.get("TF_NUM_INTEROP_THREADS") == expected


def test_keeps_what_the_user_has_set():
    base_env = {"TF_NUM_INTEROP_THREADS": "2", "PYTHONUNBUFFERED": "x"}
    env = plan(base_env=base_env, num_cores=1)[0].env
    assert {name: env[name] for name in base_env} == base_env


def test_output_is_unbuffered():
    assert plan()[0].env["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("devices, expected", [(None, None), (3, "3")])
def test_logical_devices_are_passed_on(devices, expected):
    env = plan(devices_per_worker=devices)[0].env
    assert env.get("TFPARALLEL_LOGICAL_CPUS") == expected
