"""A job as every manifest needs it: processes by role, their container, and what each of them has.

Pure: reads what is passed in.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PORT = 2222  # of each task of TF_CONFIG; Kubeflow's operator takes it, too
BACKUPS = "/backups"


@dataclass(frozen=True)
class Resources:
    """What each process of a job has.

    Attributes:
        cpus, gpus: how many.
        memory: as Kubernetes writes it, such as `4Gi`.
    """

    cpus: int = 2
    memory: str = "4Gi"
    gpus: int = 0


@dataclass(frozen=True)
class JobSpec:
    """A job.

    Attributes:
        name: of the job and of what belongs to it.
        image: the container, with Python, tfparallel and the script.
        command: of each process, without what tells it its place.
        counts: processes by role, as in `TF_CONFIG`: worker, chief, ps, evaluator.
        resources: of each process.
        claim: the volume for backups, which all processes write at `BACKUPS`; None for none.
        grace_s: seconds between SIGTERM and SIGKILL.
        max_restarts: how often the job is started again after a failure.
        env: more variables.
    """

    name: str
    image: str
    command: Sequence[str]
    counts: Mapping[str, int]
    resources: Resources = field(default_factory=Resources)
    claim: str | None = None
    grace_s: int = 120
    max_restarts: int = 10
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_cluster(self) -> bool:
        """Whether processes have to find one another."""
        return sum(self.counts.values()) > 1

    @property
    def succeeds_with(self) -> str:
        """The role whose end is the job's end."""
        return "chief" if "chief" in self.counts else "worker"

    def gpus_of(self, role: str) -> int:
        """Of a process: only workers compute, and TensorFlow takes the memory of all it sees."""
        return self.resources.gpus if role == "worker" else 0

    def cluster(self, host: str) -> dict[str, list[str]]:
        """Addresses by role; the evaluator is in no cluster.

        Args:
            host: of a process, with `{role}` and `{index}`.
        """
        return {
            role: [f"{host.format(role=role, index=index)}:{PORT}" for index in range(count)]
            for role, count in self.counts.items()
            if role != "evaluator"
        }


def tf_config(cluster: Mapping[str, Sequence[str]], role: str, index: int | str) -> str:
    """`TF_CONFIG` of a process.

    Args:
        cluster: addresses by role.
        role: of the process.
        index: its number, or text that becomes it, such as `$(TASK_INDEX)` in a pod.
    """
    head = json.dumps({"cluster": cluster, "task": {"type": role}})
    return head.removesuffix("}}") + f', "index": {index}}}}}'


def processes_by_role(workers: int, ps: int = 0, evaluator: bool = False) -> dict[str, int]:
    """Of each role: with parameter servers there is a chief, too."""
    if not ps:
        return {"worker": workers}
    roles = {"chief": 1, "worker": workers, "ps": ps}
    return {**roles, "evaluator": 1} if evaluator else roles
