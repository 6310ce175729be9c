"""A Compose file: a service for each process, on a network of their own."""

from typing import Any

from tfparallel.launch.manifests.job_spec import BACKUPS, JobSpec, tf_config


def compose_manifest(job: JobSpec) -> list[dict[str, Any]]:
    """The one document."""
    cluster = job.cluster("{role}-{index}")
    services = {
        f"{role}-{index}": _service(
            job, role, {"TF_CONFIG": tf_config(cluster, role, index)} if job.is_cluster else {}
        )
        for role, count in job.counts.items()
        for index in range(count)
    }
    document: dict[str, Any] = {"name": job.name, "services": services}
    return [{**document, "volumes": {job.claim: {}}} if job.claim else document]


def _service(job: JobSpec, role: str, place: dict[str, str]) -> dict[str, Any]:
    leave = {"TFPARALLEL_INSECURE_NETWORK": "1"} if job.is_cluster else {}
    service: dict[str, Any] = {
        "image": job.image,
        "command": [word.replace("$", "$$") for word in job.command],
        "environment": {"PYTHONUNBUFFERED": "1", **job.env, **leave, **place},
        "restart": f"on-failure:{job.max_restarts}" if job.max_restarts else "no",
        "stop_grace_period": f"{job.grace_s}s",
        "shm_size": "1gb",
        "deploy": {"resources": _resources(job, job.gpus_of(role))},
    }
    if job.claim:
        service["volumes"] = [f"{job.claim}:{BACKUPS}"]
    return service


def _resources(job: JobSpec, gpus: int) -> dict[str, Any]:
    memory = job.resources.memory.removesuffix("i").lower()  # 4Gi is 4g
    limits = {"limits": {"cpus": str(job.resources.cpus), "memory": memory}}
    if not gpus:
        return limits
    gpu = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
    return {**limits, "reservations": {"devices": [gpu]}}
