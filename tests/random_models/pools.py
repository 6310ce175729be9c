"""Processes that train random models together, and stay up from one model to the next."""

import base64
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments
from tests.random_models.spec import Trial

# By name: how many processes, what tells each which one it is.
POOLS: dict[str, tuple[int, Callable[[int], list[dict[str, str]]]]] = {
    "multi_worker_2": (2, cluster_environments),
    "multi_worker_3": (3, cluster_environments),
    "horovod_2": (2, horovod_environments),
    "parameter_server_2": (1, cluster_environments),  # the chief; it starts two workers
}


class Pools:
    """The pool of each name, started when it is first asked."""

    def __init__(self):
        self._pools: dict[str, WorkerPool] = {}

    def results(self, trial: Trial) -> list[dict[str, np.ndarray]]:
        """What each process of the trial's pool has trained to."""
        name = trial.distribution.arguments["pool"]
        if name not in self._pools:
            count, environments = POOLS[name]
            self._pools[name] = WorkerPool(
                ["-m", "tests.random_models.worker", name.rpartition("_")[0]],
                lambda: environments(count),
            )
        with tempfile.TemporaryDirectory() as folder:
            request = {"trial": encoded(trial), "folder": folder}
            replies = self._pools[name].ask(request, timeout_s=240)
            return [dict(np.load(Path(folder) / reply["file"])) for reply in replies]

    def close(self) -> None:
        """Ends all processes."""
        for pool in self._pools.values():
            pool.close()


def encoded(trial: Trial) -> str:
    """As text, for a line of JSON."""
    return base64.b64encode(pickle.dumps(trial)).decode()


def decoded(text: str) -> Trial:
    """What `encoded` has made text of."""
    return pickle.loads(base64.b64decode(text))
