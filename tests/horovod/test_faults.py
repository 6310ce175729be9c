"""Ranks that hold up the others are named; who trains with whom."""

import numpy as np
import pytest

from tests.horovod.launching import forked_ranks, horovodrun

pytestmark = pytest.mark.turns

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")


@pytest.mark.timeout(300)
def test_ranks_that_hold_up_the_others_are_named(tmp_path):
    with forked_ranks(tmp_path, 3, "horovod.training", "hold up") as ranks:
        assert ranks[0].wait(timeout_s=150) not in (0, None)
        output = (tmp_path / "0.log").read_text()
    told = [
        "(gradients of",
        "middle/kernel",
        "rank 1 (on host",
        "does not run",
        "rank 2 (on host",
        "runs, but has come to reduction",
        "Rank 0 is speaking",
    ]
    assert not [text for text in told if text not in output], output
    assert "trained" not in output


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", [1, 0])
def test_a_rank_that_does_not_start_is_named_by_who_waits(late):
    status, output = horovodrun("late", late, 200.0)
    assert status != 0 and "made" not in output
    assert f"Expected rank {late} to start within 5 s" in output, output
    assert f"(rank {1 - late} (on host" in output, output


@pytest.fixture(scope="module")
def process_sets(tmp_path_factory):
    """What three ranks have said, and a function of what they have trained, by name."""
    folder = tmp_path_factory.mktemp("process_sets")
    with forked_ranks(folder, 3, "horovod.training", "in process sets", folder) as ranks:
        statuses = [rank.wait(timeout_s=240) for rank in ranks]
        output = "".join((folder / f"{rank}.log").read_text() for rank in range(3))
    assert statuses == [0, 0, 0], output

    def weights(name):
        return [list(np.load(folder / f"{name}{rank}.npz").values()) for rank in range(3)]

    return output, weights


@pytest.mark.timeout(300)
def test_ranks_of_a_process_set_train_together_from_what_its_rank_0_has(process_sets):
    output, weights = process_sets[0], process_sets[1]("")
    for first, second, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, atol=1e-5)
    assert np.allclose(weights[1][0], 1.0, atol=0.9)  # rank 0 began with ones
    assert "Ranks [1] have other weights" in output


@pytest.mark.timeout(300)
def test_what_ranks_cannot_do_together_is_told_at_once(process_sets):
    output, _ = process_sets
    other_models = "rank 0: middle/kernel float32[6, 5]; rank 1: middle/kernel float32[6, 6]"
    for rank in (0, 1):
        assert output.count(f"{other_models}. (Rank {rank} is speaking.)") == 1, output
    assert output.count('reduction="adasum" needs') == 3, output


@pytest.mark.timeout(300)
def test_16_bit_floats_travel_as_such_between_three_ranks(process_sets):
    output, _ = process_sets
    of_halves = 2 * ["HorovodAllgather"] + ["HorovodAllreduce"] + 2 * ["HorovodAlltoall"]
    assert output.count(" ".join(of_halves)) == 3, output


@pytest.mark.timeout(300)
def test_compressed_training_is_equal_on_all_ranks(process_sets):
    _, weights = process_sets
    for *copies, of_one in zip(*weights("compressed"), weights("")[2], strict=True):
        np.testing.assert_array_equal(copies[0], copies[1])
        np.testing.assert_array_equal(copies[0], copies[2])
        # Beginning with ones, all units of a layer are alike: rank 1 is exact.
        np.testing.assert_allclose(copies[0], of_one, atol=1e-5)
