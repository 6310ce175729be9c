"""Copies that workers or ranks cannot share are refused on each, before anything is built."""

import pytest

from tests.multi_process.pool import WorkerFailure
from tests.sharded.test_bytes_sent import trained

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", ["ring", "collectives", "horovod"])
def test_what_cannot_be_shared_is_refused(transport):
    message = r"2 workers must be a multiple.*Received: 3 `replicas`. \(Rank 1"
    options = {"replicas": 3, "transport": transport}
    with pytest.raises(WorkerFailure, match=f"(?s){message}"):
        trained(2, options)


def test_copies_that_come_after_horovod_has_started_are_refused():
    message = r"a running Horovod without one of ranks \[0, 1\].*before hvd.init.*\(Rank 3"
    with pytest.raises(WorkerFailure, match=f"(?s){message}"):
        trained(4, {"replicas": 2, "transport": "horovod"}, {"STARTS_HOROVOD": "1"})
