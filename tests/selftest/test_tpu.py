"""What `tfparallel selftest` asks of a TPU, of logical CPUs that stand in for its cores."""

import numpy as np
import pytest

import tfparallel
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.selftest import tpu_checks
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.tpu_checks import check_same_weights, judge_tpu
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError

pytestmark = pytest.mark.turns


@pytest.fixture(autouse=True)
def _opened(monkeypatch):
    monkeypatch.setattr(tpu_checks, "open_devices", lambda: None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cores_that_train_as_the_host_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(tfparallel, "TPUStrategy", CpuStrategy)
    found = tpu_checks.train_on_tpu(Bench((), str(tmp_path)))
    assert found.text.startswith("2 cores; trainings: 5; at most")
    assert max(found.figures.values()) < 1e-5


def test_a_machine_without_a_tpu_is_skipped(tmp_path):
    with pytest.raises(CheckSkippedError, match="TPUStrategy looked for"):
        tpu_checks.train_on_tpu(Bench((), str(tmp_path)))


def test_another_ending_and_other_weights_fail():
    assert judge_tpu({"mlp": 1e-3}).figures == {"mlp": 1e-3}
    for wrong in (0.02, float("nan")):
        with pytest.raises(CheckFailedError, match="differs from the host: cnn by"):
            judge_tpu({"mlp": 1e-3, "cnn": wrong})
    check_same_weights([np.ones(2)], [np.ones(2)])
    with pytest.raises(CheckFailedError, match="weight 1"):
        check_same_weights([np.ones(2), np.ones(2)], [np.ones(2), np.ones(2) * 2])
