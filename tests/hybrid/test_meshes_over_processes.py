"""Meshes of the devices of several processes train as one device; what cannot be is refused."""

import functools
import os

import pytest

import tfparallel
from tests.hybrid.matrix_over_processes import CELLS
from tests.multi_process.pool import (
    WorkerFailure,
    WorkerPool,
    cluster_environments,
    horovod_environments,
)
from tfparallel.hybrid.mesh_over_processes import laid_over_processes
from tfparallel.hybrid.processes_of_job import GradientsCrossing
from tfparallel.mesh import mesh_of

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
        outermost, *inner = sizes
        assert f"Axis '{outermost}' ({sizes[outermost]}) crosses 2 processes" in reply["summary"]
        for axis in inner:
            assert f"Axis '{axis}' (2) stays inside of a process." in reply["summary"]
        if share is not None:
            assert reply["stored"] / reply["whole"] == pytest.approx(share, rel=0.05)


COMPRESSED = [
    (2, {"data": 4}),
    (2, {"data": 2, "pipeline": 2}),
    (2, {"data": 2, "model": 2}),
    (2, {"data": 2, "shard": 2}),
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("devices", "sizes"), COMPRESSED, ids=str)
def test_compression_of_enough_ranks_changes_nothing(workers, devices, sizes):
    """A gradient of 5 rows is of rank 5: PowerSGD(7) sends all of it, in less bytes."""
    workers(2, devices).ask({"sizes": sizes, "model": "wide", "rank": 7}, timeout_s=570)


BY_ROWS = [{"data": 2, "pipeline": 2}, {"data": 2, "model": 2}, {"data": 2, "shard": 2}]
DRAWN = [
    *[(cluster_environments, sizes) for sizes in ({"shard": 4}, *BY_ROWS)],
    *[(horovod_environments, sizes) for sizes in BY_ROWS],
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("of", "sizes"), DRAWN, ids=lambda of: getattr(of, "__name__", str(of)))
def test_a_step_is_drawn_with_the_devices_of_all_processes(workers, of, sizes):
    """All processes get the same lanes, by one clock."""
    if of is horovod_environments:
        pytest.importorskip("horovod.tensorflow")
    one, other = workers(2, 2, of).ask({"drawn": sizes}, timeout_s=570)
    assert one == other
    for device in [f"rank {rank} CPU:{i}" for rank in range(2) for i in range(2)]:
        assert {"compute", "update"} <= set(one["kinds"][device])
    assert min(start for _, _, _, start, *_ in one["boxes"]) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_of_horovod_that_share_the_state_have_one_device_each(workers):
    pytest.importorskip("horovod.tensorflow")
    with pytest.raises(WorkerFailure, match="name 'data' before 'shard', of 2"):
        workers(2, 2, horovod_environments).ask({"sizes": {"shard": 4}}, timeout_s=570)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS, ids="; ".join)
