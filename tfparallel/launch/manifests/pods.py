"""What pods of every kind of Kubernetes job have in common."""

from collections.abc import Mapping
from typing import Any

from tfparallel.launch.manifests.job_spec import BACKUPS, JobSpec

SHARED_MEMORY = "/dev/shm"  # 64 MB in a container, too little for loaders with processes


def pod(
    job: JobSpec, role: str, container: str, env: list[dict[str, Any]], restart_policy: str
) -> dict[str, Any]:
    """The `spec` of a pod.

    Args:
        job: whose pod it is.
        role: of its process.
        container: the name of its container, which some operators look for.
        env: variables beside the job's own.
        restart_policy: of the pod; empty where the operator has a place of its own for it.
    """
    mounts = [{"name": "shared-memory", "mountPath": SHARED_MEMORY}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.claim:
        mounts.append({"name": "backups", "mountPath": BACKUPS})
        volumes.append({"name": "backups", "persistentVolumeClaim": {"claimName": job.claim}})
    return {
        **({"restartPolicy": restart_policy} if restart_policy else {}),
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": list(job.command),
                "env": [*variables(job), *env],
                "resources": resources(job, role),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def variables(job: JobSpec) -> list[dict[str, str]]:
    """The job's own, and leave to use a network that `network_policy` closes."""
    env = {"PYTHONUNBUFFERED": "1", **job.env}
    if job.is_cluster:
        env["TFPARALLEL_INSECURE_NETWORK"] = "1"
    return [{"name": name, "value": value} for name, value in env.items()]


def resources(job: JobSpec, role: str) -> dict[str, dict[str, str]]:
    """Requests, and limits for what cannot be shared."""
    count = job.gpus_of(role)
    gpus = {"nvidia.com/gpu": str(count)} if count else {}
    each = {"cpu": str(job.resources.cpus), "memory": job.resources.memory, **gpus}
    return {"requests": each, "limits": {"memory": job.resources.memory, **gpus}}


def network_policy(
    job: JobSpec, label: str, also: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Only pods of the job reach its pods: TensorFlow's servers ask nobody who they are.

    Args:
        job: whose pods they are.
        label: by which the job's pods are known.
        also: further labels of those that are closed.
    """
    if not job.is_cluster:
        return []
    pods = {"matchLabels": {label: job.name}}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": job.name},
            "spec": {
                "podSelector": {"matchLabels": {**pods["matchLabels"], **(also or {})}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": pods}]}],
            },
        }
    ]
