"""All workers begin with rank 0's weights, which are sent only where they are not alike."""

import contextlib

import pytest

from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments

SHAPE, BYTES_OF_ANNOUNCEMENTS = [256, 1024], 100_000


@pytest.fixture(scope="module", params=[cluster_environments, horovod_environments])
def workers(request):
    pool = WorkerPool(["-m", "tests.multi_process.initial_values_worker"], lambda: request.param(2))
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_all_have_drawn_alike_are_not_sent(workers, dtype):
    replies = workers.ask({"what": "weight", "seeds": [3, 3], "shape": SHAPE, "dtype": dtype})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)
    assert max(reply["bytes"] for reply in replies) < BYTES_OF_ANNOUNCEMENTS


@pytest.mark.parametrize(("dtype", "size_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_rank_zeros_weights_are_sent_to_those_that_have_others(workers, dtype, size_bytes):
    replies = workers.ask({"what": "weight", "seeds": [3, 4], "shape": SHAPE, "dtype": dtype})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)
    assert replies[0]["bytes"] >= size_bytes * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("shape", [[], [0, 3]])
def test_weights_of_one_number_or_none_are_those_of_rank_zero(workers, shape):
    replies = workers.ask({"what": "weight", "seeds": [3, 4], "shape": shape, "dtype": "float32"})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)


def test_an_exchange_is_two_requests_and_leaves_little_in_the_store(workers):
    """Over a link with a delay each request is a wait, and each variable an exchange."""
    for reply in workers.ask({"what": "exchanges", "count": 40}):
        assert reply["is_right"] and reply["first_left"] == []
        assert reply["requests"] == {"put": 40, "get": 40, "delete": 1}


def test_graphs_of_sessions_take_tensorflows_collectives():
    command = ["-m", "tests.multi_process.initial_values_worker"]
    with contextlib.closing(WorkerPool(command, lambda: cluster_environments(2))) as workers:
        replies = workers.ask({"what": "graph of a session"})
    for reply in replies:
        assert {"CollectiveBcastSend", "CollectiveBcastRecv"} & set(reply["types"])
        assert "CollectiveReduceV2" in reply["types"]
        assert "PyFunc" not in reply["types"], "Our ring cannot be called from a session."


def test_sums_of_a_step_can_wait_on_few_cores_whoever_started_the_workers():
    def untold():
        return [{**each, "TF_NUM_INTEROP_THREADS": ""} for each in cluster_environments(2)]

    command = ["-m", "tests.multi_process.initial_values_worker"]
    with contextlib.closing(WorkerPool(command, untold)) as workers:
        for reply in workers.ask({"what": "meeting", "count": 6}):
            assert reply["places"] == list(range(6))
