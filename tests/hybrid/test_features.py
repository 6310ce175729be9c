"""What a training may have, any two together on any mesh of two processes, is as on one device."""

import functools
import itertools

import pytest

from tests.hybrid import matrix, matrix_of_shares, matrix_over_processes
from tests.hybrid.matrix_of_features import CELLS, REFUSED
from tests.multi_process.pool import WorkerFailure, WorkerPool, cluster_environments

METHODS = (
    "data",
    "hybrid shard",
    "full shard",
    "pipeline, gpipe",
    "pipeline, 1f1b",
    "pipeline, zero bubble",
    "pipeline, interleaved",
    "tensor",
)
FEATURES = (
    "uneven",
    "fewer rows than replicas",
    "global clip",
    "accumulation",
    "mixed precision",
    "batch norm",
    "dropout",
    "masks",
    "computed again",
    "on the host",
    "compression",
    "averages",
    "two steps at once",
    "two optimizers",
    "killed and restored",
    "restored on another mesh",
)
# What one of them has of others, too: three rows are uneven for four replicas.
ALSO = {
    "fewer rows than replicas": {"uneven"},
    "again, from the host": {"computed again", "on the host"},
    "restored on another mesh": {"killed and restored"},
}


@pytest.fixture(scope="module")
def workers():
    """Two processes of two logical CPUs each."""
    environments = functools.partial(cluster_environments, 2)
    pool = WorkerPool(["-m", "tests.hybrid.worker_of_mesh", "2"], environments)
    yield pool
    pool.close()


def test_any_two_come_together_but_for_what_is_refused():
    come = [set(cell).union(*(ALSO.get(value, set()) for value in cell)) for cell in CELLS]
    wanted = [*itertools.product(METHODS, FEATURES), *itertools.combinations(FEATURES, 2)]
    missing = [pair for pair in wanted if not any(cell.issuperset(pair) for cell in come)]
    assert missing == list(REFUSED)
    assert len(missing) <= 0.1 * len(wanted)


def test_there_are_250_cells_and_a_tenth_at_most_is_refused():
    """Of the other matrices no cell is refused: each has one test, which passes when it trains."""
    cells = [
        *matrix.CELLS,
        *matrix.CELLS_THAT_KEEP,
        *matrix.CELLS_OF_SEVERAL,
        *matrix.CELLS_OF_EIGHT,
        *matrix_over_processes.CELLS,
        *matrix_of_shares.CELLS,
        *CELLS,
    ]
    assert len(cells) >= 250
    assert len(REFUSED) <= 0.1 * (len(cells) + len(REFUSED))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "; ".join(filter(None, cell)))
def test_a_cell_trains_as_one_device_does(workers, tmp_path, cell):
    for reply in workers.ask({"features": [str(tmp_path), *cell]}, timeout_s=570):
        assert (reply["share"] < 0.95) == ("compression" in cell)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", REFUSED, ids="; ".join)
def test_what_is_refused_is_before_anything_is_made(workers, tmp_path, pair):
    with pytest.raises(WorkerFailure, match="Where processes share a copy of the state"):
        workers.ask({"features": [str(tmp_path), "full shard", "even", "kept", *pair[1:]]}, 570)
