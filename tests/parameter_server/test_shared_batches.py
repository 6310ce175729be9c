"""Which rows of arrays each worker gets."""

import numpy as np
import pytest

from tfparallel.parameter_server.batch_arguments import Host, Hosts
from tfparallel.parameter_server.shared_batches import rows_of_replicas

HOSTS = Hosts((Host(0, "CPU:0", range(2)), Host(1, "CPU:1", range(2, 3))))  # of two GPUs and of one


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "rows"),
    [
        (6, 6, [[0, 1, 2, 3], [4, 5]]),
        (7, 6, [[0, 1, 2, 3, 6], [4, 5]]),  # the last batch has one row
        (8, 3, [[0, 1, 3, 4, 6, 7], [2, 5]]),
        (2, 1, [[0, 1], []]),
    ],
)
def test_workers_have_the_rows_that_their_replicas_get_of_each_batch(num_rows, batch_size, rows):
    received = [rows_of_replicas(num_rows, batch_size, HOSTS, h.replicas) for h in HOSTS]
    assert [each.tolist() for each in received] == rows
    assert sorted(np.concatenate(received)) == list(range(num_rows))
