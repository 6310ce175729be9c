"""Asynchronous workers use one device each, and say so where there are more."""

from tfparallel.parameter_server.async_extended import idle_devices


def test_devices_that_a_worker_leaves_idle_are_said_with_what_to_do():
    assert idle_devices([["GPU:0"], ["CPU:0"]]) is None
    said = idle_devices([["GPU:0"], ["GPU:0", "GPU:1", "GPU:2"]])
    assert "worker 1 has 3. Start a worker for each GPU" in said and "worker 0" not in said
