"""Copies that workers cannot share are refused on each rank, before anything is built."""

import pytest

from tests.multi_process.pool import WorkerFailure
from tests.sharded.test_bytes_sent import trained

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("num_workers", "options", "message"),
    [
        (2, {"replicas": 3}, r"2 workers must be a multiple.*Received: 3 `replicas`. \(Rank 1"),
        (
            4,
            {"replicas": 2, "transport": "collectives"},
            r"shared through the ring.*Received: 2 `replicas` of 4 workers without it. \(Rank 3",
        ),
    ],
    ids=["no divisor", "without the ring"],
)
def test_what_cannot_be_shared_is_refused(num_workers, options, message):
    with pytest.raises(WorkerFailure, match=f"(?s){message}"):
        trained(num_workers, options)
