"""The chief or a parameter server dies with `kill -9`: who ends, and how the job goes on."""

import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.turns


def test_servers_of_a_dead_chief_end_and_say_why(make_servers, start_chief):
    servers = make_servers(TEST_CHIEF_S="2")
    chief = start_chief("chief_of_others", servers, CASE_EPOCHS="10000")
    chief.wait_for("EPOCH 1")
    chief.process.kill()
    statuses = servers.statuses(timeout_s=30)
    assert set(statuses.values()) == {1}, statuses
    assert f"the chief ({servers.cluster['chief'][0]})" in servers.log("worker", 1)
    assert "it died. (ps 0 is speaking.)" in servers.log("ps", 0)


def test_a_chief_that_was_there_between_two_looks_for_it_has_been_there(make_servers):
    """It has said so; nobody ever listens at its address when the server looks."""
    servers = make_servers(num_workers=1, num_ps=0, TEST_CHIEF_S="1")
    mailbox = Path(f"/proc/{servers.processes['worker', 0].pid}/fd/200")
    deadline_s = time.monotonic() + 30
    while not mailbox.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    mailbox.write_bytes(b"here")
    assert servers.statuses(timeout_s=20) == {("worker", 0): 1}
    assert "it died. (worker 0 is speaking.)" in servers.log("worker", 0)


def test_servers_serve_a_chief_that_is_started_again(make_servers, start_chief):
    servers = make_servers()
    chief = start_chief("chief_of_others", servers, CASE_EPOCHS="10000")
    chief.wait_for("EPOCH 1")
    chief.process.kill()
    assert chief.process.wait() is not None  # or its port is not free yet
    result = start_chief("chief_of_others", servers, CASE_EPOCHS="2").result()
    assert result["iterations"] == result["expected"]
    assert result["seen"] == [1.0]
    assert set(servers.statuses().values()) == {0}


def test_job_that_lost_a_parameter_server_resumes_from_its_backup(make_servers, start_chief):
    servers = make_servers(TEST_CHIEF_S="2")
    chief = start_chief("with_backup", servers, CASE_EPOCHS="10000")
    chief.wait_for("EPOCH 3")
    servers.kill("ps", 0)
    assert chief.process.wait(60) == 1
    assert f"ps 0 ({servers.cluster['ps'][0]}) is gone" in chief.log
    last = _last_epoch(chief)

    result = start_chief("with_backup", make_servers(), CASE_EPOCHS=str(last + 2)).result()
    assert result["epochs"][0] in (last - 1, last)
    assert result["epochs"][-1] == last + 1
    assert result["iterations"] == 29 * (last + 2)


def test_a_killed_worker_and_then_all_killed_cost_no_batch(make_servers, start_chief):
    """Backups in the middle of an epoch: what was done before counts, and is not done again."""
    servers = make_servers(TEST_CHIEF_S="2")
    options = {"CASE_SAVE_FREQ": "5"}
    chief = start_chief("with_backup", servers, CASE_EPOCHS="10000", **options)
    chief.wait_for("EPOCH 1")
    servers.kill("worker", 1)
    chief.wait_for(f"EPOCH {_last_epoch(chief) + 2}")
    assert f"worker 1 ({servers.cluster['worker'][1]}) is lost" in chief.log
    servers.start("worker", 1)
    chief.wait_for(f"EPOCH {_last_epoch(chief) + 2}")
    chief.process.kill()
    for task in servers.processes:
        servers.kill(*task)

    last = _last_epoch(chief)
    again = start_chief("with_backup", make_servers(), CASE_EPOCHS=str(last + 1), **options)
    result = again.result()
    assert result["epochs"] in ([last], [last - 1, last])
    assert result["iterations"] == 29 * (last + 1)
    assert result["seen"] == [1.0]


def _last_epoch(chief) -> int:
    return max(int(line.split()[1]) for line in chief.log.splitlines() if "EPOCH" in line)
