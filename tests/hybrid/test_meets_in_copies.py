"""Where workers that share one copy meet: on their GPUs by NCCL, or in the hosts' memory."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.data_parallel.worker_collectives import Implementation, Options
from tfparallel.hybrid.meets_in_copies import MeetsInCopies
from tfparallel.hybrid.sharded_over_workers import WorkersShardedExtended
from tfparallel.internals import CollectiveAllReduce
from tfparallel.sharded.options import Sharding

ON_GPUS = {"_has_nccl": True, "_num_copies": 1, "_num_sharing": 4, "_sharding": Sharding()}


@pytest.mark.parametrize(
    ("otherwise", "expected"),
    [
        ({}, True),
        ({"_has_nccl": False}, False),
        ({"_num_copies": 2, "_num_sharing": 2}, False),  # a group of each copy
        ({"_num_copies": 4, "_num_sharing": 1}, True),  # gradients of the same part meet there
        ({"_sharding": Sharding(host="optimizer")}, False),
    ],
)
def test_parts_meet_on_gpus_where_all_workers_share_a_copy_or_each_has_one(otherwise, expected):
    extended = SimpleNamespace(**{**ON_GPUS, **otherwise})
    assert MeetsInCopies._can_meet_on_gpus.fget(extended) is expected


@pytest.mark.parametrize(("copies", "expected"), [(1, [1.0, 2.0]), (2, [2.0, 4.0])])
def test_sums_of_a_copy_meet_those_of_the_others(copies, expected):
    own = SimpleNamespace(reduce_scatter=lambda rows: rows[:2])
    others = SimpleNamespace(all_reduce=lambda rows: copies * rows)
    extended = SimpleNamespace(_in_copy=own, _across=others if copies > 1 else None)
    summed = MeetsInCopies._scatter_over_processes(extended, tf.constant([1.0, 2.0, 3.0, 4.0]))
    assert summed.numpy().tolist() == expected


PLACES = "on GPUs", "on hosts"


@pytest.mark.parametrize(
    ("transport", "has_nccl", "expected"),
    [
        ("auto", True, "on GPUs"),
        ("auto", False, "ring"),
        ("ring", True, "ring"),
        ("collectives", True, "on GPUs"),
        ("collectives", False, "on hosts"),
    ],
)
def test_what_is_asked_for_carries_parts(transport, has_nccl, expected):
    operations = {
        each: CollectiveAllReduce(["CPU:0"], 2, Options()) for each in ("on GPUs", "on hosts")
    }
    workers = SimpleNamespace(
        _can_meet_on_gpus=has_nccl,
        _host_device="CPU:0",
        _devices=["GPU:0", "GPU:1"],
        _operations_of_gpu=lambda i: operations["on GPUs"],
        _num_workers=2,
        _id_in_cluster=0,
        _ring_all_reduce=SimpleNamespace(),
        _host_cross_device_ops=operations["on hosts"],
    )
    WorkersShardedExtended._meet_among_all(workers, transport)
    on_gpus = [each._operations for each in workers._on_gpus]
    assert on_gpus == [operations["on GPUs"]] * 2 * (expected == "on GPUs")
    if transport != "collectives":
        assert isinstance(workers._in_copy, RingCollectives)
    else:
        assert workers._in_copy._operations is operations["on hosts"]


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        (Implementation.NCCL, "CollectiveReduceScatterV2"),
        (Implementation.RING, "CollectiveAllToAllV2"),  # and adds up what it got
    ],
)
def test_nccl_scatters_sums_and_nothing_else_does(implementation, kind):
    with tf.Graph().as_default() as graph:
        operations = CollectiveAllReduce(["CPU:0"], 2, Options(implementation=implementation))
        own = StockCollectives(operations, "CPU:0", 2, 1).reduce_scatter(tf.ones([2, 3]))
    assert own.shape == (3,)
    (collective,) = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    assert collective.type == kind
    hint = collective.get_attr("communication_hint").decode()
    assert hint == implementation.value.lower()


@pytest.mark.parametrize(("is_by_nccl", "asked"), [(True, "reducescatter"), (False, "alltoall")])
def test_horovod_scatters_sums_of_three_ranks_by_nccl_as_of_two(monkeypatch, is_by_nccl, asked):
    """Gloo's own sends more than an exchange then (`reduce_scatter`)."""
    pytest.importorskip("horovod.tensorflow")
    from tfparallel.communication import horovod_collectives

    calls = []

    def noted(name, result):
        return lambda rows, **options: calls.append(name) or result(rows)

    hvd = horovod_collectives.hvd
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: False)
    monkeypatch.setattr(hvd, "reducescatter", noted("reducescatter", lambda rows: rows[1:2]))
    monkeypatch.setattr(hvd, "alltoall", noted("alltoall", lambda rows: rows))
    ranks = SimpleNamespace(size=lambda: 3)
    own = horovod_collectives.reduce_scatter(tf.ones([3, 5]), ranks, is_by_nccl)
    assert calls == [asked] and own.shape == (5,)
