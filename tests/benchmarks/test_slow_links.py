"""Links with a rate and a delay, what changes on them, and the verdicts of time to a loss."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import delay_line  # noqa: E402
import network  # noqa: E402
import time_to_loss  # noqa: E402

NEEDS_HOSTS = pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))


def test_packets_leave_at_the_rate_and_arrive_after_the_delay():
    direction = delay_line.Direction(bytes_per_s=1000.0, delay_s=0.5)
    for number in range(3):
        direction.enter(bytes([number]) * 10, 1.0)
    assert direction.next_s == pytest.approx(1.0 + 0.01 + 0.5)
    assert direction.arrived(1.505) == []
    assert direction.arrived(1.5201) == [bytes([0]) * 10, bytes([1]) * 10]
    direction.enter(bytes([3]) * 10, 2.0)  # the line was idle meanwhile
    assert [packet[0] for packet in direction.arrived(2.6)] == [2, 3]
    assert direction.next_s == float("inf")


def test_packets_that_would_wait_too_long_are_dropped():
    direction = delay_line.Direction(bytes_per_s=1000.0, delay_s=0.0)
    sent = 20
    for _ in range(sent):
        direction.enter(bytes(10), 0.0)
    arrived = len(direction.arrived(1.0))
    assert arrived == 1 + int(delay_line.QUEUE_S * 1000 / 10)
    assert direction.dropped == sent - arrived


ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5555))
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(10):
    connection.sendall(connection.recv(1))
left = int(sys.argv[2])
while left:
    left -= len(connection.recv(1 << 16))
connection.sendall(b"x")
"""
CONNECT = """
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 5555))
        break
    except ConnectionError:
        time.sleep(0.1)
"""
SEND = (
    CONNECT
    + """
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(10):
    began = time.monotonic()
    connection.sendall(b"x"), connection.recv(1)
    print(time.monotonic() - began)
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[2]))), connection.recv(1)
print(time.monotonic() - began)
"""
)


@pytest.mark.long
@NEEDS_HOSTS
@pytest.mark.parametrize(("mbit_per_s", "round_trip_ms"), [(20, 100), (50, 0)])
def test_a_link_of_two_hosts_has_its_rate_and_its_delay(mbit_per_s, round_trip_ms):
    """Bounds from below: other work on this machine may make it slower, nothing makes it faster."""
    size_bytes = 5_000_000
    with network.two_hosts(mbit_per_s, "cubic", round_trip_ms) as hosts:
        echo, send = (
            [*host.prefix, sys.executable, "-c", program, hosts[0].address, str(size_bytes)]
            for host, program in zip(hosts, (ECHO, SEND), strict=True)
        )
        with subprocess.Popen(echo) as other:
            output = subprocess.run(send, capture_output=True, text=True, check=True).stdout
            assert other.wait(10) == 0
    *trips_s, transfer_s = map(float, output.split())
    assert min(trips_s) >= round_trip_ms / 1e3
    assert min(trips_s) <= round_trip_ms / 1e3 + 0.02
    assert transfer_s >= 0.95 * 8e-6 * size_bytes / mbit_per_s


ANSWER = """
import socket, sys
connection, _ = socket.create_server((sys.argv[1], 5555)).accept()
while message := connection.recv(1):
    connection.sendall(message)
"""
PACE = (
    CONNECT
    + """
from tfparallel.communication.pacing import pace_if_far, round_trip_s
for _ in range(5):
    connection.sendall(b"x"), connection.recv(1)
pace_if_far(connection)
limit = connection.getsockopt(socket.SOL_SOCKET, 47, 8)
print(round_trip_s(connection), limit != 8 * bytes([255]))
"""
)


@NEEDS_HOSTS
@pytest.mark.parametrize(("link", "is_paced"), [((20, 30), True), ((0, 0), False)])
def test_what_goes_a_long_way_is_paced(link, is_paced):
    mbit_per_s, round_trip_ms = link
    with network.two_hosts(mbit_per_s, "cubic", round_trip_ms) as hosts:
        answer, pace = (
            [*host.prefix, sys.executable, "-c", program, hosts[0].address]
            for host, program in zip(hosts, (ANSWER, PACE), strict=True)
        )
        with subprocess.Popen(answer) as other:
            output = subprocess.run(pace, capture_output=True, text=True, check=True).stdout
            assert other.wait(10) == 0
    trip_s, paced = output.split()
    assert float(trip_s) >= round_trip_ms / 1e3
    assert paced == str(is_paced)


