"""The TFJob manifest says what Kubeflow's published schema knows, and what our cluster accepts.

`kubernetes_schema.json` says where its definitions come from; those of TFJob were compared with
kubeflow/trainer, manifests/base/crds/kubeflow.org_tfjobs.yaml at ee38ae8, by hand.
"""

import functools
import json
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from tfparallel.coordination.cluster import ClusterConfig, read_tf_config
from tfparallel.coordination.security import check_network
from tfparallel.parameter_server.server_cluster import ParameterServerCluster

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/tfjob_parameter_server.yaml"

SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())


@pytest.fixture
def documents():
    return {d["kind"]: d for d in YAML(typ="safe").load_all(MANIFEST.read_text())}


def errors(document: dict, kind: str) -> list[str]:
    """What the published schema of `kind` says against a document."""
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def test_documents_are_valid_by_the_published_schemas(documents):
    assert errors(documents["TFJob"], "KubeflowOrgV1TFJob") == []
    assert errors(documents["NetworkPolicy"], "V1NetworkPolicy") == []


def test_values_are_those_that_the_operator_knows(documents):
    job = documents["TFJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    replicas = job["spec"]["tfReplicaSpecs"]
    assert set(replicas) == {"Chief", "PS", "Worker", "Evaluator"}
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"  # the operator's TF_CONFIG goes to this one
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in replica["template"]["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        ("tfReplicaSpecs.Worker", {"replica": 1}, "'replica' was unexpected"),
        ("runPolicy", {"backoffLimit": "10"}, "'10' is not of type 'integer'"),
        ("tfReplicaSpecs.PS.template.spec", {}, "'containers' is a required property"),
    ],
)
def test_schema_notices_mistakes(documents, place, wrong, message):
    job = documents["TFJob"]
    *path, last = place.split(".")
    parent = functools.reduce(dict.__getitem__, path, job["spec"])
    parent[last] = wrong
    found = errors(job, "KubeflowOrgV1TFJob")
    assert any(message in error for error in found), found


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