def test_a_cell_over_processes_trains_as_one_device_does(workers, tmp_path, cell):
    replies = workers(2, 2).ask({"cell": [str(tmp_path), *cell]}, timeout_s=570)
    for reply in replies:
        assert (reply["share"] < 0.95) == ("of seven ranks" in cell)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compression_of_fewer_ranks_does(workers):
    with pytest.raises(WorkerFailure, match="Differs from one device"):
        workers(2, 2).ask({"sizes": {"data": 4}, "model": "wide", "rank": 1}, timeout_s=570)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sizes",
    [{"data": 4}, {"data": 2, "pipeline": 2}, {"data": 2, "model": 2}, {"data": 2, "shard": 2}],
    ids=str,
)
def test_a_process_with_other_weights_is_found(workers, sizes):
    for reply in workers(2, 2).ask({"sizes": sizes, "wrong": 1}, timeout_s=570):
        assert "in ranks [0] and ranks [1] from one another, in step 4" in reply["told"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        ({"data": 2, "pipeline": 2}, {"shard": 4}),
        ({"shard": 2, "model": 2}, {"data": 2, "pipeline": 2}),
        ({"data": 2, "shard": 2}, {"shard": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_what_the_system_kills_goes_on_under_another_mesh(workers, tmp_path, sizes, other):
    with pytest.raises(WorkerFailure, match="worker 1"):
        workers(2, 2).ask({"backups": str(tmp_path), "sizes": sizes, "killed": 1}, timeout_s=280)
    for reply in workers(2, 2).ask({"backups": str(tmp_path), "sizes": other}, timeout_s=280):
        assert 0 < reply["batches"] <= 12 - 3  # the fourth may not have been written by all


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
@pytest.mark.parametrize("request_", [{"model": "wide", "rank": 7}, {"wrong": 0}], ids=str)
def test_their_gradients_are_compressed_and_their_weights_checked(workers, request_):
    pytest.importorskip("horovod.tensorflow")
    asked = {"sizes": {"data": 2, "pipeline": 2}, **request_}
    replies = workers(2, 2, horovod_environments).ask(asked, timeout_s=570)
    if "wrong" in request_:
        assert all("from one another, in step 4" in reply["told"] for reply in replies)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_ranks_of_horovod_share_two_copies(workers):
    """Horovod starts with groups of ranks that are known of the mesh."""
    pytest.importorskip("horovod.tensorflow")
    asked = {"sizes": {"data": 2, "shard": 2}}
    replies = workers(4, 1, horovod_environments).ask(asked, timeout_s=870)
    assert all(r["stored"] / r["whole"] == pytest.approx(1 / 2, rel=0.05) for r in replies)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}, (4, 2)),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, (6, 3)),
        ({"HOROVOD_SIZE": "4"}, None),
        ({"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_ELASTIC": "1"}, None),
    ],
    ids=str,
)
def test_the_launcher_tells_how_many_ranks_there_are(monkeypatch, environment, expected):
    pytest.importorskip("horovod.tensorflow")
    from tfparallel.communication import horovod_start

    monkeypatch.setattr(horovod_start.hvd, "is_initialized", lambda: False)
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert horovod_start.num_ranks() == expected


# ---- which axes go over processes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "sizes", "inner", "copies"),
    [
        ((2, 2), {"data": 2, "pipeline": 2}, {"data": 1, "pipeline": 2}, 1),
        ((2, 4), {"batch": 4, "tensor": 2}, {"batch": 2, "tensor": 2}, 1),
        ((2, 4), {"data": 2, "shard": 2, "model": 2}, {"data": 1, "shard": 2, "model": 2}, 1),
        ((2, 2), {"shard": 4}, None, 1),
        ((2, 2), {"shard": 2, "model": 2}, {"data": 1, "model": 2}, 1),
        ((2, 4), {"fsdp": 2, "batch": 2, "stage": 2}, {"batch": 2, "stage": 2}, 1),
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
        (
            (2, 4),
            {"shard": 4, "pipeline": 2},
            "share one copy.*Name 'shard' first, of 2; or",
        ),
        ((4, 2), {"data": 2, "shard": 2, "model": 2}, "Name 'shard' first, of 4"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "fp16"}, "compression='fp16' without `transport`.*whose `inner` this one"),
        ({"check_weights_every": 3}, "check_weights_every=3 without `transport`"),
        ({"timeouts": tfparallel.WorkerTimeouts()}, r"timeouts=WorkerTimeouts\(.*without `tr"),
        (
            {"transport": "auto", "compression": tfparallel.compression.LocalSGD(4)},
            r"compression=LocalSGD\(every=4\) of a HybridStrategy. Take it in Multi",
        ),
        ({"transport": "auto", "check_weights_every": 0}, "at least 1. Received: 0"),
        ({"transport": "auto", "compression": "gzip"}, "or a name: 'fp16'.*Received: 'gzip'"),
    ],
    ids=str,
)
def test_how_gradients_cannot_cross_processes_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.HybridStrategy({"data": 4}, **options)


def test_processes_that_share_the_state_compress_nothing():
    mesh = mesh_of([4], ["shard"], list("0123"))
    with pytest.raises(ValueError, match="check_weights_every=2, on a mesh of shard 4"):
        GradientsCrossing(None, 2).refuse_beside_shared_state(mesh)
    GradientsCrossing().refuse_beside_shared_state(mesh)


def test_one_process_compresses_nothing():
    strategy = tfparallel.HybridStrategy({"data": 4}, transport="auto", compression="fp16")
    assert strategy.compression_report() == []
