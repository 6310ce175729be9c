"""A process of `Pools`: trains each trial that it is sent, with its peers."""

import json
import os
import sys
from pathlib import Path

import numpy as np

import tfparallel
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests
from tests.parameter_server.cluster import ServerProcesses
from tests.random_models.pools import decoded
from tests.random_models.training import results

_servers: list[ServerProcesses] = []  # they end with this process


def _parameter_servers() -> tfparallel.ParameterServerStrategy:
    _servers.append(ServerProcesses(num_workers=2, num_ps=2))
    os.environ.update(_servers[0].environment("chief", 0))
    return tfparallel.ParameterServerStrategy(mode="sync")


STRATEGIES = {
    "multi_worker": tfparallel.MultiWorkerMirroredStrategy,
    "horovod": tfparallel.HorovodStrategy,
    "parameter_server": _parameter_servers,
}


def main(kind: str) -> None:
    """Serves a pool."""
    strategies: list = []

    def begin() -> None:
        open_logical_cpus(1)
        strategies.append(STRATEGIES[kind]())

    def answer(trial: str, folder: str) -> dict:
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
        rank = os.environ.get("HOROVOD_RANK", task.get("index", 0))
        file = f"results{rank}.npz"
        np.savez(Path(folder) / file, **results(decoded(trial), strategies[0]))
        return {"file": file}

    answer_requests(answer, begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
