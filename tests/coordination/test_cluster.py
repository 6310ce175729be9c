import contextlib
import copy
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.coordination.cluster import ClusterConfig, ClusterConfigError, read_tf_config

pytestmark = pytest.mark.timeout(60)

WORKERS = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]


def read(config):
    """Read a TF_CONFIG given as text or as what its JSON says."""
    text = config if isinstance(config, str) else json.dumps(config)
    return read_tf_config({"TF_CONFIG": text})


def problems(config):
    with pytest.raises(ClusterConfigError) as info:
        read(config)
    return info.value.problems


def tf_config(cluster, task_type="worker", task_index=0, **more):
    return {"cluster": cluster, "task": {"type": task_type, "index": task_index}, **more}


# ---- what is accepted


def test_reads_a_worker():
    config = read(tf_config({"worker": WORKERS}, task_index=1))
    assert config.cluster == {"worker": tuple(WORKERS)}
    assert (config.num_workers, config.rank, config.is_chief) == (3, 1, False)
    assert config.address == WORKERS[1]
    assert config.peers == (WORKERS[0], WORKERS[2])


def test_worker_0_is_chief_when_there_is_no_chief():
    assert read(tf_config({"worker": WORKERS})).is_chief


PLACES = [
    # task, rank, is_chief, address, number of peers
    (("chief", 0), 0, True, "c:1", 2),
    (("worker", 0), 1, False, "w0:1", 2),
    (("worker", 1), 2, False, "w1:1", 2),
    (("ps", 0), None, False, "p:1", 3),
    (("evaluator", 0), None, False, None, 3),
]


@pytest.mark.parametrize("task, rank, is_chief, address, num_peers", PLACES)
def test_places_in_a_cluster_of_all_roles(task, rank, is_chief, address, num_peers):
    config = read(tf_config({"worker": ["w0:1", "w1:1"], "ps": ["p:1"], "chief": ["c:1"]}, *task))
    assert config.num_workers == 3
    assert (config.rank, config.is_chief, config.address) == (rank, is_chief, address)
    assert len(config.peers) == num_peers


def test_peers_are_in_the_order_of_ranks():
    config = read(tf_config({"worker": ["w0:1", "w1:1"], "chief": ["c:1"]}, "worker", 1))
    assert config.peers == ("c:1", "w0:1")


def test_a_listed_evaluator_has_its_address():
    config = read(tf_config({"worker": ["w:1"], "evaluator": ["e:1"]}, "evaluator"))
    assert (config.address, config.num_workers) == ("e:1", 1)


def test_accepts_an_evaluator_alone():
    assert read(tf_config({"evaluator": ["e:1"]}, "evaluator")).num_workers == 0


@pytest.mark.parametrize("text", [None, "", "  \n", "{}"])
def test_without_tf_config_there_is_no_cluster(text):
    assert read_tf_config({} if text is None else {"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    "config",
    [
        {"task": {"type": "worker", "index": 0}},
        {"task": {"type": "master", "index": "0"}, "environment": "cloud", "job": {}},
        {"cluster": {}, "task": {"type": "worker", "index": 0}},
        {"cluster": {}, "environment": "cloud"},
    ],
)
def test_a_job_of_one_process_has_no_cluster(config):
    assert read(config) is None


def test_reads_the_environment_of_the_process_by_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config({"worker": WORKERS}, task_index=2)))
    assert read_tf_config().rank == 2
    monkeypatch.delenv("TF_CONFIG")
    assert read_tf_config() is None


def test_accepts_what_kubeflow_writes():
    config = read(
        '{"cluster":{"chief":["job-chief-0.ns.svc:2222"],"worker":["job-worker-0.ns.svc:2222"]},'
        '"task":{"type":"worker","index":0},"environment":"cloud"}'
    )
    assert (config.rank, config.num_workers) == (1, 2)


def test_accepts_what_vertex_ai_writes():
    config = read(
        tf_config({"chief": ["cmle-training-0:2222"]}, "chief", environment="cloud", job={"x": 1})
    )
    assert config.is_chief


def test_accepts_an_index_in_digits():
    assert read(tf_config({"worker": WORKERS}, task_index="2")).task_index == 2


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "a-b.c_d", "[::1]", "[fe80::1]"])
def test_accepts_hosts(host):
    assert read(tf_config({"worker": [f"{host}:65535"]})).address == f"{host}:65535"


def test_one_host_may_run_several_tasks():
    assert read(tf_config({"worker": ["a:1", "a:2"], "ps": ["a:3"]})).num_workers == 2


# ---- what is refused, one mistake at a time

