"""Meshes of the devices of several processes train as one device; what cannot be is refused."""

import functools

import pytest

import tfparallel
from tests.multi_process.pool import (
    WorkerFailure,
    WorkerPool,
    cluster_environments,
    horovod_environments,
)
from tfparallel.hybrid.mesh_over_processes import laid_over_processes

WORKER = ["-m", "tests.hybrid.worker_of_mesh"]


@pytest.fixture(scope="module")
def workers():
    """Gives a pool of so many processes with so many logical CPUs each."""

    @functools.cache
    def pool(count, devices, of=cluster_environments):
        pools.append(WorkerPool([*WORKER, str(devices)], functools.partial(of, count)))
        return pools[-1]

    pools: list[WorkerPool] = []
    yield pool
    for each in pools:
        each.close()


BY_ROW = {"seed_by": "row", "model": "dropout"}
OF_TWO_BY_TWO = [  # sizes, options, and of the weights what a process stores
    ({"shard": 4}, {}, 1 / 2),
    ({"shard": 4}, {"model": "gpt"}, 1 / 2),
    ({"shard": 4}, {"transport": "collectives"}, 1 / 2),
    ({"shard": 4}, BY_ROW, 1 / 2),
    ({"data": 2, "shard": 2}, {}, 1),
    ({"data": 2, "shard": 2}, BY_ROW, 1),
    ({"data": 4}, {}, 2),
    ({"data": 4}, {"transport": "collectives"}, 2),
    ({"data": 2, "pipeline": 2}, {}, 1),
    ({"data": 2, "model": 2}, {}, None),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options", "share"),
    OF_TWO_BY_TWO,
    ids=str,
)
@pytest.mark.timeout(600)
def test_two_processes_of_two_devices_train_as_one_device(workers, sizes, options, share):
    """Each stores its share of the weights, but for what is too small to be cut evenly."""
    replies = workers(2, 2).ask({"sizes": sizes, **options}, timeout_s=570)
    for reply in replies:
        assert " x ".join(f"{axis} {size}" for axis, size in sizes.items()) in reply["shown"]
        if share is not None:
            assert reply["stored"] / reply["whole"] == pytest.approx(share, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_processes_share_two_copies(workers):
    replies = workers(4, 1).ask({"sizes": {"data": 2, "shard": 2}}, timeout_s=870)
    assert all(r["stored"] / r["whole"] == pytest.approx(1 / 2, rel=0.05) for r in replies)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("devices", "sizes"), [(1, {"shard": 2}), (2, {"data": 2, "pipeline": 2})], ids=str
)
def test_ranks_of_horovod_train_as_one_device(workers, devices, sizes):
    pytest.importorskip("horovod.tensorflow")
    workers(2, devices, horovod_environments).ask({"sizes": sizes}, timeout_s=570)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_copies_on_a_mesh_of_ranks_of_horovod_are_refused(workers):
    """Horovod, which tells how many ranks there are, has started without their process sets."""
    pytest.importorskip("horovod.tensorflow")
    with pytest.raises(WorkerFailure, match=r"Received: 2 copies, .*ShardedStrategy\(replicas=2"):
        workers(4, 1, horovod_environments).ask({"sizes": {"data": 2, "shard": 2}}, timeout_s=570)


# ---- which axes go over processes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "sizes", "inner", "copies"),
    [
        ((2, 2), {"data": 2, "pipeline": 2}, {"data": 1, "pipeline": 2}, 1),
        ((2, 4), {"batch": 4, "tensor": 2}, {"batch": 2, "tensor": 2}, 1),
        ((2, 4), {"data": 2, "shard": 2, "model": 2}, {"data": 1, "shard": 2, "model": 2}, 1),
        ((2, 2), {"shard": 4}, None, 1),
        ((4, 1), {"data": 2, "fsdp": 2}, None, 2),
        ((4, 2), {"data": 2, "shard": 4}, None, 2),
        ((4, 2), {"data": 4, "shard": 2}, {"data": 1, "shard": 2}, 1),
    ],
    ids=str,
)
def test_the_axes_named_first_go_over_processes(job, sizes, inner, copies):
    laid = laid_over_processes(sizes, *job, has_parts=False)
    assert (laid.inner, laid.num_copies) == (inner, copies)


@pytest.mark.parametrize(
    ("job", "sizes", "message"),
    [
        ((2, 2), {"pipeline": 4}, "pipeline 4, whose axis 'pipeline' leaves it. Name 'data' first"),
        ((2, 2), {"model": 2, "data": 2}, "whose axis 'model' leaves it.*a multiple of 2"),
        ((2, 2), {"shard": 2, "pipeline": 2}, "axis 'shard' leaves it. Name 'data' first"),
        ((2, 2), {"shard": 2, "data": 2}, "named before 'shard'.*would fit: {'shard': 4}"),
        ((2, 3), {"data": 3, "shard": 2}, "its size divides 2"),
        ((2, 2), {"data": 3}, "data 3 = 3 for 4 devices. What would fit: data 4 = 4"),
    ],
    ids=str,
)
def test_what_cannot_go_over_processes_is_told(job, sizes, message):
    with pytest.raises(ValueError, match=message):
        laid_over_processes(sizes, *job, has_parts=False)


def test_a_mesh_of_one_process_takes_no_transport_but_auto():
    with pytest.raises(ValueError, match="between the workers of TF_CONFIG. Received: none"):
        tfparallel.HybridStrategy({"data": 4}, transport="ring")
    assert tfparallel.HybridStrategy({"data": 4}, transport="auto").num_replicas_in_sync == 4
