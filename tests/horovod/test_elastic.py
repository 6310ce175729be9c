"""Real `horovodrun`: a training whose ranks die, return or are added goes on from its backup."""

import itertools
import re

import keras
import numpy as np
import pytest

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")

from tests.horovod.launching import horovodrun, run_program
from tests.horovod.resumable import BATCHES, SAVE_FREQ, compiled_model, fit
from tests.multi_process.pool import REPOSITORY

pytestmark = pytest.mark.turns

KILL_AT, ADD_AT = 9, 13


@pytest.fixture(scope="module")
def undisturbed():
    """Losses and weights of one device."""
    keras.backend.clear_session()
    return fit(compiled_model())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_example_trains_as_its_first_lines_say(monkeypatch, tmp_path):
    (tmp_path / "hosts").write_text("localhost:2\n")
    monkeypatch.setenv("HOSTS_FILE", str(tmp_path / "hosts"))
    options = ["--min-np", "1", "--max-np", "4", "--network-interface", "lo"]
    options += ["--host-discovery-script", str(REPOSITORY / "examples" / "discover_hosts.sh")]
    program = [str(REPOSITORY / "examples" / "elastic.py"), str(tmp_path / "backups")]
    status, output = run_program(program, 2, options)
    assert status == 0, output
    assert {"rank 0 of 2", "rank 1 of 2"} == set(re.findall(r"rank \d of \d", output)), output
    accuracies = [float(each) for each in re.findall(r"- accuracy: ([\d.]+)", output)]
    assert len(accuracies) == 5 and accuracies[-1] > 0.9 > accuracies[0], output


def results(folder):
    return list(np.load(folder / "results.npz").values())


def logs(folder):
    """What each process has trained: `[(batch, rank, world_size), ...]`, by file."""
    return [np.loadtxt(log, int, ndmin=2).tolist() for log in folder.glob("batches-*")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_that_is_started_again_ends_as_the_undisturbed_one(tmp_path, undisturbed):
    status, output = horovodrun("resumable", tmp_path, KILL_AT)
    assert status != 0 and "trained" not in output, output
    assert "Process 1 exit with status code 137" in output, output
    status, output = horovodrun("resumable", tmp_path, KILL_AT)
    assert status == 0, output
    begins = sorted(log[0][0] for log in logs(tmp_path))
    assert begins[:2] == [0, 0] and begins[2] == begins[3] >= SAVE_FREQ
    for expected, received in zip(undisturbed, results(tmp_path), strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-5)


@pytest.mark.timeout(600)
def test_a_job_goes_on_when_a_rank_is_killed_and_when_one_is_added(
    monkeypatch, tmp_path, undisturbed
):
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    monkeypatch.setenv("HOSTS_FILE", str(tmp_path / "hosts"))
    script = str(REPOSITORY / "examples" / "discover_hosts.sh")
    options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", script]
    options += ["--network-interface", "lo"]
    status, output = horovodrun("resumable", tmp_path, KILL_AT, ADD_AT, options=options)
    assert status == 0, output
    assert output.count("trained 2") == 2 and "trained 1" not in output, output
    (added,) = [log for log in logs(tmp_path) if log[0][0] > 0]
    assert {size for _, _, size in added} == {2}
    (survivor,) = [log for log in logs(tmp_path) if 1 in {size for _, _, size in log}]
    assert [size for size, _ in itertools.groupby(size for _, _, size in survivor)] == [2, 1, 2]
    assert_little_is_repeated([batch for batch, _, _ in survivor])
    for expected, received in zip(undisturbed, results(tmp_path), strict=True):
        # Sums over two ranks travel as float16, those of one are exact.
        np.testing.assert_allclose(received, expected, atol=1e-3)


def assert_little_is_repeated(batches):
    """All were trained, and at a disturbance not more than those since a backup once more."""
    assert set(batches) == set(range(BATCHES))
    for before, after in itertools.pairwise(batches):
        # A backup that was being written when the job was disturbed does not count either.
        assert before + 1 - 2 * SAVE_FREQ <= after <= before + 1
