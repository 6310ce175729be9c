"""A run that is killed, and restarted, ends with the bits of the run that was not.

Several replicas add up in parallel, whose rounding is not always the same: 1e-6 is allowed there.
"""

import re

import pytest

from tests.callbacks.kill_many import kill_many
from tests.callbacks.results import assert_equal_results
from tests.callbacks.zygote import Zygote

pytestmark = pytest.mark.turns

# (training, batches after which each process in turn kills itself, allowed difference)
# "ps 6" kills a parameter server, "worker 5" a worker that has a part of every batch: the chief
# then fails.
TRAININGS = [
    ("plain_arrays", [3, 5], 0),
    ("plain_dataset", [4, 7], 0),
    ("one_device_py_dataset", [7], 0),
    ("mirrored_arrays", [4], 1e-6),
    pytest.param("central_dataset", [3], 1e-6, marks=pytest.mark.long),
    ("pipeline_arrays", [6], 1e-6),
    ("parameter_server", [3, "worker 5", "ps 7"], 1e-6),
    ("parameter_server_async", [5], 1e-6),
    pytest.param("parameter_server_dataset", [3, 6], 1e-6, marks=pytest.mark.long),
    pytest.param("parameter_server_async_dataset", [5, 4], 1e-6, marks=pytest.mark.long),
    ("plain_generator", [6], 0),
    ("mirrored_resumable_generator", [6], 1e-6),
    ("plain_gan", [3], 0),
    pytest.param("mirrored_gan", [5], 1e-6, marks=pytest.mark.long),
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
        status = zygote.run(training, backups, tmp_path / "received.npz", kill_at)
        assert status == (1 if " " in str(kill_at) else -9), zygote.log()
    assert zygote.run(training, backups, tmp_path / "received.npz", 0) == 0, zygote.log()
    assert_equal_results(tmp_path / "expected.npz", tmp_path / "received.npz", atol)
    assert not backups.exists()


@pytest.mark.parametrize(
    ("training", "hash_of_next"),
    [
        ("parameter_server", "[0-9a-f]{16}"),
        ("parameter_server_async_dataset", "[0-9a-f]{16}@2"),
        pytest.param("parameter_server_async", "[0-9a-f]{16}", marks=pytest.mark.long),
        pytest.param("parameter_server_dataset", "[0-9a-f]{16}@2", marks=pytest.mark.long),
    ],
)
def test_other_data_than_those_of_the_backup_are_found(zygote, tmp_path, training, hash_of_next):
    backups, results = tmp_path / "backups", tmp_path / "results.npz"
    assert zygote.run(training, backups, results, 7) == -9, zygote.log()
    assert zygote.run(f"{training}_other", backups, results, 0) == 1, zygote.log()
    expected = rf"BackupError: .*Expected: next a batch with hash {hash_of_next}\. Received: "
    assert re.search(expected, zygote.log())
    assert zygote.run(training, backups, results, 0) == 0, zygote.log()


@pytest.mark.timeout(200)
def test_of_two_trainings_in_one_folder_one_ends_with_the_name_of_the_other(zygote, tmp_path):
    """The one that stays is not disturbed."""
    backups, training = tmp_path / "backups", "impatient_arrays"
    assert zygote.run(training, "", tmp_path / "expected.npz", 0) == 0, zygote.log()
    calls = [(backups, tmp_path / f"{i}.npz", 0) for i in (0, 1)]
    statuses = zygote.run_together(training, calls)
    assert sorted(statuses) == [0, 1], zygote.log()
    assert re.search(r"LeaseError: .*in use by process \d+ on host .*, job '", zygote.log())
    assert_equal_results(tmp_path / "expected.npz", tmp_path / f"{statuses.index(0)}.npz")
    assert not backups.exists()


def test_killed_at_random_times(zygote, tmp_path):
    """Mostly inside a save. `python -m tests.callbacks.kill_many` does it 200 times."""
    kill_many(zygote, tmp_path, kills=5, training="eager_arrays", seed=0)
