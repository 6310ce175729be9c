"""The suite itself: it can fail, it survives a worker's death, and a wrong number is named."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.cases import CASES
from tests.conformance.conftest import Workers
from tests.conformance.never_asked import NEVER_ASKED
from tests.conformance.strategies import (
    ENGINES,
    ROWS,
    ROWS_OF,
    STRATEGIES,
    WITHOUT_ROWS,
    Row,
)
from tests.helpers import BATCH, UNEVEN_ROWS, assert_same_training, train
from tests.multi_process.pool import REPOSITORY, WorkerFailure, WorkerPool, cluster_environments
from tests.slices import NUM_SLICES


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
        number = row.slice_of(case)
        asked = row.is_asked(case, False, number)
        assert asked == row.is_asked(case, everything=True), (row.name, case.name)
        assert number in range(NUM_SLICES)


def test_a_slice_is_a_small_part_of_what_is_left_out():
    sizes = collections.Counter(
        row.slice_of(case)
        for row in STRATEGIES
        for case in CASES.values()
        if not case.long and row.is_asked(case, True) and not row.is_asked(case, False)
    )
    assert len(sizes) == NUM_SLICES and max(sizes.values()) < 80


@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_is_asked_of_every_engine_or_there_is_a_reason(engine):
    rows = [ROWS[name] for name in ENGINES[engine]]
    unasked = [
        case
        for case in CASES.values()
        if not any(row.is_asked(case, everything=True) for row in rows)
    ]
    assert {case.name for case in unasked} == set(NEVER_ASKED[engine])
    for case in unasked:
        assert all(row.reason_for_not_asking(case) for row in rows), case.name


def test_every_row_has_an_engine():
    of_engines = [name for rows in ENGINES.values() for name in rows]
    assert sorted(of_engines) == sorted(row.name for row in STRATEGIES)


def test_every_exemption_has_a_reason():
    for row in STRATEGIES:
        without = [name for name, reason in row.exempt.items() if len(reason.split()) < 3]
        assert not without, (row.name, without)


def test_a_strategy_without_rows_says_why():
    without = {name for name, rows in ROWS_OF.items() if not rows}
    assert without == set(WITHOUT_ROWS) and all(WITHOUT_ROWS.values())
    for reason in WITHOUT_ROWS.values():
        folder = REPOSITORY / reason.partition(":")[0]
        assert folder.is_dir(), f"{folder} asks in its place, and is not there"


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
