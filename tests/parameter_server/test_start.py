"""Tasks that come too late, never, or find somebody else at a port: who waits ends, and says so."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.turns


@pytest.mark.timeout(90)
@pytest.mark.parametrize("num_ps", [0, 1])
def test_a_server_that_starts_when_the_chief_is_done_ends_and_names_it(make_servers, num_ps):
    """Of a pipeline (no parameter servers), and of parameter servers."""
    servers = make_servers(num_workers=1, num_ps=num_ps, TEST_START_S="3")
    assert set(servers.statuses(timeout_s=60).values()) == {1}
    chief = servers.cluster["chief"][0]
    expected = f"Expected the chief ({chief}, where nothing listens) to start within 3 s"
    assert expected in servers.log("worker", 0), servers.log("worker", 0)
    assert "(worker 0 is speaking.)" in servers.log("worker", 0)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("says", "told"), [(b"HTTP/1.1 400 Bad Request\r\n", "HTTP/1.1 400"), (b"", "says nothing")]
)
def test_a_chief_names_the_task_behind_whose_port_a_stranger_answers(
    make_servers, start_chief, says, told
):
    servers = make_servers(num_workers=1, num_ps=1, TEST_START_S="30")
    servers.kill("worker", 0)
    address = servers.cluster["worker"][0]
    with stranger(int(address.rpartition(":")[2]), says):
        error = start_chief("chief_waits_for_others", servers, TEST_START_S="4").result()["error"]
    assert f"worker 0 ({address}, where" in error and told in error
    assert "ps 0" not in error and "to start within 4 s" in error


@pytest.mark.timeout(90)
def test_a_server_whose_port_is_taken_names_the_port_and_what_answers(make_servers):
    servers = make_servers(num_workers=1, num_ps=1, TEST_START_S="30")
    servers.kill("worker", 0)
    address = servers.cluster["worker"][0]
    with stranger(int(address.rpartition(":")[2]), b"SSH-2.0-x\r\n"):
        servers.start("worker", 0)
        assert servers.processes["worker", 0].wait(60) == 1
    log = servers.log("worker", 0)
    assert f"to be free for worker 0 ({address})" in log and "SSH-2.0-x" in log, log


@contextlib.contextmanager
def stranger(port: int, says: bytes) -> Iterator[None]:
    """Something at a port of this machine that is no TensorFlow server."""
    guests = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                guests.append(listener.accept()[0])
                guests[-1].sendall(says)

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
