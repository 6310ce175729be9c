"""What `tfparallel manifest` prints is what clusters take, by their published schemas."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.launch.cli import main
from tfparallel.parameter_server.server_cluster import ParameterServerCluster

SCHEMAS = Path(__file__).parent / "schemas"
OF_KUBERNETES = Path(__file__).parents[1] / "parameter_server" / "kubernetes_schema.json"
ON_KUBERNETES = ("tfjob", "trainjob", "jobset", "ray")

# The roles of every strategy's processes.
ROLES = {
    "one process": [],  # OneDevice, Mirrored, CentralStorage, TensorParallel, TPU, and others
    "workers": ["--workers", "3"],  # MultiWorkerMirrored, Sharded, Pipeline, Hybrid in processes
    "servers": ["--workers", "2", "--ps", "2"],  # ParameterServer
    "servers and evaluator": ["--workers", "2", "--ps", "1", "--evaluator"],
}
OPTIONS = [
    *("--name", "mnist", "--image", "registry/mnist:1", "--claim", "runs", "--env", "SEED=7"),
    *("--cpus", "4", "--gpus", "2", "--memory", "6Gi", "--grace-seconds", "90"),
]


def printed(capsys, target: str, *options: str, script=("train.py", "--epochs", "3")) -> str:
    assert main(["manifest", target, *options, *script]) == 0
    return capsys.readouterr().out


def documents(text: str) -> dict[str, dict]:
    return {d.get("kind", "Compose"): d for d in YAML(typ="safe").load_all(text)}


def closed(schema: Any) -> Any:
    """A schema in which unknown fields are mistakes: an API server only drops them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    new = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in new or new.get("x-kubernetes-preserve-unknown-fields")
    if new.get("type") == "object" and isinstance(new.get("properties"), dict) and not is_open:
        new["additionalProperties"] = False
    return new


def errors(document: dict, kind: str) -> list[str]:
    if kind == "NetworkPolicy":
        schema = {**json.loads(OF_KUBERNETES.read_text()), "$ref": "#/$defs/V1NetworkPolicy"}
    else:
        schema = json.loads(gzip.decompress((SCHEMAS / f"{kind.lower()}.json.gz").read_bytes()))
        if kind != "Compose":
            schema = closed(schema)
            schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("target", [*ON_KUBERNETES, "compose"])
def test_is_valid_by_the_published_schemas(capsys, target, roles):
    found = documents(printed(capsys, target, *OPTIONS, *ROLES[roles]))
    assert found
    for kind, document in found.items():
        assert errors(document, kind) == []


@pytest.mark.parametrize(
    ("target", "kind", "path", "wrong"),
    [
        ("tfjob", "TFJob", "spec.runPolicy.backoffLimit", "10"),
        ("tfjob", "TFJob", "spec.tfReplicaSpecs.Worker.template.spec.container", []),
        ("jobset", "JobSet", "spec.replicatedJobs.0.template.spec.paralellism", 1),
        ("jobset", "JobSet", "spec.replicatedJobs.0.replicas", "one"),
        ("trainjob", "TrainJob", "spec.trainer.nodes", 2),
        ("trainjob", "TrainingRuntime", "spec.mlPolicy.numNodes", "two"),
        ("ray", "RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.image", "x"),
        ("compose", "Compose", "services.worker-0.stop_grace", "9s"),
    ],
)
def test_the_schemas_notice_mistakes(capsys, target, kind, path, wrong):
    document = documents(printed(capsys, target, *OPTIONS, *ROLES["workers"]))[kind]
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = wrong
    assert errors(document, kind)


