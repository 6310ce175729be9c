"""The TFJob manifest says what Kubeflow's published schema knows, and what our cluster accepts.

Schema: kubeflow/training-operator, manifests/base/crds/kubeflow.org_tfjobs.yaml, version v1.
"""

import json
from pathlib import Path

import pytest
import yaml

from tfparallel.cluster import ClusterConfig, read_tf_config
from tfparallel.parameter_server.cluster import ParameterServerCluster
from tfparallel.servers.security import check_network

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/tfjob_parameter_server.yaml"

# Field: type, or the fields of an object; of what the schema allows, the part that may be used.
SPEC = {
    "enableDynamicWorker": bool,
    "successPolicy": str,
    "runPolicy": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "cleanPodPolicy": str,
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
REPLICA_SPEC = {
    "replicas": int,
    "restartPolicy": str,
    "template": {"metadata": dict, "spec": {"containers": list, "volumes": list}},
}
CONTAINER = {
    "name": str,
    "image": str,
    "command": list,
    "args": list,
    "env": list,
    "resources": dict,
    "volumeMounts": list,
}


@pytest.fixture
def documents():
    return {d["kind"]: d for d in yaml.safe_load_all(MANIFEST.read_text())}


def check(value, schema, path="") -> None:
    if isinstance(schema, type):
        assert type(value) is schema, path
        return
    assert type(value) is dict, path
    for key, inner in value.items():
        assert key in schema, f"{path}.{key}"
        check(inner, schema[key], f"{path}.{key}")


def test_fields_are_those_of_the_schema(documents):
    job = documents["TFJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    replicas = job["spec"].pop("tfReplicaSpecs")
    check(job["spec"], SPEC)
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert set(replicas) == {"Chief", "PS", "Worker", "Evaluator"}
    for name, replica in replicas.items():
        check(replica, REPLICA_SPEC, name)
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = replica["template"]["spec"]["containers"]
        check(container, CONTAINER, name)
        assert container["name"] == "tensorflow"  # the operator's TF_CONFIG goes to this one
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in replica["template"]["spec"]["volumes"]}


def test_schema_check_notices_mistakes():
    with pytest.raises(AssertionError, match="Worker.replica"):
        check({"replica": 1}, REPLICA_SPEC, "Worker")
    with pytest.raises(AssertionError, match=r"\.runPolicy\.backoffLimit"):
        check({"runPolicy": {"backoffLimit": "10"}}, SPEC)


def test_every_pod_finds_its_place_in_the_operators_tf_config(documents, monkeypatch):
    job = documents["TFJob"]
    name, specs = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    environment = {
        variable["name"]: variable["value"]
        for variable in specs["Chief"]["template"]["spec"]["containers"][0]["env"]
    }
    addresses = {
        role.lower(): [f"{name}-{role.lower()}-{i}.jobs.svc:2222" for i in range(spec["replicas"])]
        for role, spec in specs.items()
    }
    cluster = {role: addresses[role] for role in ("chief", "ps", "worker")}  # as the operator does
    for role, of_role in addresses.items():
        for index in range(len(of_role)):
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            monkeypatch.setenv("TF_CONFIG", json.dumps({**config, "environment": "cloud"}))
            read = read_tf_config()
            assert isinstance(read, ClusterConfig)
            place = ParameterServerCluster(read.cluster_resolver())
            assert (place.task_type, place.task_index) == (role, index)
            with pytest.warns(UserWarning, match="without any authentication"):
                check_network(place.tasks, insecure_network=False, environ=environment)


def test_network_policy_lets_in_the_pods_of_the_job_only(documents):
    name = documents["TFJob"]["metadata"]["name"]
    policy = documents["NetworkPolicy"]["spec"]
    pods = {"matchLabels": {"training.kubeflow.org/job-name": name}}
    assert policy["podSelector"] == pods
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": pods}], "ports": [{"port": 2222}]}]