def test_a_delay_needs_a_rate():
    with pytest.raises(ValueError, match="has a rate. Received: 0 Mbit/s"):
        network.two_hosts(0, "cubic", 50).__enter__()


def test_verdicts_hold_adaptive_to_the_best_and_to_none():
    times = {
        "none": [10.0, 30.0],
        "PowerSGD(4)": [5.0, float("inf")],
        time_to_loss.ADAPTIVE: [5.4, 31.0],
        "torch fp16": [1.0, 2.0],  # beside, not among what Adaptive could choose
    }
    ends = {"none": 0.100, "PowerSGD(4)": 0.2, time_to_loss.ADAPTIVE: 0.102}
    lines = list(time_to_loss.verdicts((1.0, 0.3), times, ends))
    assert [line.split(":")[0] for line in lines] == [
        "reached",  # 1.08 of PowerSGD(4)
        "reached",  # sooner than none
        "reached",  # 1.033 of none, the best
        "MISSED",  # and more than 3 % behind it
        "MISSED",  # 2 % above none's last loss
    ]
    assert "PowerSGD(4) = 1.08 (at most 1.1)" in lines[0]
    assert "none = 1.02 (at most 1.01)" in lines[-1]


def test_a_loss_that_adaptive_never_reaches_is_missed():
    times = {"none": [10.0], time_to_loss.ADAPTIVE: [float("inf")]}
    lines = list(time_to_loss.verdicts((1.0,), times, {}))
    assert all(line.startswith("MISSED") and "= inf" in line for line in lines) and lines


@pytest.mark.long
@NEEDS_HOSTS
def test_adaptive_decides_again_when_the_rate_of_a_real_link_changes(tmp_path):
    """Exact where the link is as fast as this machine; not where a step's 216 KB take 1.7 s."""
    decided = re.compile(r"(?:bucket 0|all) is sent as ([^ :]+)")

    def wait_for(condition) -> list[str]:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            log = (tmp_path / "0.log").read_text()
            assert all(worker.poll() is None for worker in workers), log[-3000:]
            if condition(log):
                return decided.findall(log)
            time.sleep(0.5)
        raise AssertionError(f"Adaptive did not decide in time:\n{log[-3000:]}")

    with (
        network.two_hosts(0, "cubic") as hosts,
        time_to_loss.training(hosts, "cnn", "Adaptive(interval=10)", 0, tmp_path) as workers,
    ):
        on_fast = wait_for(lambda log: decided.search(log) and " ms each" in log)
        for host in hosts:
            network.set_rate(host, 1)
        wait_for(lambda log: "measures" in log)
        num_before = len(decided.findall((tmp_path / "0.log").read_text()))
        on_slow = wait_for(lambda log: len(decided.findall(log)) > num_before)
    assert "uncompressed" in on_fast
    assert on_slow[-1].startswith("PowerSGD")


def test_pictures_are_drawn_of_what_several_runs_wrote(tmp_path):
    steps = [[float(i), 2.0 / (i + 1)] for i in range(20)]
    cell = {"none": [steps], time_to_loss.ADAPTIVE: [steps, steps]}
    files = [tmp_path / "cnn.json", tmp_path / "mlp.json"]
    files[0].write_text(json.dumps({"100 Mbit/s": {"cnn": cell}, "no limit": {"cnn": cell}}))
    files[1].write_text(json.dumps({"100 Mbit/s": {"mlp": cell}}))
    results = time_to_loss.read_results(files)
    assert {link: set(cells) for link, cells in results.items()} == {
        "100 Mbit/s": {"cnn", "mlp"},
        "no limit": {"cnn"},
    }
    np.testing.assert_array_equal(results["no limit"]["cnn"][time_to_loss.ADAPTIVE][1], steps)
    time_to_loss.plot(results, tmp_path)
    names = {picture.name for picture in tmp_path.glob("*.png")}
    assert names == {"time_to_loss_100_Mbits.png", "time_to_loss_no_limit.png"}
