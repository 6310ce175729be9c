import socket

import pytest

from tfparallel.launch.ports import reserved_addresses


def ports(addresses):
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    return [int(address.rpartition(":")[2]) for address in addresses]


def test_addresses_differ_also_between_jobs():
    with reserved_addresses(20) as first, reserved_addresses(20) as second:
        assert len({*first, *second}) == 40


def test_nobody_else_can_take_a_reserved_port_by_accident():
    with (
        reserved_addresses(1) as addresses,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", *ports(addresses)))


def test_a_worker_that_shares_ports_can_listen_on_its_own():
    with reserved_addresses(1) as addresses, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", *ports(addresses)))
        server.listen()
        for _ in range(20):  # the reserving socket does not listen, so it takes none of them
            with socket.create_connection(("127.0.0.1", *ports(addresses)), timeout=5):
                server.settimeout(5)
                server.accept()[0].close()


def test_ports_are_free_after_the_job():
    with reserved_addresses(1) as addresses:
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", *ports(addresses)))