MISTAKES = {
    # cluster
    "cluster: expected an object": tf_config(["a:1"]),
    "cluster: expected a chief or a worker. Received: parameter servers only": tf_config(
        {"ps": ["a:1"]}, "ps"
    ),
    "cluster.worker: expected a list": tf_config({"worker": "a:1"}),
    "cluster.worker: expected at least one address": tf_config({"chief": ["a:1"], "worker": []},
                                                               "chief"),
    "cluster.chief: expected one address at most. Received: 2": tf_config(
        {"chief": ["a:1", "b:1"]}, "chief"
    ),
    "cluster.evaluator: expected one address at most": tf_config(
        {"worker": ["w:1"], "evaluator": ["a:1", "b:1"]}
    ),
    "cluster.trainer: expected one of chief, worker, ps, evaluator. Received: 'trainer'": tf_config(
        {"worker": ["a:1"], "trainer": ["b:1"]}
    ),
    "cluster.master: expected one of chief, worker, ps, evaluator. Received: 'master'. "
    "master is the old name of chief": tf_config({"worker": ["a:1"], "master": ["b:1"]}),
    # task
    "task: expected an object": tf_config({"worker": ["a:1"]}) | {"task": "worker"},
    'task: expected an object, {"type": ..., "index": ...}. Received: nothing': {
        "cluster": {"worker": ["a:1"]}
    },
    "task.type: expected one of chief, worker, ps, evaluator. Received: nothing": {
        "cluster": {"worker": ["a:1"]}, "task": {"index": 0}
    },
    "task.type: expected one of chief, worker, ps, evaluator. Received: 'Worker'": tf_config(
        {"worker": ["a:1"]}, "Worker"
    ),
    "task.type: expected one of chief, worker, ps, evaluator. Received: 'master'. "
    "master is the old name of chief": tf_config({"worker": ["a:1"]}, "master"),
    "task.type: expected a type that cluster lists (worker). Received: 'chief'": tf_config(
        {"worker": ["a:1"]}, "chief"
    ),
    "task.index: expected an integer from 0. Received: nothing": {
        "cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}
    },
    "task.index: expected an integer from 0. Received: -1": tf_config({"worker": ["a:1"]},
                                                                      task_index=-1),
    "task.index: expected an integer from 0. Received: '-1'": tf_config({"worker": ["a:1"]},
                                                                        task_index="-1"),
    "task.index: expected an integer from 0. Received: 0.0": tf_config({"worker": ["a:1"]},
                                                                       task_index=0.0),
    "task.index: expected an integer from 0. Received: True": tf_config({"worker": ["a:1"]},
                                                                        task_index=True),
    "task.index: expected an integer from 0. Received: None": tf_config({"worker": ["a:1"]},
                                                                        task_index=None),
    "task.index: expected an integer from 0. Received: 'one'": tf_config({"worker": ["a:1"]},
                                                                         task_index="one"),
    "task.index: expected an index below 1, the number of addresses in cluster.worker. "
    "Received: 1": tf_config({"worker": ["a:1"]}, task_index=1),
    # the rest
    "rpc_layer: expected a name": tf_config({"worker": ["a:1"]}, rpc_layer=1),
    'task.index: expected 0, as there is no "cluster". Received: 1': {
        "task": {"type": "worker", "index": 1}
    },
    "cluster: expected all addresses of the job. Received: \"sparseCluster\"": {
        "sparseCluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 0}
    },
}  # fmt: skip


@pytest.mark.parametrize("start", MISTAKES, ids=range(len(MISTAKES)))
def test_names_the_mistake(start):
    (problem,) = problems(MISTAKES[start])
    assert problem.startswith(start)


@pytest.mark.parametrize(
    "address",
    ["a", "a:", ":1", "a:0", "a:65536", "a:123456", "a:-1", "a:x", "a:١", "a b:1", "::1:2222",
     "[::1]", "[::g]:1", "[1::2::3]:1", "grpc://a:1", "a:1/x", "", None, 2222, ["a:1"]],
)  # fmt: skip
def test_names_a_malformed_address(address):
    (problem,) = problems(tf_config({"worker": ["ok:1", address]}))
    assert problem.startswith('cluster.worker.1: expected "host:port"')
    assert problem.endswith(f"Received: {address!r}.")


@pytest.mark.parametrize(
    "cluster, path, first",
    [
        ({"worker": ["a:1", "a:1"]}, "cluster.worker.1", "cluster.worker.0"),
        ({"worker": ["a:1"], "ps": ["b:1", "A:01"]}, "cluster.ps.1", "cluster.worker.0"),
        ({"worker": ["[::1]:1", "[0:0::1]:1"]}, "cluster.worker.1", "cluster.worker.0"),
    ],
)
def test_names_an_address_used_twice(cluster, path, first):
    (problem,) = problems(tf_config(cluster))
    assert problem.startswith(f"{path}: expected an address of its own for every task.")
    assert problem.endswith(f"which is also {first}.")


