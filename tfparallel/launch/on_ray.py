"""A training script on the workers of a Ray cluster, each process with its place in `TF_CONFIG`.

    python -m tfparallel.launch.on_ray --worker=4 --cpus=2 train.py

Runs where `ray job submit`, or a RayJob, starts its entrypoint; `tfparallel manifest ray` writes
the latter. Only workers have GPUs.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from tfparallel.launch.argument_types import non_negative_int, positive_int
from tfparallel.launch.manifests.job_spec import tf_config
from tfparallel.launch.ports import REUSE_PORT_ENV, reserved_addresses
from tfparallel.launch.processes import WorkerCommand, run_job

_ROLES = ("chief", "worker", "ps", "evaluator")
_PLACES_TIMEOUT_S = 600.0  # for the cluster to have room for all processes


class Seat:
    """A place of the cluster that one process of the job has: an actor of Ray."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def address(self) -> str:
        """Where the process will be reached, "host:port"; the port is kept for it."""
        import ray

        (address,) = self._held.enter_context(reserved_addresses(1))
        return f"{ray.util.get_node_ip_address()}:{address.rpartition(':')[2]}"

    def run(self, label: str, argv: Sequence[str], place: Mapping[str, str]) -> int:
        """Runs the process to its end; its exit status."""
        env = {**os.environ, **REUSE_PORT_ENV, "PYTHONUNBUFFERED": "1", **place}
        return run_job([WorkerCommand(label, tuple(argv), env, (), None, True)]).status


def run(counts: Mapping[str, int], argv: Sequence[str], cpus: float = 1, gpus: float = 0) -> int:
    """Runs a job to its end.

    Args:
        counts: processes by role, in the order chief, worker, ps, evaluator.
        argv: what each of them runs.
        cpus: of each.
        gpus: of each worker.

    Returns:
        The exit status of the process that failed first, 0 if none has.

    Raises:
        ray.exceptions.GetTimeoutError: if the cluster has no room for them.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    tasks = [(role, index) for role, count in counts.items() for index in range(count)]
    gpus_of = [gpus if role == "worker" else 0 for role, _ in tasks]
    bundles = [{"CPU": cpus, **({"GPU": its} if its else {})} for its in gpus_of]
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    ray.get(group.ready(), timeout=_PLACES_TIMEOUT_S)
    seats = [
        ray.remote(Seat)
        .options(
            num_cpus=cpus,
            num_gpus=gpus_of[rank],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        .remote()
        for rank in range(len(tasks))
    ]
    addresses = ray.get([seat.address.remote() for seat in seats])
    running = [
        seat.run.remote(f"{role} {index}", argv, _place(tasks, addresses, role, index))
        for seat, (role, index) in zip(seats, tasks, strict=True)
    ]
    try:
        return _status_of(running)
    finally:
        for seat in seats:
            ray.kill(seat)
        ray.util.remove_placement_group(group)


def _place(
    tasks: Sequence[tuple[str, int]], addresses: Sequence[str], role: str, index: int
) -> dict[str, str]:
    if len(tasks) == 1:
        return {}
    cluster: dict[str, list[str]] = {}
    for (its_role, _), address in zip(tasks, addresses, strict=True):
        if its_role != "evaluator":
            cluster.setdefault(its_role, []).append(address)
    return {"TF_CONFIG": tf_config(cluster, role, index)}


def _status_of(running: list) -> int:
    """Of the first process that ends otherwise than by 0; 0 when all have ended."""
    import ray

    while running:
        done, running = ray.wait(running)
        if status := ray.get(done[0]):
            return int(status)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfparallel.launch.on_ray")
    for role in _ROLES:
        least = positive_int if role == "worker" else non_negative_int
        parser.add_argument(f"--{role}", type=least, default=int(role == "worker"), metavar="N")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="of each process")
    parser.add_argument("--gpus", type=float, default=0.0, metavar="N", help="of each worker")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    counts = {role: getattr(options, role) for role in _ROLES if getattr(options, role)}
    argv = [sys.executable, options.script, *options.script_args]
    return run(counts, argv, options.cpus, options.gpus)


if __name__ == "__main__":
    sys.exit(main())
