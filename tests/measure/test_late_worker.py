"""A worker that is late by a known delay: the job's goodput says that it was waited for."""

import os
import subprocess
import sys

import pytest

from tests.multi_process.pool import REPOSITORY, cluster_environments
from tfparallel.measure.goodput import goodput, read_ledger

LATE_S, LATE_AGAIN_S = 2.5, 1.5

# Rank 1 comes so long after rank 0 has begun to wait, whatever the machine is doing.
WORKER = """
import json, os, sys, time
from pathlib import Path
import keras
import numpy as np
import tfparallel

folder, late_s, late_again_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def meet(name, seconds):
    if rank == 0:
        (folder / name).touch()
        return time.monotonic()
    while not (folder / name).exists():
        time.sleep(0.01)
    time.sleep(seconds)

began = meet("constructs", late_s)
strategy = tfparallel.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
meet("fits", late_again_s)
x = np.ones((16, 4), "float32")
class Begun(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.at = time.monotonic()
begun = Begun()
measure = tfparallel.callbacks.Measure(folder / "measure", verbose=0)
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[begun, measure])
if rank == 0:
    (folder / "most").write_text(str(begun.at - began))
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[measure])  # waits for nobody
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_a_late_worker_costs_is_named(tmp_path):
    arguments = [sys.executable, "-c", WORKER, str(tmp_path), str(LATE_S), str(LATE_AGAIN_S)]
    processes = [
        subprocess.Popen(
            arguments,
            env={**environment, "PYTHONPATH": str(REPOSITORY)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments()
    ]
    for process in processes:
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
    lines = read_ledger(tmp_path / "measure")
    first = goodput([line for line in lines if line["run"] == 0])
    waited_s = first.lost_s["waiting for workers"]
    assert LATE_S + LATE_AGAIN_S <= waited_s <= float((tmp_path / "most").read_text())
    assert first.productive_s + sum(first.lost_s.values()) == pytest.approx(first.wall_s, rel=5e-3)
    assert first.lost_s["start"] <= first.wall_s - waited_s
    second = [line for line in lines if line["run"] == 1]
    assert second[-1]["seconds"]["waiting for workers"] < LATE_AGAIN_S  # not told again
    assert goodput(lines).lost_s["waiting for workers"] >= waited_s


def environments():
    own = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return [{**own, **each} for each in cluster_environments(2)]
