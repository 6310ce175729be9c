"""Which reductions are refused, and in which words: a table."""

import dataclasses

import pytest

from tfparallel.communication.horovod_reductions import Facts, why_not

GPU_CLUSTER = Facts(
    mpi_built=True,
    nccl_built=True,
    mpi_started=True,
    on_gpu=True,
    num_ranks=8,
    num_hosts=2,
    all_ranks=True,
)
CPU_CLUSTER = dataclasses.replace(GPU_CLUSTER, nccl_built=False, on_gpu=False)
GLOO = dataclasses.replace(CPU_CLUSTER, mpi_built=False, mpi_started=False)


@pytest.mark.parametrize(
    ("reduction", "facts", "changes", "lack"),
    [
        ("ring", GLOO, {}, None),
        ("hierarchical", GPU_CLUSTER, {}, None),
        ("hierarchical", CPU_CLUSTER, {}, "NCCL and MPI. Received: one built with ['MPI']"),
        ("hierarchical", GPU_CLUSTER, {"mpi_built": False}, "HOROVOD_GPU_OPERATIONS=NCCL"),
        ("hierarchical", GPU_CLUSTER, {"mpi_started": False}, "horovodrun --mpi"),
        ("hierarchical", GPU_CLUSTER, {"on_gpu": False}, "ranks on CPUs"),
        ("adasum", CPU_CLUSTER, {}, None),
        ("adasum", GLOO, {}, "one built with ['Gloo']. Rebuild it: HOROVOD_WITH_MPI=1"),
        ("adasum", CPU_CLUSTER, {"mpi_started": False}, "horovodrun --mpi"),
        ("adasum", CPU_CLUSTER, {"all_ranks": False}, "a process set"),
        ("adasum", CPU_CLUSTER, {"num_ranks": 6}, "a power of two ranks"),
        ("adasum", GPU_CLUSTER, {"num_ranks": 6}, None),  # of 2 hosts
        ("adasum", GPU_CLUSTER, {"num_ranks": 6, "num_hosts": 3}, "a power of two hosts"),
    ],
)
def test_what_horovod_would_ignore_or_fail_in_is_refused(reduction, facts, changes, lack):
    received = why_not(reduction, dataclasses.replace(facts, **changes))
    assert received is None if lack is None else lack in received
