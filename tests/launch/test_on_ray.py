"""A script on the workers of a Ray cluster of this machine."""

import json
import os
import subprocess
import sys

import pytest

from tests.launch.jobs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SHOW = """
import json, os, sys
config = json.loads(os.environ.get("TF_CONFIG", "null"))
print(json.dumps([sys.argv[1:], config]), flush=True)
sys.exit(3 if "fail" in sys.argv and config["task"]["index"] == 1 else 0)
"""
TRAIN = """
from tests.launch.trained_by_workers import losses_of_training
workers, losses = losses_of_training()
print("loss", workers, losses[-1], flush=True)
"""


def run(tmp_path, source: str, *arguments: str) -> subprocess.CompletedProcess:
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "job.py").write_text(source)
    options = [argument for argument in arguments if argument.startswith("--")]
    others = [argument for argument in arguments if not argument.startswith("--")]
    command = [sys.executable, "-m", "tfparallel.launch.on_ray", *options, str(tmp_path / "job.py")]
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run([*command, *others], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=240)  # fmt: skip


def test_every_process_has_its_place(tmp_path):
    ran = run(tmp_path, SHOW, "--chief=1", "--worker=2", "--ps=1", "--cpus=0.1", "a b")
    assert ran.returncode == 0, ran.stderr
    lines = [line[line.index("[[") :] for line in ran.stdout.splitlines() if "[[" in line]
    found = [json.loads(line) for line in lines]
    assert {tuple(arguments) for arguments, _ in found} == {("a b",)}
    tasks = {(config["task"]["type"], config["task"]["index"]) for _, config in found}
    assert tasks == {("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)}
    (cluster,) = {json.dumps(config["cluster"]) for _, config in found}
    addresses = [address for each in json.loads(cluster).values() for address in each]
    assert len(set(addresses)) == 4


def test_the_first_failure_is_the_jobs(tmp_path):
    assert run(tmp_path, SHOW, "--worker=2", "--cpus=0.1", "fail").returncode == 3


def test_two_workers_train_as_one(tmp_path):
    two = run(tmp_path, TRAIN, "--worker=2", "--cpus=0.5")
    one = run(tmp_path, TRAIN, "--worker=1", "--cpus=0.5")
    assert (two.returncode, one.returncode) == (0, 0), two.stderr + one.stderr
    losses = [line.split("loss ")[1] for line in (two.stdout + one.stdout).splitlines()
              if "loss " in line]  # fmt: skip
    assert len(losses) == 3 and {line.split()[0] for line in losses} == {"1", "2"}
    values = [float(line.split()[1]) for line in losses]
    assert values == pytest.approx([values[-1]] * 3, rel=1e-5)
