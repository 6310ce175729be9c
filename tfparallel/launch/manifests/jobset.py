"""A JobSet (jobset.x-k8s.io): an indexed Job for each role, and a name in DNS for each pod."""

from typing import Any

from tfparallel.launch.manifests.job_spec import JobSpec, tf_config
from tfparallel.launch.manifests.pods import network_policy, pod

LABEL = "jobset.sigs.k8s.io/jobset-name"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset_manifest(job: JobSpec) -> list[dict[str, Any]]:
    """The documents."""
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": jobset_spec(job, {role: role for role in job.counts}),
    }
    return [document, *network_policy(job, LABEL)]


def jobset_spec(job: JobSpec, names: dict[str, str]) -> dict[str, Any]:
    """The `spec`: any failure starts all roles again, from their backup.

    Args:
        job: what to run.
        names: of the replicated jobs, by role.
    """
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {
            "operator": "All",
            "targetReplicatedJobs": [names[job.succeeds_with]],
        },
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "replicatedJobs": [
            {
                "name": names[role],
                "replicas": 1,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "completions": count,
                        "parallelism": count,
                        "backoffLimit": 0,
                        "template": {
                            "spec": pod(job, role, "node", _place(job, names, role), "Never")
                        },
                    }
                },
            }
            for role, count in job.counts.items()
        ],
    }


def _place(job: JobSpec, names: dict[str, str], role: str) -> list[dict[str, Any]]:
    """Variables that tell a pod its place; Kubernetes puts the index in."""
    if not job.is_cluster:
        return []
    cluster = {
        each: [
            # JOBSET-REPLICATED_JOB-JOB_INDEX-POD_INDEX.SUBDOMAIN
            address.replace(f"{job.name}-{each}-0-", f"{job.name}-{names[each]}-0-", 1)
            for address in addresses
        ]
        for each, addresses in job.cluster(f"{job.name}-{{role}}-0-{{index}}.{job.name}").items()
    }
    return [
        {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "TF_CONFIG", "value": tf_config(cluster, role, "$(TASK_INDEX)")},
    ]
