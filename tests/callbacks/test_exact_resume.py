"""A run that is killed, and restarted, ends with the bits of the run that was not.

Several replicas add up in parallel, whose rounding is not always the same: 1e-6 is allowed there.
"""

import random

import numpy as np
import pytest

from tests.callbacks.zygote import Zygote

# (training, batches after which each process in turn kills itself, allowed difference)
TRAININGS = [
    ("plain_arrays", [3, 5], 0),
    ("plain_dataset", [4, 7], 0),
    ("one_device_py_dataset", [2, 7], 0),
    ("mirrored_arrays", [4, 6], 1e-6),
    ("central_dataset", [2, 3], 1e-6),
    ("plain_generator", [6], 0),
    ("mirrored_resumable_generator", [3, 6], 1e-6),
]


@pytest.fixture(scope="module")
def zygote():
    started = Zygote()
    yield started
    started.close()


@pytest.mark.parametrize(("training", "kills", "atol"), TRAININGS)
def test_killed_run_ends_as_the_uninterrupted_one(zygote, tmp_path, training, kills, atol):
    backups = tmp_path / "backups"
    assert zygote.run(training, "", tmp_path / "expected.npz", 0) == 0, zygote.log()
    for kill_at in kills:
        assert zygote.run(training, backups, tmp_path / "received.npz", kill_at) == -9, zygote.log()
    assert zygote.run(training, backups, tmp_path / "received.npz", 0) == 0, zygote.log()
    assert_equal_results(tmp_path / "expected.npz", tmp_path / "received.npz", atol)
    assert not backups.exists()


def test_killed_at_random_times(zygote, tmp_path):
    """Most of the time of such a tiny training goes into saving: so do most of the kills."""
    training, backups, received = "plain_arrays", tmp_path / "backups", tmp_path / "received.npz"
    assert zygote.run(training, "", tmp_path / "expected.npz", 0) == 0
    draw = random.Random(0)
    statuses = []
    while len(statuses) < 5 and 0 not in statuses:
        delay = draw.uniform(1.0, 3.0)
        statuses.append(zygote.run(training, backups, received, 0, kill_after_s=delay))
    if 0 not in statuses:
        assert zygote.run(training, backups, received, 0) == 0
    assert -9 in statuses
    assert_equal_results(tmp_path / "expected.npz", received)


def assert_equal_results(expected_path, received_path, atol=0.0):
    expected, received = np.load(expected_path), np.load(received_path)
    assert sorted(expected) == sorted(received)
    pairs = {name: (expected[name], received[name]) for name in expected}
    differing = {n: p for n, p in pairs.items() if not np.allclose(*p, rtol=0, atol=atol)}
    assert not differing