def templates(text: str, target: str) -> dict[str, tuple[int, dict]]:
    """By role: how many pods, and their spec."""
    found = documents(text)
    if target == "tfjob":
        specs = found["TFJob"]["spec"]["tfReplicaSpecs"]
        return {r.lower(): (s["replicas"], s["template"]["spec"]) for r, s in specs.items()}
    spec = (found["JobSet"]["spec"] if target == "jobset"
            else found["TrainingRuntime"]["spec"]["template"]["spec"])  # fmt: skip
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    return {name: (job["completions"], job["template"]["spec"]) for name, job in jobs.items()}


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("target", ["tfjob", "jobset", "trainjob"])
def test_pods_have_what_was_asked_for(capsys, target, roles):
    for role, (_, spec) in templates(printed(capsys, target, *OPTIONS, *ROLES[roles]),
                                     target).items():  # fmt: skip
        (container,) = spec["containers"]
        assert container["image"] == "registry/mnist:1"
        assert container["command"] == ["python", "train.py", "--epochs", "3"]
        gpus = {"nvidia.com/gpu": "2"} if role in ("worker", "node") else {}
        assert container["resources"]["requests"] == {"cpu": "4", "memory": "6Gi", **gpus}
        assert {"name": "SEED", "value": "7"} in container["env"]
        assert spec["terminationGracePeriodSeconds"] == 90
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"backups": "/backups", "shared-memory": "/dev/shm"}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}


def place_of_pods(text: str, target: str) -> list[str]:
    """`TF_CONFIG` of every pod, with its index put in as Kubernetes does."""
    found = []
    for count, spec in templates(text, target).values():
        env = {each["name"]: each for each in spec["containers"][0]["env"]}
        names = list(env)
        assert names.index("TASK_INDEX") < names.index("TF_CONFIG")  # else nothing is put in
        for index in range(count):
            found.append(env["TF_CONFIG"]["value"].replace("$(TASK_INDEX)", str(index)))
    return found


def place_of_services(text: str) -> dict[str, str]:
    services = documents(text)["Compose"]["services"]
    return {name: service["environment"]["TF_CONFIG"] for name, service in services.items()}


@pytest.mark.parametrize("roles", [r for r in ROLES if r != "one process"])
@pytest.mark.parametrize("target", ["jobset", "trainjob", "compose"])
def test_every_process_finds_its_place(capsys, target, roles):
    text = printed(capsys, target, *OPTIONS, *ROLES[roles])
    places = list(place_of_services(text).values()) if target == "compose" else place_of_pods(
        text, target)  # fmt: skip
    tasks = []
    for place in places:
        config = read_tf_config({"TF_CONFIG": place})
        assert config is not None
        tasks.append((config.task_type, config.task_index))
        if "servers" in roles:
            ParameterServerCluster(config.cluster_resolver())
    counted = json.loads(places[0])["cluster"]
    expected = [(role, i) for role, each in counted.items() for i in range(len(each))]
    assert sorted(tasks) == sorted(expected + [("evaluator", 0)] * roles.endswith("evaluator"))


def test_names_of_pods_are_those_that_jobset_gives(capsys):
    """JOBSET-REPLICATED_JOB-JOB_INDEX-POD_INDEX.SUBDOMAIN, as docs of JobSet say."""
    place = place_of_pods(printed(capsys, "jobset", *OPTIONS, "--workers", "2"), "jobset")[0]
    assert json.loads(place)["cluster"]["worker"] == [
        "mnist-worker-0-0.mnist:2222", "mnist-worker-0-1.mnist:2222"]  # fmt: skip
    place = place_of_pods(printed(capsys, "trainjob", *OPTIONS, "--workers", "2"), "trainjob")[0]
    assert json.loads(place)["cluster"]["worker"][1] == "mnist-node-0-1.mnist:2222"


def test_services_are_named_as_in_the_cluster(capsys):
    places = place_of_services(printed(capsys, "compose", *OPTIONS, *ROLES["servers"]))
    cluster = json.loads(places["chief-0"])["cluster"]
    named = {address.removesuffix(":2222") for each in cluster.values() for address in each}
    assert named == set(places)


