"""A TrainJob of Kubeflow's trainer, and the runtime it needs: there is none for TensorFlow."""

from typing import Any

from tfparallel.launch.manifests.job_spec import JobSpec
from tfparallel.launch.manifests.jobset import LABEL, jobset_spec
from tfparallel.launch.manifests.pods import network_policy

_API = "trainer.kubeflow.org/v1alpha1"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_TRAINER = "node"  # the replicated job that `numNodes` counts


def trainjob_manifest(job: JobSpec) -> list[dict[str, Any]]:
    """The documents: the runtime has all roles, the TrainJob counts the workers."""
    names = {role: _TRAINER if role == "worker" else role for role in job.counts}
    template = jobset_spec(job, names)
    for replicated in template["replicatedJobs"]:
        if replicated["name"] == _TRAINER:
            replicated["template"]["metadata"] = {"labels": _STEP}
    runtime = {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name},
        "spec": {
            "mlPolicy": {"numNodes": job.counts["worker"]},
            "template": {"spec": template},
        },
    }
    document = {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {
                "image": job.image,
                "command": list(job.command),
                "numNodes": job.counts["worker"],
            },
        },
    }
    return [runtime, document, *network_policy(job, LABEL)]
