"""Jobs on a real Slurm: munged, slurmctld and slurmd of Debian, on this machine."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launch.jobs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000
PartitionName=p Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""

# This machine's own network: nobody else is on it.
_CLOSED = ("--env", "TFPARALLEL_INSECURE_NETWORK=1")

# Trains under the strategy that its argument names, and saves what a single device would have.
TRAIN = """
import os, sys
import keras
import numpy as np
import tfparallel

name, result = sys.argv[1:]
strategies = {
    "one_device": lambda: tfparallel.OneDeviceStrategy("CPU:0"),
    "multi_worker": tfparallel.MultiWorkerMirroredStrategy,
    "servers": lambda: tfparallel.ParameterServerStrategy(mode="sync"),
}
strategy = strategies[name]()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
with strategy.scope():
    hidden = keras.layers.Dense(8, "tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, x.sum(1), batch_size=12, epochs=2, shuffle=False, verbose=0)
weights = model.get_weights()
if strategy.is_chief:
    np.savez(result, *weights)
print("trained", os.environ.get("SLURM_PROCID"), flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of one node; how to run a command in it."""
    missing = [tool for tool in (*DAEMONS, "sbatch") if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root and slurm (apt-get install slurm-wlm munge): {missing} missing")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o700)
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(
        folder=folder, host=host, controller=free_port(), daemon=free_port()))  # fmt: skip
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir()
    for name, module in (("tfparallel", "-m tfparallel"), ("python", "")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        program.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TF_CONFIG"))}
    env |= {
        "SLURM_CONF": str(config),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    munged = ["munged", "-F", "--force", f"--socket={folder}/munge.sock"]
    for what in ("key", "log", "pid", "seed"):
        munged.append(f"--{what}-file={folder}/{what}")
    started = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            with open(folder / f"{command[0]}.out", "wb") as log:
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            time.sleep(1)
        wait_until(lambda: "idle" in output(["sinfo", "-h", "-o", "%T"], env), 60, folder)
        yield env
    finally:
        subprocess.run(["scancel", "--state=RUNNING", "--signal=KILL", "--full"], env=env)
        time.sleep(2)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def output(command: list[str], env: dict) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def wait_until(condition, seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.out")}
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


def submit(env: dict, folder: Path, options: list[str], *arguments: str) -> str:
    """Submits what `tfparallel manifest slurm` prints; the job's state and output at its end."""
    (folder / "train.py").write_text(TRAIN)
    manifest = ["tfparallel", "manifest", "slurm", "--cpus", "1", "--memory", "1Gi", *options]
    script = subprocess.run(
        [*manifest, "train.py", *arguments], env=env, cwd=folder, check=True,
        capture_output=True, text=True).stdout  # fmt: skip
    (folder / "job.sh").write_text(script)
    sbatch = ["sbatch", "--parsable", "--output=job.out", "job.sh"]
    job = subprocess.run(sbatch, env=env, cwd=folder, check=True, capture_output=True, text=True)
    show = ["scontrol", "show", "job", job.stdout.strip()]
    ended = ("JobState=COMPLETED", "JobState=FAILED", "JobState=CANCELLED", "JobState=TIMEOUT")
    wait_until(lambda: any(state in output(show, env) for state in ended), 300, folder)
    assert "JobState=COMPLETED" in output(show, env), (folder / "job.out").read_text()
    return (folder / "job.out").read_text()


def weights(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def trained_without_slurm(folder: Path) -> list[np.ndarray]:
    """The same script, in a process that is no job."""
    (folder / "train.py").write_text(TRAIN)
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py", "one_device", "expected.npz"]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return weights(folder / "expected.npz")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("one_device", []),
        ("multi_worker", ["--workers", "2"]),
        ("servers", ["--workers", "2", "--ps", "1", *_CLOSED]),
        ("servers", ["--workers", "1", "--ps", "1"]),
    ],
)
def test_a_job_trains_to_the_weights_of_one_device(slurm, tmp_path, strategy, options):
    out = submit(slurm, tmp_path, options, strategy, "result.npz")
    if strategy == "multi_worker":
        assert "trained 0" in out and "trained 1" in out  # both tasks of Slurm
    received, expected = weights(tmp_path / "result.npz"), trained_without_slurm(tmp_path)
    for mine, one_device in zip(received, expected, strict=True):
        np.testing.assert_allclose(mine, one_device, rtol=1e-5, atol=1e-6)
