"""Asynchronous workers compute on all of their devices, and what those may do at a time."""

import pytest

from tfparallel.parameter_server.worker_lanes import CallsOfWorkers, Lane, lanes_of_workers

pytestmark = pytest.mark.turns


def test_each_device_of_a_worker_is_a_lane():
    assert lanes_of_workers([["GPU:0", "GPU:1"], ["CPU:0"]]) == (
        Lane(0, "GPU:0"),
        Lane(0, "GPU:1"),
        Lane(1, "CPU:0"),
    )


def begun(calls: CallsOfWorkers, worker: int, call: str, generation: int = 0):
    """A call that has begun, at once."""
    turn = calls.ask(worker, call, generation)
    assert calls.may_begin(turn)
    calls.begin(turn)
    return turn


def known(*names: str) -> CallsOfWorkers:
    """Two workers, of which the first has run these calls."""
    calls = CallsOfWorkers(2)
    for name in names:
        calls.end(begun(calls, 0, name), has_run=True)
    return calls


def test_known_calls_run_side_by_side_and_a_first_one_alone():
    calls = known("a", "b")
    a, b = begun(calls, 0, "a"), begun(calls, 0, "b")
    first = calls.ask(0, "c", 0)
    calls.end(a, has_run=True)
    assert not calls.may_begin(first)  # beside b
    calls.end(b, has_run=True)
    assert calls.may_begin(first)
    calls.begin(first)
    assert not calls.may_begin(calls.ask(0, "a", 0))  # beside the first
    begun(calls, 1, "d")  # another worker


def test_known_calls_that_come_later_wait_for_a_first_one_that_waits():
    calls = known("a", "b")
    a, first, b = begun(calls, 0, "a"), calls.ask(0, "c", 0), calls.ask(0, "b", 0)
    assert not calls.may_begin(b)
    calls.end(a, has_run=True)
    assert not calls.may_begin(b) and calls.may_begin(first)
    calls.begin(first)
    calls.end(first, has_run=True)
    assert calls.may_begin(b)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_call_is_a_first_one_again_once_its_worker_was_lost_or_it_failed(generation):
    calls = known("a")
    assert not calls.ask(0, "a", 0).is_first
    assert calls.ask(0, "a", 1).is_first
    calls = CallsOfWorkers(1)
    calls.end(begun(calls, 0, "a", generation), has_run=False)
    assert calls.ask(0, "a", generation).is_first


def test_workers_of_two_devices_take_steps_on_both_and_count_each_once(run_case):
    result = run_case("workers_of_two_devices")
    for iterations, loss_count, seen in result["results"]:
        assert iterations and loss_count and seen == [1.0], result["results"]
    assert len(result["steps_of_worker"]) == 4 and all(result["steps_of_worker"])
    assert {f"worker {i} CPU:{j}" for i in (0, 1) for j in (0, 1)} <= set(result["devices"])
    assert result["beside_first"] == []  # TensorFlow's servers crash, rarely
    assert result["at_once"] == ["worker 0", "worker 1"]


def test_synchronous_workers_of_two_devices_are_four_replicas(run_case):
    result = run_case("workers_of_two_devices_in_sync")
    assert result["replicas"] == 4
    assert result["weights"] < 1e-6 and result["loss"] < 1e-6, result


@pytest.mark.long
def test_both_devices_of_a_worker_that_was_lost_take_steps_again(run_case):
    """And each draws masks of its own."""
    result = run_case("worker_of_two_devices_is_lost")
    assert all(result["taken"]) and result["is_counted"] and result["seen"] == [1.0], result
    assert "worker 1 (127.0.0.1:" in result["log"] and "CPU:1 is lost" in result["log"]

    drawn_from = [tuple(source) for source in result["drawn"]["from"]]
    assert len(set(drawn_from)) == len(drawn_from) == result["drawn"]["count"]  # no mask twice
    assert len({lane for lane, _ in drawn_from}) > 2
    assert result["drawn"]["moved"] == pytest.approx(result["drawn"]["rates"], rel=1e-5)
