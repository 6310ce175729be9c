"""Worker pools, one for each strategy, and the results of one device to compare with."""

import numpy as np
import pytest

from tests.conformance.strategies import ONE_DEVICE, Row
from tests.multi_process.pool import WorkerPool, cluster_environments


class Workers:
    """The processes of one row, asked case by case."""

    def __init__(self, row: Row, folders):
        self.row = row
        self._folders = folders
        self._pool = WorkerPool(
            ["-m", "tests.conformance.worker", row.name],
            lambda: cluster_environments(row.num_workers),
        )

    def results(self, case_name: str) -> list[dict[str, np.ndarray]]:
        """What each worker returns for a case."""
        folder = self._folders.mktemp(f"{self.row.name}-{case_name}")
        replies = self._pool.ask({"case": case_name, "folder": str(folder)})
        return [dict(np.load(reply["results"])) for reply in replies]

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="session")
def workers(request, tmp_path_factory):
    """The pool of the row given by `parametrize(..., indirect=["workers"])`."""
    pool = Workers(request.param, tmp_path_factory)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """A function from a case's name to the results of plain Keras, each computed once."""
    pool, known = Workers(ONE_DEVICE, tmp_path_factory), {}

    def results(case_name: str) -> dict[str, np.ndarray]:
        if case_name not in known:
            known[case_name] = pool.results(case_name)[0]
        return known[case_name]

    yield results
    pool.close()
