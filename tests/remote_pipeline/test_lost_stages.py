"""A stage whose process dies or stops in the middle of a step: an error that names it."""

import socket

import pytest

from tfparallel.coordination.cut_off import cut_connections
from tfparallel.coordination.probe import is_answering, is_listening

pytestmark = pytest.mark.turns


@pytest.mark.parametrize(
    "name", ["stage_is_killed", "stage_is_stopped", "stage_is_stopped_while_a_step_is_traced"]
)
def test_training_ends_with_an_error_that_names_stage_task_and_address(run_case, name):
    result = run_case(name)
    assert f"no answer from stage 1 (worker 0, {result['address']})," in result["error"]
    assert "(chief 0 is speaking.)" in result["error"]
    assert result["after_s"] < 30
    assert result["local"] == 3.0  # this process's own devices still compute


def test_a_server_that_only_accepts_connections_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert is_listening(address)
        assert not is_answering(address, timeout_s=0.2)


def test_only_connections_to_the_named_addresses_are_cut():
    with (
        socket.create_server(("127.0.0.1", 0)) as named,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(named.getsockname()) as cut,
        socket.create_connection(other.getsockname()) as kept,
    ):
        cut_connections([f"localhost:{named.getsockname()[1]}"])
        with pytest.raises(BrokenPipeError):
            cut.send(b"x")
        assert kept.send(b"x") == 1
