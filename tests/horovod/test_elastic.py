"""Real `horovodrun`: a training whose ranks die, return or are added goes on from its backup."""

import numpy as np
import pytest

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")

from tests.horovod.launching import horovodrun
from tests.horovod.resumable import BATCHES, SAVE_FREQ
from tests.multi_process.pool import REPOSITORY

NEVER = 1000


def results(folder):
    return list(np.load(folder / "results.npz").values())


def elastic(monkeypatch, folder, kill_at, add_at, hosts, num_ranks):
    """The output of an elastic job that succeeds."""
    (folder / "hosts").write_text(hosts)
    script = str(REPOSITORY / "examples" / "discover_hosts.sh")
    options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", script]
    options += ["--network-interface", "lo"]
    monkeypatch.setenv("HOSTS_FILE", str(folder / "hosts"))
    status, output = horovodrun(
        "resumable", folder, kill_at, add_at, num_ranks=num_ranks, options=options
    )
    assert status == 0, output
    return output


def batches(folder):
    """What each process has trained: `[(batch, rank, world_size), ...]`, the longest log first."""
    logs = [np.loadtxt(log, int, ndmin=2).tolist() for log in folder.glob("batches-*")]
    return sorted(logs, key=len, reverse=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    status, output = horovodrun("resumable", folder, NEVER)
    assert status == 0, output
    return results(folder)


@pytest.mark.timeout(600)
def test_a_job_that_is_started_again_ends_as_the_undisturbed_one(tmp_path, undisturbed):
    status, output = horovodrun("resumable", tmp_path, 9)
    assert status != 0 and "trained" not in output, output
    status, output = horovodrun("resumable", tmp_path, 9)
    assert status == 0, output
    begins = sorted(log[0][0] for log in batches(tmp_path))
    assert begins[:2] == [0, 0] and begins[2] == begins[3] >= SAVE_FREQ
    for expected, received in zip(undisturbed, results(tmp_path), strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-6)


@pytest.mark.timeout(600)
def test_the_others_go_on_without_a_rank_that_is_killed(monkeypatch, tmp_path, undisturbed):
    output = elastic(monkeypatch, tmp_path, 9, NEVER, "localhost:1\n127.0.0.1:1\n", num_ranks=2)
    survivor, _ = batches(tmp_path)
    assert "trained 1" in output and "trained 2" not in output
    assert [world_size for _, _, world_size in survivor] == sorted(
        [world_size for _, _, world_size in survivor], reverse=True
    )
    assert_little_is_repeated(survivor, undisturbed, tmp_path)


@pytest.mark.timeout(600)
def test_a_rank_that_is_added_takes_part(monkeypatch, tmp_path, undisturbed):
    output = elastic(monkeypatch, tmp_path, NEVER, 5, "localhost:1\n", num_ranks=1)
    assert output.count("trained 2") == 2
    first, added = batches(tmp_path)
    assert [first[0][2], first[-1][2]] == [1, 2]
    assert added[0][0] > 0 and {world_size for _, _, world_size in added} == {2}
    assert_little_is_repeated(first, undisturbed, tmp_path)


def assert_little_is_repeated(log, undisturbed, folder):
    """All batches were trained, not more than those since a backup twice; to the same weights."""
    trained = [batch for batch, _, _ in log]
    assert set(trained) == set(range(BATCHES))
    # A backup that was being written when the job was disturbed does not count either.
    assert len(trained) <= BATCHES + 2 * SAVE_FREQ
    for expected, received in zip(undisturbed, results(folder), strict=True):
        # Sums over two ranks travel as float16, those of one are exact.
        np.testing.assert_allclose(received, expected, atol=1e-3)
