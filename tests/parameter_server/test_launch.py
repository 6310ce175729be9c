"""`tfparallel launch --ps`: one script in every role."""

import json
import os
import subprocess
import sys

import pytest

from tests.parameter_server.spawner import REPOSITORY, process_environment
from tfparallel.launch.roles import count_roles

pytestmark = pytest.mark.turns

SCRIPT = """
import sys
import keras, numpy as np, tfparallel
from tfparallel.parameter_server import CheckpointsForEvaluator, evaluate_checkpoints, is_evaluator
folder = sys.argv[1]

def make_model(mode):
    strategy = tfparallel.ParameterServerStrategy(mode=mode)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model

model = make_model("async")
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
y = x.sum(1, keepdims=True)
if is_evaluator():
    for line in evaluate_checkpoints(model, x, folder, y=y):
        print("EVALUATED", line["step"])
else:
    synchronous = make_model("sync")
    synchronous.fit(x, y, batch_size=16, verbose=0)
    print("SYNC", int(synchronous.optimizer.iterations.numpy()))
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[CheckpointsForEvaluator(folder)])
    print("LAST", model.evaluate(x, y, verbose=0)[0])
"""


def _launch(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", "--standalone", *arguments],
        env=process_environment({}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPOSITORY,
    )


def test_the_same_script_runs_in_every_role_and_all_end_with_status_0(tmp_path):
    """In both modes; the evaluator evaluates each checkpoint once, and ends."""
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    folder.mkdir()
    (folder / "ended").touch()  # of an earlier training
    os.utime(folder / "ended", (0, 0))
    known = {"step": 4, "checkpoint": "00000004.weights.h5", "loss": 0.0}
    (folder / "evaluations.jsonl").write_text(json.dumps(known) + "\n")  # evaluated before
    job = _launch("--workers", "2", "--ps", "2", "--evaluator", str(script), str(folder))
    assert job.returncode == 0, job.stderr[-3000:]
    lines = job.stdout.splitlines()
    assert [line for line in lines if "SYNC" in line] == ["[chief 0] SYNC 4"]
    said = [line for line in lines if "EVALUATED" in line]
    assert said == ["[evaluator 0] EVALUATED 8", "[evaluator 0] EVALUATED 12"]
    (last,) = [float(line.split()[-1]) for line in lines if "[chief 0] LAST" in line]
    assert "127.0.0.1" not in " ".join(job.args)

    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    assert [line["step"] for line in evaluations] == [4, 8, 12]
    assert evaluations[-1]["loss"] == pytest.approx(last, rel=1e-5)
    assert evaluations[-1]["mae"] < evaluations[1]["mae"]
    assert _summaries(folder) == {("evaluation_loss", 8), ("evaluation_loss", 12)} | {
        ("evaluation_mae", 8),
        ("evaluation_mae", 12),
    }


def _summaries(folder) -> set:
    import tensorflow as tf

    (path,) = folder.glob("events.*")
    events = tf.compat.v1.train.summary_iterator(str(path))
    return {(value.tag, event.step) for event in events for value in event.summary.value}


def test_evaluator_needs_parameter_servers():
    job = _launch("--workers", "2", "--evaluator", "train.py")
    assert job.returncode == 2
    assert "--evaluator expects parameter servers" in job.stderr


def test_a_job_with_parameter_servers_has_one_chief():
    counts = {role.name: count for role, count in count_roles(3, 2, evaluator=True).items()}
    assert counts == {"chief": 1, "worker": 3, "ps": 2, "evaluator": 1}
    assert {role.name: count for role, count in count_roles(3).items()} == {"worker": 3}
