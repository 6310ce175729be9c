"""A rank that is killed or stopped is named by all others, also where it is rank 0."""

import re
import signal
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.horovod.launching import forked_ranks

pytestmark = pytest.mark.turns

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")
ENDS_IN_S = 150.0  # Horovod's own transport gives up after 30 s


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "number", "told"),
    [
        (2, signal.SIGKILL, "rank 2 (on host"),
        (0, signal.SIGKILL, "Rank 0, which keeps what the ranks agree on,"),
        pytest.param(
            0,
            signal.SIGSTOP,
            "Rank 0, which keeps what the ranks agree on, has not answered",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_survivors_of_three_name_the_dead(tmp_path, victim, number, told):
    assert_named_by_survivors(tmp_path, 3, victim, [victim, int(number)], told)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_stopped_rank_that_shares_a_copy_is_named_by_the_ranks_of_all_copies(tmp_path):
    told = "does not run: it has been silent for"
    assert_named_by_survivors(tmp_path, 4, 3, [3, int(signal.SIGSTOP), 2], told)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "told"),
    [
        (3, "rank 3 (on host"),
        (1, "rank 1 (on host"),
        (0, "Rank 0, which keeps what the ranks agree on, has ended"),
    ],
)
def test_a_killed_rank_that_shares_a_copy_is_named_by_the_ranks_of_all_copies(
    tmp_path, victim, told
):
    """Horovod would abort them: to take its process sets apart it asks the dead."""
    arguments = [victim, int(signal.SIGKILL), 2]
    for log in assert_named_by_survivors(tmp_path, 4, victim, arguments, told):
        assert log.count("has ended") == 1, log[-3000:]  # nobody else


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ranks_of_a_copy_that_has_been_read_do_not_end_before_those_of_others(tmp_path):
    """With the first rank that ends Horovod ends for all."""
    with forked_ranks(tmp_path, 4, "horovod.late_copy") as ranks:
        statuses = [process.wait(ENDS_IN_S) for process in ranks]
    logs = [(tmp_path / f"{rank}.log").read_text(errors="replace") for rank in range(4)]
    assert statuses == [0] * 4, logs
    assert len({re.search(r"weights: \S+", log)[0] for log in logs}) == 1


def assert_named_by_survivors(folder, num_ranks, victim, arguments, told):
    logs = []
    with forked_ranks(folder, num_ranks, "horovod.killed", *arguments) as ranks:
        for rank in set(range(num_ranks)) - {victim}:
            assert ranks[rank].wait(ENDS_IN_S) not in (0, None)
            log = (folder / f"{rank}.log").read_text(errors="replace")
            assert told in log and f"Rank {rank} is speaking" in log, log[-3000:]
            logs.append(log)
    return logs


@pytest.mark.timeout(240)
def test_the_rank_with_a_flipped_bit_in_a_weight_is_named_by_all(tmp_path):
    with forked_ranks(tmp_path, 3, "multi_process.wrong_worker", 2, "bit") as ranks:
        for rank, process in enumerate(ranks):
            assert process.wait(ENDS_IN_S) not in (0, None)
            log = (tmp_path / f"{rank}.log").read_text(errors="replace")
            # One that has not compared yet when the first ends finds Horovod ended.
            told = ["other weights in rank 2, in step 8", "has ended, its own log says why"]
            assert any(each in log for each in told), log[-3000:]
            assert "step 8\n" not in log


@pytest.mark.parametrize(("said", "expected_s"), [(None, 30.0), ("", 30.0), ("7", 7.0)])
def test_rank_0_may_take_as_long_to_answer_as_a_rank_in_gloo(monkeypatch, said, expected_s):
    from tfparallel.data_parallel import horovod

    environ = {} if said is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": said}
    monkeypatch.setattr(horovod.os, "environ", environ)
    asked = []
    monkeypatch.setattr(horovod, "TcpStore", lambda *args: asked.append(args))
    told = tf.io.decode_raw("a 1 t".ljust(512), "uint8")
    monkeypatch.setattr(horovod, "broadcast", lambda *_: told)
    monkeypatch.setattr(horovod, "Agreement", lambda *_: None)
    rank_1 = SimpleNamespace(_is_chief=False, _process_set=None, _id_in_cluster=1, _num_workers=2)
    horovod.HorovodExtended._open_agreement(rank_1)
    assert asked == [("a", 1, "t", 1, expected_s)]
