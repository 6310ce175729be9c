"""Which reductions are refused, and in which words: tables."""

import dataclasses
from types import SimpleNamespace

import pytest

from tfparallel.communication.horovod_collectives import HorovodCollectives
from tfparallel.communication.horovod_reductions import Job, lack_of_build, lack_of_job

GPUS = Job(mpi_started=True, nccl_built=True, on_gpu=True, num_ranks=8, num_hosts=2, all_ranks=True)
CPUS = dataclasses.replace(GPUS, nccl_built=False, on_gpu=False)


@pytest.mark.parametrize(
    ("reduction", "mpi_built", "nccl_built", "lack"),
    [
        ("ring", False, False, None),
        ("hierarchical", True, True, None),
        ("hierarchical", True, False, "NCCL and MPI. Received: one built with MPI."),
        ("hierarchical", False, True, "Rebuild it: HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITH_MPI=1"),
        ("adasum", True, False, None),
        ("adasum", False, False, "one built with Gloo. Rebuild it: HOROVOD_WITH_MPI=1"),
    ],
)
def test_what_horovod_was_not_built_for_is_refused(reduction, mpi_built, nccl_built, lack):
    received = lack_of_build(reduction, mpi_built, nccl_built)
    assert received is None if lack is None else lack in received


@pytest.mark.parametrize(
    ("reduction", "job", "changes", "lack"),
    [
        ("ring", CPUS, {"mpi_started": False}, None),
        ("hierarchical", GPUS, {}, None),
        ("hierarchical", GPUS, {"mpi_started": False}, "horovodrun --mpi"),
        ("hierarchical", GPUS, {"on_gpu": False}, "ranks on CPUs"),
        ("adasum", CPUS, {}, None),
        ("adasum", CPUS, {"mpi_started": False}, "horovodrun --mpi"),
        ("adasum", CPUS, {"all_ranks": False}, "a process set"),
        ("adasum", CPUS, {"num_ranks": 6}, "a power of two ranks"),
        ("adasum", CPUS, {"num_ranks": 6, "nccl_built": True}, "a power of two ranks"),
        ("adasum", GPUS, {"num_ranks": 6}, None),  # of 2 hosts
        ("adasum", GPUS, {"num_ranks": 6, "num_hosts": 3}, "a power of two hosts"),
    ],
)
def test_what_this_job_cannot_do_is_refused(reduction, job, changes, lack):
    received = lack_of_job(reduction, dataclasses.replace(job, **changes))
    assert received is None if lack is None else lack in received


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("mesh", 1, 1.0), "Expected a reduction out of"),
        (("ring", 0, 1.0), "bucket_bytes must be at least 1. Received: 0"),
        (("ring", 1, 0.0), "gradient_predivide_factor must be positive. Received: 0.0"),
    ],
)
def test_options_are_refused_before_ranks_meet(options, message):
    pytest.importorskip("horovod.tensorflow")
    from tfparallel.strategies.horovod import _check_options

    _check_options("ring", 1, 0.5)
    with pytest.raises(ValueError, match=message):
        _check_options(*options)


def test_what_orders_collectives_is_where_they_are():
    """And not on GPU 0, where TensorFlow puts what nobody places: each would wait for it."""
    ranks = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    collectives = HorovodCollectives(ranks, "/device:CPU:1")
    assert collectives.order.device.endswith("CPU:1")
