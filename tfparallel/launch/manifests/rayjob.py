"""A RayJob of KubeRay: the entrypoint starts a process on each of Ray's workers."""

import shlex
from typing import Any

from tfparallel.launch.manifests.job_spec import JobSpec
from tfparallel.launch.manifests.pods import network_policy, pod

_LABEL = "ray.io/originated-from-cr-name"


def rayjob_manifest(job: JobSpec, script: list[str]) -> list[dict[str, Any]]:
    """The documents.

    Args:
        job: the roles that are not workers run beside the workers.
        script: a Python file, with its arguments.
    """
    counts = [f"--{role}={count}" for role, count in job.counts.items()]
    resources = [f"--cpus={job.resources.cpus}", f"--gpus={job.resources.gpus}"]
    module = ["python", "-m", "tfparallel.launch.on_ray", *counts, *resources]
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": shlex.join([*module, *script]),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": job.max_restarts,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # it schedules, and trains nothing
                    "template": {"spec": _pod(job, "head", "ray-head")},
                },
                "workerGroupSpecs": [_group(job)],
            },
        },
    }
    # The head has to be reached by KubeRay's operator; TensorFlow's servers are on workers only.
    return [document, *network_policy(job, _LABEL, {"ray.io/node-type": "worker"})]


def _group(job: JobSpec) -> dict[str, Any]:
    count = sum(job.counts.values())
    return {
        "groupName": "processes",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": {"spec": _pod(job, "worker", "ray-worker")},
    }


def _pod(job: JobSpec, role: str, container: str) -> dict[str, Any]:
    """Ray's operator says itself what its containers run."""
    spec = pod(job, role, container, [], "")
    spec["containers"][0].pop("command")
    return spec
