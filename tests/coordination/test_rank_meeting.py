"""Ranks meet at Horovod's own rendezvous server, which is the reference."""

import socket
import threading
import time

import pytest

from tests.multi_process.pool import horovod_environments
from tests.multi_process.test_silence import stranger
from tfparallel.coordination.patience import WaitedTooLong
from tfparallel.coordination.rank_meeting import meet_ranks
from tfparallel.coordination.waiting import Clock

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")


def in_step(ranks: int) -> Clock:
    """A clock on which `ranks` threads sleep together: it goes on when all have looked.

    So as many looks fall within a limit on a machine that is busy.
    """
    all_sleep, slept_s = threading.Barrier(ranks, timeout=120.0), threading.local()

    def sleep(seconds):
        # One after another: the rendezvous keeps five connections waiting, others for a second.
        time.sleep(0.02 * all_sleep.wait())
        slept_s.total = now_s() + seconds

    def now_s():
        return getattr(slept_s, "total", 0.0)

    return Clock(now_s, sleep)


def test_ranks_go_on_when_all_have_come():
    first, second, last = horovod_environments(3)
    waiting = [threading.Thread(target=meet_ranks, args=(e, 30.0)) for e in (first, second)]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.5)
    assert all(thread.is_alive() for thread in waiting)
    meet_ranks(last, 30.0)
    for thread in waiting:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in waiting)


def test_one_of_many_is_named_though_ranks_look_for_a_few_at_a_time():
    of_ranks, errors = horovod_environments(12), []
    late = of_ranks.pop(9)
    clock = in_step(len(of_ranks))

    def start(variables):
        try:
            meet_ranks(variables, 2.0, clock)
        except WaitedTooLong as error:
            errors.append(str(error))

    ranks = [threading.Thread(target=start, args=(each,)) for each in of_ranks]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(120.0)
    assert len(errors) == 11
    assert all("Expected rank 9 to start" in error for error in errors), errors
    meet_ranks(late, 5.0)  # finds by itself that all have come


def test_who_has_not_come_is_named():
    of_ranks = horovod_environments(3)
    with pytest.raises(WaitedTooLong, match=r"Expected rank 1, rank 2 to start within 0\.5 s"):
        meet_ranks(of_ranks[0], 0.5)
    with pytest.raises(WaitedTooLong, match=r"Expected rank 1 to start .*\(rank 2 \(on host"):
        meet_ranks(of_ranks[2], 0.5)


def test_a_stranger_at_the_rendezvous_is_named():
    variables = horovod_environments(2)[0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    with pytest.raises(WaitedTooLong, match=f"rendezvous .127.0.0.1:{port}.*refused"):
        meet_ranks(variables, 0.5)
    with (
        stranger(port, b"SSH-2.0-OpenSSH_9.6\r\n"),
        pytest.raises(WaitedTooLong, match=f"127.0.0.1:{port}.*BadStatusLine: SSH-2.0"),
    ):
        meet_ranks(variables, 0.5)


def test_without_a_rendezvous_or_in_an_elastic_job_nobody_waits():
    meet_ranks({}, 0.1)
    meet_ranks(horovod_environments(2)[0] | {"HOROVOD_ELASTIC": "1"}, 0.1)
