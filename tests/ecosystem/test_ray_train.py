"""Ray Train's TensorFlow trainer, with one line changed: the strategy is ours.

After https://docs.ray.io/en/latest/train/distributed-tensorflow-keras.html
"""

import json
import os
import subprocess
import sys

import pytest

from tests.launch.jobs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1300)]

EXAMPLE = """
import json, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    from ray.train import get_context

    from tests.launch.trained_by_workers import losses_of_training

    rank = get_context().get_world_rank()
    with open(f"{config['folder']}/{config['workers']}-{rank}.json", "w") as file:
        json.dump(losses_of_training(), file)


if __name__ == "__main__":
    folder, workers = sys.argv[1], int(sys.argv[2])
    TensorflowTrainer(
        train,
        train_loop_config={"folder": folder, "workers": workers},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=folder),
    ).fit()
"""


def losses(folder, workers: int) -> list[list[float]]:
    (folder / "example.py").write_text(EXAMPLE)
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
    # On two busy cores Ray's processes take minutes to import what they need, and it gives up and
    # begins anew after one.
    env |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "500"}
    command = [sys.executable, "example.py", str(folder), str(workers)]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = [json.loads((folder / f"{workers}-{rank}.json").read_text()) for rank in range(workers)]
    assert {count for count, _ in found} == {workers}
    return [loss for _, loss in found]


def test_two_workers_of_ray_train_as_one(tmp_path):
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    (one,) = losses(tmp_path, 1)
    for of_a_worker in losses(tmp_path, 2):
        assert of_a_worker == pytest.approx(one, rel=1e-5)
