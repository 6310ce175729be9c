"""Real `horovodrun`: ranks that hold up the others are named; who trains with whom."""

import numpy as np
import pytest

from tests.horovod.launching import horovodrun

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("killed", ["Process 1 exit with status code 137"]),
        (
            "stopped",
            ["reduction 4 (gradients of", "middle/kernel", "rank 1 (on host", "does not run"],
        ),
        ("busy", ["rank 1 (on host", "runs, but has come to reduction 3 only", "Rank 0 is spea"]),
        (
            "other model",
            ["rank 0: middle/kernel float32[6, 5]", "rank 1: middle/kernel float32[6,"],
        ),
    ],
)
def test_a_rank_that_holds_up_the_others_is_named(what, told):
    status, output = horovodrun("training", what)
    assert status != 0
    assert not [text for text in told if text not in output], output
    assert "trained" not in output


@pytest.mark.timeout(300)
def test_all_train_on_from_what_rank_0_has(tmp_path):
    status, output = horovodrun("training", "restored on rank 0", tmp_path)
    assert status == 0, output
    weights = [list(np.load(tmp_path / f"{rank}.npz").values()) for rank in range(2)]
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)
    assert np.allclose(weights[1][0], 1.0, atol=0.9)  # rank 0 began with ones
    assert "Ranks [1] have other weights" in output


@pytest.mark.timeout(300)
def test_ranks_of_a_process_set_train_together(tmp_path):
    status, output = horovodrun("training", "process sets", tmp_path, num_ranks=3)
    assert status == 0, output
    weights = [list(np.load(tmp_path / f"{rank}.npz").values()) for rank in range(3)]
    for first, second, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, atol=1e-5)
