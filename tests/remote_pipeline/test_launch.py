"""`tfparallel launch --workers`: one script in every process of a pipeline."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.parameter_server.spawner import REPOSITORY, process_environment
from tfparallel import PipelineStrategy
from tfparallel.coordination.cluster import ClusterConfigError

pytestmark = pytest.mark.turns

SCRIPT = """
import keras, numpy as np, tfparallel
strategy = tfparallel.PipelineStrategy(num_microbatches=4)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(np.ones((16, 6)), np.ones((16, 3)), batch_size=8, epochs=2, verbose=0)
print("ITERATIONS", int(model.optimizer.iterations.numpy()))
"""
SPEC = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}


def test_the_same_script_runs_in_every_process_and_all_end_with_status_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", "--standalone", "--workers", "2", script],
        env=process_environment({}),
        capture_output=True,
        text=True,
        timeout=120.0,
        cwd=REPOSITORY,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    said = [line for line in job.stdout.splitlines() if "ITERATIONS" in line]
    assert said == ["[worker 0] ITERATIONS 4"]


def resolver(spec, task_type="worker", task_id=0):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type=task_type, task_id=task_id
    )


def test_addresses_that_other_machines_reach_are_refused(monkeypatch):
    cluster = {"worker": ["10.0.0.1:4001", "10.0.0.2:4001"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="insecure_network=True"):
        PipelineStrategy()


def test_all_mistakes_in_tf_config_are_listed(monkeypatch):
    config = {"cluster": {"worker": ["127.0.0.1:4001"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterConfigError, match="index below 1"):
        PipelineStrategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((resolver({**SPEC, "ps": ["127.0.0.1:4003"]}),), "a cluster with ps"),
        ((resolver(SPEC, None, None),), "which task this process is"),
        ((resolver(SPEC), ["CPU:0"]), r"devices=\['CPU:0'\] and a cluster_resolver"),
    ],
    ids=["ps", "no task", "devices too"],
)
def test_other_clusters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(*arguments[1:], cluster_resolver=arguments[0])


def test_a_cluster_of_one_is_this_process():
    strategy = PipelineStrategy(cluster_resolver=resolver({"worker": ["127.0.0.1:4001"]}))
    assert all("localhost" in device for device in strategy.extended._stage_devices)
