"""The audits of steps that other processes have: jobs of several, and meshes of four devices."""

import collections
import functools
from collections.abc import Callable

from tests.gpu.audit import DIRECTIONS, Audit
from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments

NUM_CPUS = {  # of each process; the host is one, and of parameter servers this is the chief
    "multi_worker": 3,
    "horovod": 2,
    "parameter_server_sync": 1,
    "parameter_server_async": 1,
    "hybrid": 5,
    "hybrid_shards": 5,
    "hybrid_groups": 5,
}
_ENVIRONMENTS: dict[str, Callable[[], list[dict]]] = {
    "multi_worker": lambda: cluster_environments(2),
    "horovod": lambda: horovod_environments(2),
}


def audited_in_job(strategy_name: str, model_name: str | None, size: str) -> Audit:
    """The audit of rank 0's step; without a model, of what `predict` gathers."""
    first, *_ = _pool(strategy_name).ask({"model": model_name, "size": size}, timeout_s=240.0)
    copies = {key: collections.Counter(first["copies"].get(key, {})) for key in DIRECTIONS}
    counters = ("without_kernel", "collectives")
    rest = {key: collections.Counter(first[key]) for key in counters}
    return Audit(**{**first, **rest, "copies": copies})


@functools.cache
def _pool(strategy_name: str) -> WorkerPool:
    environments = _ENVIRONMENTS.get(strategy_name, lambda: [{}])
    return WorkerPool(["-m", "tests.gpu.job_worker", strategy_name], environments)