def test_shows_where_json_is_malformed():
    (problem,) = problems("{\"cluster\": {\n  'worker': []}}")
    assert "at line 2, column 3" in problem
    assert "before \"'worker': []}}\"" in problem
    assert "double quotes" in problem


@pytest.mark.parametrize("text", ["[1]", "3", '"worker"', "null"])
def test_refuses_json_that_is_no_object(text):
    (problem,) = problems(text)
    assert problem.startswith("expected an object")


def test_lists_all_mistakes_in_one_error():
    config = tf_config({"worker": ["a", "b:0", "c:1", "c:1"], "master": []}, "ps", "x", rpc_layer=0)
    with pytest.raises(ClusterConfigError) as info:
        read(config)
    paths = [problem.partition(":")[0] for problem in info.value.problems]
    assert paths == ["cluster.worker.0", "cluster.worker.1", "cluster.worker.3", "cluster.master",
                     "cluster.master", "task.type", "task.index", "rpc_layer"]  # fmt: skip
    message = str(info.value)
    assert message.startswith(f"TF_CONFIG={json.dumps(config)} has 8 mistakes:\n  - cluster.wor")
    assert len(message.splitlines()) == 9


def test_a_long_tf_config_is_shortened_in_the_error():
    config = tf_config({"worker": [f"w{i}:1" for i in range(500)]}, task_index=500)
    with pytest.raises(ClusterConfigError) as info:
        read(config)
    assert len(str(info.value)) < 800


# ---- the object


def test_building_it_wrongly_lists_all_mistakes():
    with pytest.raises(ClusterConfigError) as info:
        ClusterConfig(cluster={"worker": ["a"]}, task_type="worker", task_index=3)
    assert len(info.value.problems) == 2
    assert str(info.value).startswith("The cluster description has 2 mistakes:")
    with pytest.raises(ClusterConfigError, match="Received: an empty object"):
        ClusterConfig(cluster={}, task_type="evaluator", task_index=0)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"task": ' * 100_000,
        '{"task": {"index": %s}}' % ("9" * 5000),
        '{"task": {"index": "%s"}}' % ("9" * 5000),
        '{"cluster": {"worker": ["%s"]}}' % ("h" * 100_000),
        '"\ud800',
    ],
    ids=["lists", "objects", "digits", "digits in text", "address", "surrogate"],
)
def test_hostile_text_gets_an_error_that_can_be_printed(text):
    with pytest.raises(ClusterConfigError) as raised:
        read(text)
    assert len(str(raised.value).encode()) < 3000


def test_any_json_is_read_or_refused():
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    leaves |= st.sampled_from(["worker", "chief", "ps", "1.2.3.4:5", "[::1]:9", "9" * 5000])
    names = st.sampled_from(["worker", "chief", "evaluator", "type", "index", "other"])
    values = st.recursive(
        leaves,
        lambda nested: st.lists(nested, max_size=3) | st.dictionaries(names, nested, max_size=3),
        max_leaves=6,
    )
    parts = dict.fromkeys(["cluster", "task", "rpc_layer", "sparseCluster"], values)

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.fixed_dictionaries({}, optional=parts))
    def check(config):
        with contextlib.suppress(ClusterConfigError):
            read(json.dumps(config))

    check()


def test_is_frozen():
    config = read(tf_config({"worker": WORKERS}))
    with pytest.raises(ValueError, match="frozen"):
        config.task_index = 1


@pytest.mark.parametrize("rpc_layer", [None, "grpc"])
def test_to_tf_config_reads_back_equal(rpc_layer):
    config = ClusterConfig(
        cluster={"chief": ["c:1"], "worker": ["[::1]:2"]},
        task_type="worker",
        task_index=0,
        rpc_layer=rpc_layer,
    )
    assert read(config.to_tf_config()) == config
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_error_can_cross_processes():
    error = ClusterConfigError(["task: expected this. Received: that."], source="TF_CONFIG=x")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.problems) == (str(error), error.problems)


def test_cluster_resolver_says_the_same_as_the_config():
    config = read(tf_config({"chief": ["c:1"], "worker": ["w:1"]}, "worker", rpc_layer="grpc"))
    resolver = config.cluster_resolver()
    assert resolver.cluster_spec().as_dict() == {"chief": ["c:1"], "worker": ["w:1"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
    assert set(resolver.num_accelerators()) == {"GPU"}


def test_cluster_resolver_leaves_the_context_uninitialized():
    source = """
import tensorflow as tf
from tfparallel.coordination.cluster import ClusterConfig
ClusterConfig(cluster={"worker": ["a:1"]}, task_type="worker", task_index=0).cluster_resolver()
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
assert len(tf.config.list_logical_devices("CPU")) == 3
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_importing_it_does_not_import_tensorflow():
    source = "import sys, tfparallel.coordination.cluster; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True)
