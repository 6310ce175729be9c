"""`tfparallel launch --ps`: one script in every role."""

import subprocess
import sys

import pytest

from tests.parameter_server.spawner import REPOSITORY, process_environment
from tfparallel.launch.roles import count_roles

SCRIPT = """
import keras, numpy as np, tfparallel
strategy = tfparallel.ParameterServerStrategy(mode="{mode}")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(np.ones((60, 6)), np.ones((60, 3)), batch_size=8, epochs=2, verbose=0)
print("ITERATIONS", int(model.optimizer.iterations.numpy()))
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


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_same_script_runs_in_every_role_and_all_end_with_status_0(tmp_path, mode):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(mode=mode))
    job = _launch("--workers", "2", "--ps", "2", str(script))
    assert job.returncode == 0, job.stderr[-3000:]
    said = [line for line in job.stdout.splitlines() if "ITERATIONS" in line]
    assert said == ["[chief 0] ITERATIONS 16"]
    assert "127.0.0.1" not in " ".join(job.args)


def test_evaluator_needs_parameter_servers():
    job = _launch("--workers", "2", "--evaluator", "train.py")
    assert job.returncode == 2
    assert "--evaluator expects parameter servers" in job.stderr


def test_a_job_with_parameter_servers_has_one_chief():
    counts = {role.name: count for role, count in count_roles(3, 2, evaluator=True).items()}
    assert counts == {"chief": 1, "worker": 3, "ps": 2, "evaluator": 1}
    assert {role.name: count for role, count in count_roles(3).items()} == {"worker": 3}
