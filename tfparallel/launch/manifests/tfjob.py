"""A TFJob for Kubeflow's training operator (kubeflow.org/v1), which sets `TF_CONFIG` itself."""

from typing import Any

from tfparallel.launch.manifests.job_spec import JobSpec
from tfparallel.launch.manifests.pods import network_policy, pod

_NAMES = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
_LABEL = "training.kubeflow.org/job-name"


def tfjob_manifest(job: JobSpec) -> list[dict[str, Any]]:
    """The documents."""
    replicas = {
        _NAMES[role]: {
            "replicas": count,
            "restartPolicy": "OnFailure",
            # The operator's TF_CONFIG goes to the container of this name.
            "template": {"spec": pod(job, role, "tensorflow", [], "")},
        }
        for role, count in job.counts.items()
    }
    spec = {
        "runPolicy": {"cleanPodPolicy": "All", "backoffLimit": job.max_restarts},
        "tfReplicaSpecs": replicas,
    }
    document = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": job.name}}
    return [{**document, "spec": spec}, *network_policy(job, _LABEL)]
