"""Workers that stop, are cut off, come too late or never: the others end in time, and name them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.multi_process.forking import forked
from tests.multi_process.pool import REPOSITORY, cluster_environments
from tests.parameter_server.spawner import Child

pytestmark = pytest.mark.turns

SILENT_S = 5.0
ENDS_IN_S = 45.0  # with a loaded machine


class Job:
    """Workers of a module, each with a log."""

    def __init__(self, folder: Path, silent_s: float = SILENT_S, start_s: float = 60.0):
        self.folder, self.arguments = folder, [str(folder / "trains"), str(silent_s), str(start_s)]
        self.module = "tests.multi_process.steady_worker"
        self.processes: dict[int, Child | subprocess.Popen] = {}

    def start(self, rank: int, environment: dict) -> None:
        log = self.folder / f"{rank}.log"
        self.processes[rank] = forked(self.module, self.arguments, environment, log)

    def start_elsewhere(self, rank: int, environment: dict, prefix: Sequence[str]) -> None:
        """With a command before it, which a fork cannot have."""
        self.processes[rank] = subprocess.Popen(
            [*prefix, sys.executable, "-m", self.module, *self.arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            stdout=(self.folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")

    def wait_until_all_train(self) -> None:
        deadline_s = time.monotonic() + 90
        while not all((self.folder / f"trains.{rank}").exists() for rank in self.processes):
            assert time.monotonic() < deadline_s, [self.log(rank) for rank in self.processes]
            time.sleep(0.1)

    def status(self, rank: int, timeout_s: float = ENDS_IN_S) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.processes[rank].wait(timeout_s)
            if status is not None:
                return status
        raise AssertionError(f"rank {rank} hangs:\n{self.log(rank)}")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def address_of(environment: dict, rank: int) -> str:
    return json.loads(environment["TF_CONFIG"])["cluster"]["worker"][rank]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_stopped_worker_is_named_by_all_others_which_end(job, victim):
    environments = cluster_environments(3)
    for rank, environment in enumerate(environments):
        job.start(rank, environment)
    job.wait_until_all_train()
    job.processes[victim].send_signal(signal.SIGSTOP)
    for rank in {0, 1, 2} - {victim}:
        assert job.status(rank) != 0
        named = f"rank {victim} ({address_of(environments[0], victim)})"
        assert named in job.log(rank), job.log(rank)
        assert f"Rank {rank} is speaking" in job.log(rank)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["sharded", "sharded collectives"])
def test_the_limit_that_a_sharded_strategy_is_given_ends_the_survivor(job, strategy):
    environments = cluster_environments(2)
    for rank, environment in enumerate(environments):
        job.start(rank, {**environment, "TEST_STRATEGY": strategy})
    job.wait_until_all_train()
    job.processes[1].send_signal(signal.SIGSTOP)
    assert job.status(0) != 0
    assert f"rank 1 ({address_of(environments[0], 1)})" in job.log(0), job.log(0)
    assert "Rank 0 is speaking" in job.log(0), job.log(0)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["collectives", "sharded collectives"])
def test_a_worker_that_answers_and_never_comes_to_tensorflows_collective_is_named(job, strategy):
    environments = cluster_environments(2)
    variables = {"TEST_STRATEGY": strategy, "TEST_STALL_S": "6", "TEST_STAYS_AWAY": "1"}
    for rank, environment in enumerate(environments):
        job.start(rank, {**environment, **variables})
    job.wait_until_all_train()
    assert job.status(0) != 0
    where = f"rank 1 (/job:worker/task:1 at {address_of(environments[0], 1)})"
    assert f"Expected {where} to come to a collective within 6 s" in job.log(0), job.log(0)
    assert "(rank 0 is speaking.)" in job.log(0)
    assert "DeadlineExceededError" in job.log(0), "what waits has not failed by the watch"


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["copies", "copies collectives"])
def test_a_stopped_worker_that_shares_a_copy_is_named_by_the_workers_of_all_copies(job, strategy):
    environments = cluster_environments(4)
    for rank, environment in enumerate(environments):
        job.start(rank, {**environment, "TEST_STRATEGY": strategy})
    job.wait_until_all_train()
    job.processes[3].send_signal(signal.SIGSTOP)
    for rank in (0, 1, 2):
        assert job.status(rank) != 0
        named = f"rank 3 ({address_of(environments[0], 3)})"
        assert named in job.log(rank), job.log(rank)
        assert f"Rank {rank} is speaking" in job.log(rank)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_that_never_comes_to_a_collective_of_its_copy_is_named(job):
    environments = cluster_environments(4)
    variables = {"TEST_STALL_S": "6", "TEST_STAYS_AWAY": "3"}
    for rank, environment in enumerate(environments):
        job.start(rank, {**environment, "TEST_STRATEGY": "copies collectives", **variables})
    job.wait_until_all_train()
    assert job.status(2) != 0
    where = f"rank 3 (/job:worker/task:3 at {address_of(environments[0], 3)})"
    told = f"Expected {where}, or one that it waits for, to come to a collective within 6 s"
    assert told in job.log(2), job.log(2)
    for rank in (0, 1):  # each waits for one that waits for rank 3
        assert job.status(rank) != 0


@pytest.mark.timeout(240)
def test_a_worker_whose_network_is_cut_is_named(job, tmp_path):
    with two_hosts() as hosts:
        addresses = [f"{host}:4711" for _, host in hosts]
        for rank, (namespace, _) in enumerate(hosts):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            variables = {"TF_CONFIG": json.dumps(config), "TFPARALLEL_INSECURE_NETWORK": "1"}
            job.start_elsewhere(rank, variables, ["ip", "netns", "exec", namespace])
        job.wait_until_all_train()
        run("ip", "netns", "exec", hosts[0][0], "ip", "link", "set", "wire", "down")
        for rank in (0, 1):
            assert job.status(rank) != 0
            named = f"rank {1 - rank} ({addresses[1 - rank]})"
            assert named in job.log(rank), job.log(rank)


@pytest.mark.timeout(120)
def test_a_worker_that_starts_when_the_others_are_done_ends_and_names_them(job):
    """They were there: their ports are closed again."""
    environments = cluster_environments(2)
    job.arguments[2] = "4"
    job.start(1, environments[1])
    assert job.status(1) != 0
    where = f"rank 0 ({address_of(environments[0], 0)}, where nothing listens)"
    assert f"Expected {where} to start within 4 s" in job.log(1), job.log(1)
    assert "(rank 1 is speaking.)" in job.log(1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "a stranger answers b'SSH-2.0"),
        pytest.param(b"", "something listens", marks=pytest.mark.long),
    ],
)
def test_a_taken_port_is_named_with_what_answers_by_who_has_it_and_by_who_waits(job, says, told):
    environments = cluster_environments(2)
    taken = address_of(environments[0], 0)
    with stranger(int(taken.rpartition(":")[2]), says):
        job.arguments[2] = "6"
        for rank in (0, 1):
            job.start(rank, environments[rank])
        for rank in (0, 1):
            assert job.status(rank) != 0
            assert taken in job.log(rank) and told in job.log(rank), job.log(rank)
    assert "PortTakenError" in job.log(0)
    assert "to start within 6 s" in job.log(1)


@contextlib.contextmanager
def stranger(port: int, says: bytes) -> Iterator[None]:
    """Something at a port of this machine that is no worker."""
    guests = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = listener.accept()
                guests.append(guest)
                guest.sendall(says)

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces with a wire between them: their names and addresses."""
    names = [f"tfp{os.getpid()}{side}" for side in "ab"]
    hosts = list(zip(names, ["10.211.77.1", "10.211.77.2"], strict=True))
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        ends = ["wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns"]
        run("ip", "link", "add", *ends, names[1])
        for name, address in hosts:
            for command in (
                f"addr add {address}/24 dev wire",
                "link set wire up",
                "link set lo up",
            ):
                run("ip", "netns", "exec", name, "ip", *command.split())
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode and "netns" in command and command[2] == "add":
        pytest.skip(f"no network namespaces here: {finished.stderr}")
    assert finished.returncode == 0, (command, finished.stderr)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("what", "wrong"), [("bit", 1), pytest.param("bit", 0, marks=pytest.mark.long), ("no", 9)]
)
def test_a_worker_with_a_flipped_bit_in_a_weight_is_named_by_all(job, what, wrong):
    """After step 6 of 10; weights are compared every 4 steps."""
    job.module = "tests.multi_process.wrong_worker"
    job.arguments = [str(wrong), what]
    for rank, environment in enumerate(cluster_environments(3)):
        job.start(rank, environment)
    for rank in range(3):
        status, log = job.status(rank, timeout_s=90), job.log(rank)
        assert ("step 7" in log) and (status == 0) == ("trained" in log) == (what == "no"), log
        if what != "no":
            assert f"other weights in rank {wrong}, in step 8" in log, log[-3000:]
            assert "step 8\n" not in log


@pytest.mark.timeout(200)
def test_the_worker_on_which_a_NaN_came_up_is_named_by_all(job):
    """A step later it is on all of them, with the same bits or with others."""
    job.module = "tests.multi_process.wrong_worker"
    job.arguments = ["1", "NaN"]
    for rank, environment in enumerate(cluster_environments(3)):
        job.start(rank, environment)
    for rank in range(3):
        job.status(rank, timeout_s=90)
        told = "The loss or a metric of rank 1 was not finite in step 7, before that of any other:"
        assert told in job.log(rank), job.log(rank)[-3000:]
