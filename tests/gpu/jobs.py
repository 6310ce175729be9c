"""The audits of steps that other processes have: jobs of several, and meshes of four devices."""

import collections

from tests.gpu.audit import DIRECTIONS, Audit
from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments

NUM_CPUS = {  # of each process; the host is one, and of parameter servers this is the chief
    "multi_worker": 3,
    "multi_worker_pipeline": 3,
    "multi_worker_shards": 3,
    "multi_worker_groups": 3,
    "horovod": 2,
    "horovod_pipeline": 3,
    "horovod_shards": 3,
    "horovod_groups": 3,
    "sharded_workers": 3,
    "sharded_workers_of_one": 2,
    "sharded_workers_of_copies": 3,
    "sharded_ranks": 2,
    "pipeline_hosts": 3,
    "parameter_server_sync": 1,
    "parameter_server_async": 1,
    "hybrid": 5,
    "hybrid_shards": 5,
    "hybrid_groups": 5,
}
_OF_WORKERS = ("multi_worker", "sharded_workers")  # as their names begin
_OF_RANKS = ("horovod", "sharded_ranks")


def audited_in_job(strategy_name: str, model_name: str | None, size: str) -> Audit:
    """The audit of rank 0's step; without a model, of what `predict` gathers."""
    first, *_ = _pool(strategy_name).ask({"model": model_name, "size": size}, timeout_s=240.0)
    copies = {key: collections.Counter(first["copies"].get(key, {})) for key in DIRECTIONS}
    counters = ("without_kernel", "waits", "collectives")
    rest = {key: collections.Counter(first[key]) for key in counters}
    return Audit(**{**first, **rest, "copies": copies})


_pools: dict[str, WorkerPool] = {}


def _pool(strategy_name: str) -> WorkerPool:
    """That of a strategy, the only one: idle processes have memory, and Horovod's never sleep."""
    if strategy_name not in _pools:
        close_pools()
        _pools[strategy_name] = WorkerPool(
            ["-m", "tests.gpu.job_worker", strategy_name], lambda: _environments(strategy_name)
        )
    return _pools[strategy_name]


def close_pools() -> None:
    """Ends the processes."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _environments(strategy_name: str) -> list[dict]:
    if strategy_name.startswith(_OF_WORKERS):
        return cluster_environments(2)
    return horovod_environments(2) if needs_horovod(strategy_name) else [{}]


def needs_horovod(strategy_name: str) -> bool:
    """Whether processes of a job are ranks of Horovod."""
    return strategy_name.startswith(_OF_RANKS)
