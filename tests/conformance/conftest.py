"""Worker pools, one for each strategy, and the results of one device to compare with."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.strategies import ONE_DEVICE, Row
from tests.multi_process.pool import WorkerPool


class Workers:
    """The processes of one row, asked case by case."""

    def __init__(self, row: Row, folders):
        self.row = row
        self._folders = folders
        self._pool = WorkerPool(
            ["-m", "tests.conformance.worker", row.name],
            lambda: row.environments(row.num_workers),
        )

    def start(self, case_name: str) -> None:
        """Let every worker begin a case; `results` must come next."""
        folder = self._folders.mktemp(f"{self.row.name}-{case_name}")
        self._pool.send({"case": case_name, "folder": str(folder)})

    def results(self) -> list[dict[str, np.ndarray]]:
        """What each worker returns for the case it was given."""
        return [dict(np.load(file)) for file in self.results_files()]

    def results_files(self) -> list[Path]:
        """Where each worker has left what it returns."""
        return [Path(reply["results"]) for reply in self._pool.replies()]

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="session")
def workers_of(tmp_path_factory):
    """Gives the pool of a row. One at a time is up: the cases of a row follow one another."""
    open_pools: list[Workers] = []

    def workers_of(row: Row) -> Workers:
        if not open_pools or open_pools[0].row is not row:
            while open_pools:
                open_pools.pop().close()
            open_pools.append(Workers(row, tmp_path_factory))
        return open_pools[0]

    yield workers_of
    for pool in open_pools:
        pool.close()


class OneDevice:
    """The results of plain Keras, each computed once.

    Args:
        known: folder of the results, which pytest's workers share.
    """

    def __init__(self, folders, known: Path):
        self._workers = Workers(ONE_DEVICE, folders)
        self._known = known
        self._under_way: str | None = None

    def start(self, case_name: str) -> None:
        """Begin a case, unless its results are known."""
        self._finish()
        if not self._file(case_name).exists():
            self._workers.start(case_name)
            self._under_way = case_name

    def results(self, case_name: str) -> dict[str, np.ndarray]:
        """The results of a case that has been started."""
        self._finish()
        return dict(np.load(self._file(case_name)))

    def _file(self, case_name: str) -> Path:
        return self._known / f"{case_name}.npz"

    def _finish(self) -> None:
        """Take in what is under way, also where the test that began it has failed since."""
        case_name, self._under_way = self._under_way, None
        if case_name:
            (results,) = self._workers.results_files()
            results.replace(self._file(case_name))

    def close(self) -> None:
        self._workers.close()


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """What every strategy is compared with."""
    base = tmp_path_factory.getbasetemp()
    known = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "one_device"
    known.mkdir(exist_ok=True)
    workers = OneDevice(tmp_path_factory, known)
    yield workers
    workers.close()
