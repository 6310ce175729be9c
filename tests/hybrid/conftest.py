"""What the tests of meshes share."""

import functools

import keras
import pytest

from tests.multi_process.pool import WorkerPool, cluster_environments


@pytest.fixture(autouse=True)
def _layers_are_numbered_from_zero():
    """`LayoutOfAnything` goes by the numbers in layers' names."""
    keras.backend.clear_session()


@pytest.fixture(scope="module")
def of_eight():
    """A process of eight logical CPUs."""
    environments = functools.partial(cluster_environments, 1)
    pool = WorkerPool(["-m", "tests.hybrid.worker_of_mesh", "8"], environments)
    yield pool
    pool.close()
