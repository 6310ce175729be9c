"""The suite itself: it can fail, it survives a worker's death, and a wrong number is named."""

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.cases import CASES
from tests.conformance.conftest import Workers
from tests.conformance.slices import NUM_SLICES, VARIABLE, slice_of_this_run
from tests.conformance.strategies import ROWS_OF, STRATEGIES, Row
from tests.helpers import BATCH, UNEVEN_ROWS, assert_same_training, train
from tests.multi_process.pool import WorkerFailure, WorkerPool, cluster_environments


def test_plain_keras_equals_itself():
    assert_same_training(train(None), train(None))


def test_cases_that_rows_name_exist():
    assert {name for row in STRATEGIES for name in row.few} <= set(CASES)


def test_every_public_strategy_has_a_row():
    public = {name for name in tfparallel.__all__ if name.endswith("Strategy")}
    assert set(ROWS_OF) == public
    named = [row for rows in ROWS_OF.values() for row in rows]
    assert sorted(named) == sorted(row.name for row in STRATEGIES)


def test_what_rows_are_exempt_from_exists():
    for row in STRATEGIES:
        for beginning in row.exempt:
            assert any(name.startswith(beginning) for name in CASES), (row.name, beginning)


def test_slices_together_are_every_pair():
    pairs = [(row, case) for row in STRATEGIES for case in CASES.values() if not case.long]
    for row, case in pairs:
        asked = [row.is_asked(case, False, number) for number in range(NUM_SLICES)]
        assert any(asked) == row.is_asked(case, everything=True), (row.name, case.name)


def test_the_slice_can_be_given(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    assert slice_of_this_run() == 7
    monkeypatch.setenv(VARIABLE, str(NUM_SLICES))
    with pytest.raises(ValueError, match=f"0 to {NUM_SLICES - 1}"):
        slice_of_this_run()
    monkeypatch.setenv(VARIABLE, "commit")
    assert slice_of_this_run() in range(NUM_SLICES)
    monkeypatch.delenv(VARIABLE)
    assert slice_of_this_run() is None


def test_stock_mirrored_fails_with_an_uneven_last_batch():
    """What the suite is for."""
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(AssertionError, match="weights/0"):
        assert_same_training(_train(None), _train(stock))


def _train(strategy):
    return train(strategy, rows=UNEVEN_ROWS, batch_size=BATCH)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights/0": np.array([1.0, 2.0001]), "history/loss": np.array([3.0])},
        {"weights/0": np.array([1.0, np.nan]), "history/loss": np.array([3.0])},
        {"weights/0": np.array([1.0]), "history/loss": np.array([3.0])},
        {"weights/0": np.array([1.0, 2.0])},
    ],
    ids=["number", "nan", "shape", "missing"],
)
def test_a_difference_is_found(wrong):
    right = {"weights/0": np.array([1.0, 2.0]), "history/loss": np.array([3.0])}
    assert_same_training(right, right)
    with pytest.raises(AssertionError):
        assert_same_training(right, wrong)


ECHO = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    command = json.loads(line)["command"]
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if command == "die" and rank == 1:
        sys.exit("rank 1 has died")
    if command == "hang" and rank == 1:
        print("rank 1 hangs", file=sys.stderr, flush=True)
        time.sleep(1000)
    print(json.dumps({"rank": rank}), flush=True)
"""


@pytest.mark.parametrize("command, told", [("die", "rank 1 has died"), ("hang", "rank 1 hangs")])
def test_a_pool_tells_of_a_lost_worker_and_starts_again(command, told):
    pool = WorkerPool(["-c", ECHO], lambda: cluster_environments(2))
    try:
        assert pool.ask({"command": "echo"}) == [{"rank": 0}, {"rank": 1}]
        with pytest.raises(WorkerFailure, match=told):
            pool.ask({"command": command}, timeout_s=2)
        assert pool.ask({"command": "echo"}) == [{"rank": 0}, {"rank": 1}]
    finally:
        pool.close()


def test_a_failed_case_shows_the_workers_traceback(tmp_path_factory):
    workers = Workers(Row("reference", lambda: None, 1), tmp_path_factory)
    try:
        workers.start("no such case")
        with pytest.raises(WorkerFailure, match="KeyError: 'no such case'"):
            workers.results()
    finally:
        workers.close()


def test_what_shares_processes_stays_on_one_pytest_worker(request, worker_id):
    """pytest-xdist says so by a suffix; without groups every pool would be up twice."""
    if worker_id == "master":
        pytest.skip("pytest runs in one process")
    assert request.node.nodeid.endswith("@test_harness.py")
