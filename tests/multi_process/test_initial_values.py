"""All workers begin with rank 0's weights, which are sent only where they are not alike."""

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
    replies = workers.ask({"seeds": [3, 3], "shape": SHAPE, "dtype": dtype})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)
    assert max(reply["bytes"] for reply in replies) < BYTES_OF_ANNOUNCEMENTS


@pytest.mark.parametrize(("dtype", "size_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_rank_zeros_weights_are_sent_to_those_that_have_others(workers, dtype, size_bytes):
    replies = workers.ask({"seeds": [3, 4], "shape": SHAPE, "dtype": dtype})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)
    assert replies[0]["bytes"] >= size_bytes * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("shape", [[], [0, 3]])
def test_weights_of_one_number_or_none_are_those_of_rank_zero(workers, shape):
    replies = workers.ask({"seeds": [3, 4], "shape": shape, "dtype": "float32"})
    assert all(reply["is_that_of_rank_zero"] for reply in replies)
