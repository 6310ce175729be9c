"""What `tfparallel selftest` times of models of users' sizes, at sizes of a machine without GPU."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tfparallel.selftest import job_checks, throughput_checks
from tfparallel.selftest.machine_checks import is_all_nvlink
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.throughput_checks import judge_throughput
from tfparallel.selftest.verdicts import CheckFailedError
from tfparallel.selftest.workloads import WORKLOADS

SMALL = {
    "_IMAGE": (32, 32, 3),
    "_CLASSES": 4,
    "_TOKENS": 16,
    "_LENGTH": 6,
    "_BLOCKS": 1,
    "_HEADS": 2,
    "_WIDTH": 4,
}


# The same models with a few weights, and few steps; types of users' are kept.
IMPORTS = "from tfparallel.selftest import speed_checks, throughput_checks, workloads\n"
CHANGES = "".join(f"workloads.{name} = {value!r}\n" for name, value in SMALL.items())
CHANGES += "speed_checks.STEPS = throughput_checks.STEPS = 2\n"
ALONE = f"""
import json
import keras
from tfparallel.selftest.machine_devices import Bench
{IMPORTS}{CHANGES}
found = throughput_checks.measure_alone(Bench((), "."), "gpt").figures
print(json.dumps([found, keras.config.dtype_policy().name]))
"""


def test_models_are_of_the_size_that_is_said():
    gpt, resnet = (WORKLOADS[name].build() for name in ("gpt", "resnet50"))
    assert 130e6 < gpt.count_params() < 140e6
    assert 25e6 < resnet.count_params() < 26e6


@pytest.mark.turns
def test_a_process_times_one_device_and_all_of_them(tmp_path):
    """In a process of its own, as stock strategies of one process count collectives alike."""
    command = [sys.executable, "-c", ALONE]
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env=Bench((), str(tmp_path)).environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found, policy = json.loads(told.stdout.splitlines()[-1])
    assert list(found) == ["keras", "one_device", "mirrored", "stock mirrored"]
    assert all(np.isfinite(rows) and rows > 0 for rows in found.values())
    assert policy == "mixed_bfloat16"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_process_is_timed_beside_its_stock_loop(tmp_path, monkeypatch):
    """With modules of the package changed in each process, as it starts."""
    bench = Bench((), str(tmp_path))
    (tmp_path / "small_check.py").write_text(
        "import sys\nfrom tfparallel.selftest import one_check\n"
        f"{IMPORTS}{CHANGES}sys.exit(one_check.main(*sys.argv[1:]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(job_checks, "_ONE_CHECK", "small_check")
    monkeypatch.setattr(throughput_checks, "_LEAST_OF_STOCK", 0.0)
    found = throughput_checks.compare_throughput(bench, "gpt").figures
    of_jobs = {"multi_worker_mirrored", "stock multi_worker_mirrored"}
    assert of_jobs <= found.keys() and "efficiency" in found
    assert found.keys() >= {"horovod", "stock horovod"} or "horovod" not in found


RATES = {"keras": 120.0, "one_device": 100.0, "mirrored": 340.0, "stock mirrored": 350.0}


def test_rows_a_second_are_held_against_stock_and_one_gpu():
    passed = judge_throughput(RATES, 4, has_nvlink=True)
    assert passed.text.endswith("stock mirrored 350; 85% of 4 times one GPU")
    assert passed.figures["efficiency"] == 0.85
    with pytest.raises(CheckFailedError, match="stock mirrored 400"):
        judge_throughput({**RATES, "stock mirrored": 400.0}, 4, has_nvlink=True)
    with pytest.raises(CheckFailedError, match="horovod 80, stock horovod 100"):
        slow = {**RATES, "horovod": 80.0, "stock horovod": 100.0}
        judge_throughput(slow, 4, has_nvlink=False)
    few = {**RATES, "mirrored": 320.0}
    with pytest.raises(CheckFailedError, match="80% of 4"):
        judge_throughput(few, 4, has_nvlink=True)
    assert judge_throughput(few, 4, has_nvlink=False)


LINKS = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55\t0
GPU1\tNV18\t X \tSYS\t56-111\t1
NIC0\tPIX\tSYS\t X \t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_nvlink_is_between_all_gpus():
    assert is_all_nvlink(LINKS)
    assert not is_all_nvlink(LINKS.replace("NV18", "PHB"))
