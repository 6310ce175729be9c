"""Two processes share the state beside what each computes with: training is that of one device."""

import functools

import pytest

from tests.hybrid.matrix_of_shares import CELLS
from tests.multi_process.pool import (
    WorkerFailure,
    WorkerPool,
    cluster_environments,
    horovod_environments,
)

WORKER = ["-m", "tests.hybrid.worker_of_shares"]
SIZES = [{"shard": 2, "model": 2}, {"shard": 2, "pipeline": 2}]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workers():
    """Gives a pool of two processes with so many logical CPUs each."""

    @functools.cache
    def pool(devices=2, of=cluster_environments):
        pools.append(WorkerPool([*WORKER, str(devices)], functools.partial(of, 2)))
        return pools[-1]

    pools: list[WorkerPool] = []
    yield pool
    for each in pools:
        each.close()


def ask(pool, kind, **request):
    return pool.ask({"kind": kind, **request}, timeout_s=870)


@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_process_has_all_weights_and_half_of_each_slot(workers, sizes, shard):
    """But for what is too small to be cut evenly."""
    for reply in ask(workers(), "stored", sizes=sizes, shard=shard):
        assert reply["weights"] == 1
        assert reply["slots"] == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_between_steps_a_process_holds_half_of_the_weights_too(workers, sizes):
    """Of a weight and its two slots: three halves, where shared slots alone are 1 + 2 / 2."""
    for shard, held in {"parameters": 1 / 2, "gradients": 2 / 3}.items():
        for reply in ask(workers(), "stored", sizes=sizes, shard=shard):
            assert reply["held"] == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("axis", ["model", "pipeline"])
def test_rows_are_divided_inside_of_a_process_too(workers, axis):
    """Of pipelines the first one updates for all, with the only copy of the slots."""
    sizes = {"shard": 2, "data": 2, axis: 2}
    slots = {"model": 2 / 2, "pipeline": 1 / 2}[axis]
    for reply in ask(workers(4), "stored", sizes=sizes, shard="gradients"):
        assert reply["weights"] == 2
        assert reply["slots"] == pytest.approx(slots, rel=0.05)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_of_horovod_share_what_is_in_parts(workers, sizes, shard):
    pytest.importorskip("horovod.tensorflow")
    pool = workers(2, horovod_environments)
    for reply in ask(pool, "stored", sizes=sizes, shard=shard, transport="horovod"):
        assert reply["slots"] == pytest.approx(1 / 2, rel=0.05)
        held = {"parameters": 1 / 2, "gradients": 2 / 3}[shard]
        assert reply["held"] == pytest.approx(held, rel=0.05)


KINDS = [("gradients", "optimizer"), ("parameters", "parameters")]
ON_HOST = ["clipped and averaged", "accumulated", "scaled", "of the whole"]


@pytest.mark.parametrize(("shard", "host"), [("gradients", None), *KINDS])
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_asked_for_is_on_the_host(workers, sizes, name, shard, host):
    """CPU:0, a device too: the other one's parts are updated there."""
    devices = [0, 1] if host is None else [0]
    for reply in ask(workers(), "on host", sizes=sizes, name=name, shard=shard, host=host):
        assert reply == {"updated": devices, "slots": devices}


@pytest.mark.parametrize(("shard", "host"), KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_so_it_is_of_ranks_of_horovod(workers, sizes, shard, host):
    pytest.importorskip("horovod.tensorflow")
    request = {"sizes": sizes, "name": "accumulated", "shard": shard, "host": host}
    pool = workers(2, horovod_environments)
    for reply in ask(pool, "on host", transport="horovod", **request):
        assert reply == {"updated": [0], "slots": [0]}


@pytest.mark.parametrize("cell", CELLS, ids="; ".join)
def test_a_cell_trains_as_one_device_does(workers, tmp_path, cell):
    ask(workers(), "cell", folder=str(tmp_path / "backup"), cell=list(cell))


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_files_have_wholes(workers, tmp_path, sizes, shard):
    ask(workers(), "files", folder=str(tmp_path / "model"), sizes=sizes, shard=shard)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_at_the_end_of_data_of_unknown_length_nothing_is_gathered(workers, sizes):
    """TensorFlow ends a step that has no batch while it runs: some processes would have begun.

    Keras's step is a function of its batch, which waits for it; that of a loop which takes the next
    batch itself does not.
    """
    for reply in ask(workers(), "ended", sizes=sizes):
        assert reply["unknown"] == reply["known"] > 0
        assert reply["to the end"] == reply["three steps"] > 0


@pytest.mark.parametrize("in_what", ["mesh", "layout"])
def test_processes_that_differ_are_told_before_anything_is_made(workers, in_what):
    for reply in ask(workers(), "differs", in_what=in_what):
        assert "All workers must agree when they make a HybridStrategy" in reply["told"]


WHOLE = ["Lamb", "Muon", "Adafactor", "accumulated", "averaged", "scaled", "a constraint"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_update_that_looks_at_whole_weights_is_that_of_one_device(workers, sizes, name):
    for reply in ask(workers(), "whole", sizes=sizes, name=name):
        assert reply["slots"] == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize("transport", ["horovod", "collectives"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_so_it_is_over_other_transports(workers, sizes, transport):
    """In a branch: a loss scale."""
    of = cluster_environments
    if transport == "horovod":
        pytest.importorskip("horovod.tensorflow")
        of = horovod_environments
    request = {"sizes": sizes, "name": "scaled", "transport": transport}
    for reply in ask(workers(2, of), "whole", **request):
        assert reply["slots"] == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize("name", ["Lamb", "scaled", "a constraint"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_so_is_that_of_weights_in_pieces(workers, sizes, name):
    for reply in ask(workers(), "whole", sizes=sizes, name=name, shard="parameters"):
        assert reply["slots"] == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_of_a_loop_train_as_on_one_device(workers, sizes, shard):
    for reply in ask(workers(), "loop", sizes=sizes, shard=shard):
        assert "Received: a call of experimental_distribute_dataset" in reply["told"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layers_that_assign_their_own_weights_are_refused(workers, sizes):
    for reply in ask(workers(), "assigned", sizes=sizes):
        assert "Received: an assignment" in reply["told"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gradient_that_overflows_in_one_process_is_left_out_by_all(workers, sizes):
    ask(workers(), "overflow", sizes=sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_process_that_ends_is_named(workers, sizes):
    with pytest.raises(WorkerFailure) as failure:
        ask(workers(), "lost", sizes=sizes, rank=1)
    told = str(failure.value).partition("worker 0:")[2].partition("worker 1:")[0]
    assert "rank 1" in told.lower()
