"""Doctors of several hosts measure the links between them, and end where another never comes."""

import concurrent.futures
import socket
import time

import pytest

from tfparallel.machine.link import Link, check_links, findings_of

pytestmark = pytest.mark.timeout(60)


def free_addresses(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in servers]
    for each in servers:
        each.close()
    return addresses


def doctors(addresses, folders):
    def one(i):
        others = [each for each in addresses if each != addresses[i]]
        return list(check_links(addresses[i], others, folders[i], limit_s=20.0))

    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(one, range(len(addresses))))


def status_of(findings, check):
    return [each.status for each in findings if each.check == check]


def test_three_hosts_with_one_folder(tmp_path):
    started = time.monotonic()
    for findings in doctors(free_addresses(3), [tmp_path] * 3):
        assert [each.check for each in findings] == ["link", "clock", "shared folder"] * 2
        assert status_of(findings, "shared folder") == ["ok"] * 2
        assert status_of(findings, "clock") == ["ok"] * 2
    assert time.monotonic() - started < 15  # nobody waits for the limit
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_shared(tmp_path):
    for findings in doctors(free_addresses(2), [tmp_path / "a", tmp_path / "b"]):
        assert status_of(findings, "shared folder") == ["problem"]


def test_nobody_is_there():
    own, other = free_addresses(2)
    (found,) = check_links(own, [other], limit_s=0.5)
    assert found.status == "problem" and other in found.found


def test_a_stranger_answers():
    own, other = free_addresses(2)
    with socket.create_server(("127.0.0.1", int(other.split(":")[1]))):
        (found,) = check_links(own, [other], limit_s=1.0)
    assert found.status == "problem"


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (Link("b:1", 1e-4, 9000.0, 0.0, True), ["ok", "ok", "ok"]),
        (Link("b:1", 1e-4, 94.0, 0.0, None), ["warning", "ok"]),
        (Link("b:1", 0.03, 9000.0, 0.0, None), ["warning", "ok"]),
        (Link("b:1", 1e-4, 9000.0, -2.0, None), ["ok", "warning"]),
        (Link("b:1", 1e-4, 9000.0, 0.0, False), ["ok", "ok", "problem"]),
    ],
)
def test_what_is_bad_about_a_link(link, expected):
    assert [each.status for each in findings_of(link)] == expected
