"""The plan of a job on one machine: which processes it has and what tells each its place.

Pure: nothing is started here. `processes.py` starts what was planned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfparallel.coordination.cluster import ClusterConfig
from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE
from tfparallel.machine.gpu_shares import VISIBLE
from tfparallel.machine.processors import MIN_INTEROP_THREADS

# Else the first process on a GPU takes all of its memory.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

Addresses = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Role:
    """One kind of process.

    Attributes:
        name: the task type, and the first word of the label.
        place: variables that tell a process its place in the job, from the addresses of all
            roles, the name of its own role and its index in that.
    """

    name: str
    place: Callable[[Addresses, str, int], dict[str, str]]


@dataclass(frozen=True)
class PlannedProcess:
    """One process of a job: its label in the output and its whole environment."""

    label: str
    env: dict[str, str]


def tf_config_place(addresses: Addresses, role_name: str, index: int) -> dict[str, str]:
    """The place of a task of a TensorFlow cluster."""
    config = ClusterConfig(cluster=addresses, task_type=role_name, task_index=index)
    return {"TF_CONFIG": config.to_tf_config()}


# One row a role. A chief differs in its name only; a job of another kind brings its own `place`.
WORKER = Role("worker", tf_config_place)
CHIEF = Role("chief", tf_config_place)
PARAMETER_SERVER = Role("ps", tf_config_place)
EVALUATOR = Role("evaluator", tf_config_place)


def count_roles(num_workers: int, num_ps: int = 0, evaluator: bool = False) -> dict[Role, int]:
    """How many processes of each role a job has: with parameter servers, also one chief."""
    if num_ps == 0:
        return {WORKER: num_workers}
    roles = {CHIEF: 1, WORKER: num_workers, PARAMETER_SERVER: num_ps}
    return {**roles, EVALUATOR: 1} if evaluator else roles


def plan_processes(
    roles: Mapping[Role, Sequence[str]],
    base_env: Mapping[str, str],
    *,
    num_cores: int,
    devices_per_worker: int | None = None,
    gpus: Sequence[str] = (),
    cluster: Addresses | None = None,
    first_indices: Mapping[str, int] | None = None,
) -> list[PlannedProcess]:
    """Plan a job of one process per address, in the order given.

    Args:
        roles: the addresses of each role, "host:port".
        base_env: what every process inherits. `PYTHONUNBUFFERED` and `TF_NUM_INTEROP_THREADS`
            are kept if they are set there.
        num_cores: how many cores each process may use.
        devices_per_worker: how many logical CPU devices each process opens; None leaves it to
            the script.
        gpus: `CUDA_VISIBLE_DEVICES` of each worker; all other roles then see no GPU, which each
            process would take the memory of. None leaves the GPUs as they are.
        cluster: the addresses of the whole job by the role's name, where other hosts have some.
        first_indices: the index of the first process here, by the role's name.
    """
    common_env = {"PYTHONUNBUFFERED": "1", **_enough_interop_threads(num_cores), **base_env}
    if devices_per_worker is not None:
        common_env[LOGICAL_CPUS_VARIABLE] = str(devices_per_worker)
    addresses = cluster or {role.name: its_addresses for role, its_addresses in roles.items()}
    firsts = first_indices or {}
    return [
        PlannedProcess(
            label=f"{role.name} {index}",
            env={
                **common_env,
                **_gpus_of(role, here, gpus),
                **role.place(addresses, role.name, index),
            },
        )
        for role, its_addresses in roles.items()
        for index, here in enumerate(range(len(its_addresses)), firsts.get(role.name, 0))
    ]


def _gpus_of(role: Role, index: int, gpus: Sequence[str]) -> dict[str, str]:
    if not gpus:
        return {}
    if role.name != WORKER.name:
        return {VISIBLE: "-1"}
    is_shared = gpus.count(gpus[index]) > 1
    return {VISIBLE: gpus[index], **({GROWTH: "true"} if is_shared else {})}


def _enough_interop_threads(num_cores: int) -> dict[str, str]:
    if num_cores >= MIN_INTEROP_THREADS:
        return {}
    return {"TF_NUM_INTEROP_THREADS": str(MIN_INTEROP_THREADS)}