@pytest.mark.parametrize("target", ON_KUBERNETES)
def test_only_a_job_of_several_has_a_network_policy(capsys, target):
    own = {"tfjob": "training.kubeflow.org/job-name", "ray": "ray.io/originated-from-cr-name"}
    label = own.get(target, "jobset.sigs.k8s.io/jobset-name")
    policy = documents(printed(capsys, target, *OPTIONS, *ROLES["workers"]))["NetworkPolicy"]
    assert policy["spec"]["podSelector"]["matchLabels"][label] == "mnist"
    (rule,) = policy["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": {label: "mnist"}}}]}
    assert "NetworkPolicy" not in documents(printed(capsys, target, *OPTIONS))


def test_a_job_with_servers_ends_with_its_chief(capsys):
    jobset = documents(printed(capsys, "jobset", *OPTIONS, *ROLES["servers"]))["JobSet"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "python train.py --epochs 3"),
        (["--workers", "3"], "tfparallel launch train.py --epochs 3"),
        (["--workers", "3", "--ps", "2"], "tfparallel launch --ps 2 train.py --epochs 3"),
        (["--workers", "1", "--ps", "1", "--evaluator"],
         "tfparallel launch --standalone --workers 1 --ps 1 --evaluator train.py --epochs 3"),
    ],
)  # fmt: skip
def test_a_script_for_slurm(capsys, options, line):
    text = printed(capsys, "slurm", "--name", "mnist", "--memory", "6Gi", "--cpus", "4", *options)
    assert text.endswith(f"\nsrun --kill-on-bad-exit=1 {line}\n")
    assert "#SBATCH --mem-per-cpu=1536M\n" in text  # 6 GiB of a task, on 4 CPUs
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_ranks_of_horovod(capsys):
    text = printed(capsys, "slurm", "--horovod", "--workers", "4", "--gpus", "1")
    assert '\nhorovodrun -np 4 -H "$hosts" python train.py --epochs 3\n' in text
    compose = documents(printed(capsys, "compose", "--horovod", *OPTIONS, "--workers", "2"))
    (service,) = compose["Compose"]["services"].values()
    assert service["command"][:4] == ["horovodrun", "-np", "2", "python"]
    assert "TF_CONFIG" not in service["environment"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 4
    assert errors(compose["Compose"], "Compose") == []


def test_the_entrypoint_of_ray_is_a_command_that_is_understood(capsys):
    text = printed(capsys, "ray", *OPTIONS, *ROLES["servers"])
    spec = documents(text)["RayJob"]["spec"]
    assert spec["entrypoint"] == ("python -m tfparallel.launch.on_ray --chief=1 --worker=2 --ps=2 "
                                  "--cpus=4 --gpus=2 train.py --epochs 3")  # fmt: skip
    assert spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobset", "train.py"], "jobset expects --image"),
        (["nomad", "train.py"], "invalid choice: 'nomad'"),
        (["slurm", "--claim", "x", "train.py"], "slurm expects no --claim"),
        (["slurm", "--evaluator", "train.py"], "Add --ps 1"),
        (["tfjob", "--image", "x", "--horovod", "train.py"], "MultiWorkerMirroredStrategy needs"),
        (["compose", "--image", "x", "--name", "My_Job", "train.py"], "Received: 'My_Job'"),
        (["compose", "--image", "x", "--memory", "4GB", "train.py"], "expected 512Mi or 4Gi"),
        (["compose", "--image", "x", "--env", "A", "train.py"], "expected NAME=VALUE"),
        (["ray", "--image", "x", "-m", "train"], "ray expects a file"),
    ],
)
def test_refuses_what_cannot_run(capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        main(["manifest", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_sources_of_the_schemas_are_named():
    readme = (SCHEMAS / "README.md").read_text()
    for schema in SCHEMAS.glob("*.gz"):
        (row,) = [line for line in readme.splitlines() if schema.name in line]
        assert re.search(r"\| https://github.com/[\w/-]+ \| [\w/.-]+ \| [0-9a-f]{40} \|$", row)


def test_docker_takes_a_compose_file(capsys, tmp_path):
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    (tmp_path / "compose.yaml").write_text(printed(capsys, "compose", *OPTIONS, "--workers", "2"))
    subprocess.run(["docker", "compose", "config", "--quiet"], cwd=tmp_path, check=True)
