"""Small arrays are summed among partners: right, alike on all ranks, and who is gone is named."""

import multiprocessing
import socket
import threading

import numpy as np
import pytest

from tests.communication.rings import connect_all, hosts_of, on_all
from tfparallel.communication import alpha_beta, pacing, ring_opening
from tfparallel.communication.neighbours import (
    GREETING_BYTES,
    CollectiveMismatchError,
    Neighbours,
    PeerLostError,
)
from tfparallel.communication.ring_opening import connect_ring

SIZES = [(), (0,), (1,), (3, 2), (7,), (4096,)]
DTYPES = ["float32", "float16", "float64", "int64", "int32", "uint8"]


@pytest.mark.parametrize("way", ["small_bytes", "halved_bytes"])
@pytest.mark.parametrize("num_workers", range(2, 10))
def test_every_worker_gets_the_sum_and_the_same_bits(num_workers, way):
    rings = all_among_partners(num_workers, way)
    rng = np.random.default_rng(num_workers)
    around = sum(ring._neighbours._sender.bytes_sent for ring in rings)
    for shape in SIZES:
        for dtype in DTYPES:
            arrays = [rng.integers(0, 20, shape).astype(dtype) for _ in rings]
            kept = [array.copy() for array in arrays]
            for total in on_all(num_workers, lambda r, a=arrays: rings[r].all_reduce(a[r])):
                np.testing.assert_array_equal(total, np.sum(kept, axis=0, dtype=dtype))
                assert total.shape == shape and total.dtype == dtype
            np.testing.assert_array_equal(arrays, kept)
    arrays = [rng.normal(size=1001).astype("float32") for _ in rings]
    arrays[0][:3], arrays[-1][:2] = np.nan, -np.nan  # whose bits differ
    totals = on_all(num_workers, lambda r: rings[r].all_reduce(arrays[r]))
    assert len({total.tobytes() for total in totals}) == 1
    np.testing.assert_allclose(totals[0], np.sum(arrays, axis=0), rtol=1e-4, atol=1e-5)
    assert around == sum(ring._neighbours._sender.bytes_sent for ring in rings)
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("num_workers", [2, 3, 8, 9])
def test_small_gathers_go_among_partners(num_workers):
    rings = connect_all(num_workers)
    rng = np.random.default_rng(0)
    dtypes, lengths = ["float32", "float64", "uint8", "float16"], [1, 30, 0, 7]
    parts = [
        [(100 * rng.normal(size=n)).astype(d) for n, d in zip(lengths, dtypes, strict=True)]
        for _ in rings
    ]
    around = [ring._neighbours._sender.bytes_sent for ring in rings]
    for own in on_all(num_workers, lambda rank: rings[rank].all_gather_each(parts[rank])):
        for k, whole in enumerate(own):
            np.testing.assert_array_equal(whole, np.concatenate([each[k] for each in parts]))
            assert whole.dtype == dtypes[k]
            assert not whole.size or whole.ctypes.data % 64 == 0  # TensorFlow takes no copy
    assert around == [ring._neighbours._sender.bytes_sent for ring in rings]
    assert on_all(num_workers, lambda rank: rings[rank].all_gather_each([])) == [[]] * num_workers


def all_among_partners(num_workers, way):
    rings = connect_all(num_workers, small_bytes=0)
    for ring in rings:
        setattr(ring, way, 1 << 30)
    return rings


@pytest.mark.parametrize("way", ["small_bytes", "halved_bytes"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_arrays_larger_than_all_buffers_meet(num_workers, way):
    """Both of a pair send at the same time; neither waits until all of its own is read."""
    rings = all_among_partners(num_workers, way)
    array = np.arange(3_000_001, dtype="float32")
    for total in on_all(num_workers, lambda rank: rings[rank].all_reduce(array)):
        np.testing.assert_array_equal(total, num_workers * array)


@pytest.mark.parametrize("hosts", [[], hosts_of(4, 1), sorted(hosts_of(2, 2)), hosts_of(3, 1) * 2])
def test_halves_take_messages_and_bytes_that_are_known(hosts):
    """2 log2 N messages, of as many bytes as around the ring, and no message around it.

    Where hosts share a link it is spared: each host's ranks would send their halves over it.
    """
    num_workers = len(hosts) or 4
    rings = connect_all(num_workers, small_bytes=1024, hosts=hosts)
    array = np.ones(4096, "float32")
    around = [ring._neighbours._sender.bytes_sent for ring in rings]
    sent = [ring.bytes_sent for ring in rings]
    for total in on_all(num_workers, lambda rank: rings[rank].all_reduce(array)):
        np.testing.assert_array_equal(total, num_workers * array)
    sent = [ring.bytes_sent - before for ring, before in zip(rings, sent, strict=True)]
    if len(hosts) == 4 == len(set(hosts)) or not hosts:
        assert sent == [4 * GREETING_BYTES + 2 * 3 * array.nbytes // 4] * num_workers
        assert around == [ring._neighbours._sender.bytes_sent for ring in rings]
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_small_and_large_ones_follow_one_another(num_workers):
    rings = connect_all(num_workers, small_bytes=400)

    def many(rank):
        results = []
        for i in range(40):
            size = (1, 100, 101, 5000)[i % 4]
            results.append(float(rings[rank].all_reduce(np.full(size, rank + i, "float32"))[-1]))
            if i % 5 == 0:
                results.append(len(rings[rank].all_gather(np.zeros((rank, 2)))))
        return results

    first, *others = on_all(num_workers, many)
    ranks = sum(range(num_workers))
    assert first[:3] == [ranks, ranks, ranks + num_workers]
    assert all(other == first for other in others), [first, *others]


def test_two_choose_alike_by_what_they_measure():
    rings = connect_all(2, small_bytes=None)
    (chosen,) = {ring.small_bytes for ring in rings}
    assert alpha_beta.MOST_SMALL_BYTES <= chosen <= alpha_beta.MOST_FAR_BYTES
    totals = on_all(2, lambda rank: rings[rank].all_reduce(np.ones(100_000)))
    np.testing.assert_array_equal(totals, np.full((2, 100_000), 2.0))


@pytest.mark.parametrize("is_far", [False, True])
def test_connections_of_a_ring_over_a_long_way_are_paced(is_far, monkeypatch):
    """Whatever goes through this machine alone is near."""
    if is_far:
        monkeypatch.setattr(pacing, "FAR_S", 0.0)
    connections = []

    class Spied(Neighbours):
        def __init__(self, rank, num_workers, *ends, partners, **options):
            connections.extend([*ends[:2], *partners.values()])
            super().__init__(rank, num_workers, *ends, partners=partners, **options)

    monkeypatch.setattr(ring_opening, "Neighbours", Spied)
    rings = connect_all(3)
    limits = [each.getsockopt(socket.SOL_SOCKET, 47, 8) for each in connections]
    assert len(limits) > 2 * len(rings)
    assert {limit != 8 * bytes([255]) for limit in limits} == {is_far}


def test_more_add_in_the_same_order_whenever_they_start():
    """Which order it is must not follow from what links take at that moment."""
    assert {ring.small_bytes for ring in connect_all(3, small_bytes=None)} == {1 << 14}


def test_the_way_of_a_sum_of_two_changes_no_bit():
    numbers = [np.random.default_rng(rank).normal(size=5001).astype("float32") for rank in (0, 1)]
    sums = []
    for small_bytes in (-1, 1 << 20):
        rings = connect_all(2, small_bytes=small_bytes)
        sums.append(on_all(2, lambda rank, rings=rings: rings[rank].all_reduce(numbers[rank])))
    np.testing.assert_array_equal(*sums)


@pytest.mark.parametrize("message_s", [(1e-3, 1e-6), (0.2, 1e-6)])
def test_costs_are_measured_right_and_not_for_long(message_s):
    """On a clock of its own: messages of known cost; on slow links fewer of them."""
    latency_s, byte_s = message_s
    clock = [0.0]

    def add(array):
        clock[0] += 3 * (latency_s + byte_s * array.nbytes)
        return 8 * array

    costs = alpha_beta.measured_costs(add, 8, lambda: clock[0])
    assert costs == pytest.approx((latency_s, byte_s), rel=1e-6)
    assert clock[0] < 20 * 3 * (latency_s + byte_s * (1 << 16))
    assert latency_s < 0.1 or clock[0] < 7 * 3 * (latency_s + byte_s * (1 << 16))


@pytest.mark.parametrize("later_s", [0.0, 0.02, -0.02])
def test_costs_are_the_same_whoever_comes_first(later_s):
    """A message is 25 ms on its way: who comes 20 ms later waits for 5 ms, and the other for 45."""
    latency_s, byte_s = 0.025, 1e-7
    clocks, met, barrier = [0.0, later_s], [None, None], threading.Barrier(2, timeout=10)

    def measure(rank):
        def add(array):
            met[rank] = clocks[rank], array.copy()
            barrier.wait()
            (own_s, _), (other_s, other) = met[rank], met[1 - rank]
            barrier.wait()
            clocks[rank] = max(own_s, other_s + latency_s + byte_s * array.nbytes)
            return array + other

        return alpha_beta.measured_costs(add, 2, lambda: clocks[rank])

    costs, others = on_all(2, measure)
    assert costs == others == pytest.approx((latency_s, byte_s), rel=1e-6)


@pytest.mark.parametrize("num_workers", [2, 4, 5])
def test_a_worker_that_ends_is_named_by_its_partners(num_workers):
    rings = connect_all(num_workers)
    rings[1].close()
    with pytest.raises(PeerLostError, match=r"Rank 1 \(/job:worker/task:0\) has ended.*Rank 0"):
        rings[0].all_reduce(np.ones(3))
    errors = on_all(num_workers, lambda rank: rings[rank].all_reduce(np.ones(3)))
    assert all(isinstance(error, OSError) for error in errors), errors


@pytest.mark.parametrize("silent", range(5))
def test_a_silent_worker_ends_all_in_time(silent):
    """Whichever it is: its partners wait for their limit, the others for them."""
    rings = connect_all(5, timeout_s=0.3)
    others = [rank for rank in range(5) if rank != silent]
    errors = on_all(4, lambda i: rings[others[i]].all_reduce(np.ones(3)))
    assert all(isinstance(error, PeerLostError) for error in errors), errors
    assert any(f"Rank {silent}, or one" in str(error) for error in errors), errors
    assert all("is speaking" in str(error) for error in errors)


class OneLost:
    """`Liveness` that finds one rank silent, and gone."""

    patience_s = 7.0

    def lost(self):
        return ["rank 3"]

    absent = lost


def test_who_is_lost_is_named_by_those_who_wait_for_others():
    rings = connect_all(4, timeout_s=2.0)
    for ring in rings[:3]:
        ring._neighbours._liveness = OneLost()
    errors = on_all(3, lambda rank: rings[rank].all_reduce(np.ones(3)))
    assert all("rank 3" in str(error) for error in errors), errors


@pytest.mark.parametrize("other", [np.ones(4, "float32"), np.ones(3, "int32"), np.ones(90_000)])
def test_workers_in_different_collectives_are_told_so(other):
    """Another small one, or one that is large and waits at the ring."""
    rings = connect_all(2)
    arrays = [np.ones(3, "float32"), other]
    errors = on_all(2, lambda rank: rings[rank].all_reduce(arrays[rank]))
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert "rank 1 is in all-reduce 1 of" in str(errors[0])
    assert "bytes of float32" in str(errors[0])


def test_one_of_many_in_another_collective_ends_all():
    rings = connect_all(5)
    errors = on_all(
        5, lambda r: (rings[r].all_gather if r == 3 else rings[r].all_reduce)(np.ones(1))
    )
    assert all(isinstance(e, CollectiveMismatchError | PeerLostError) for e in errors), errors
    told = [e for e in errors if isinstance(e, CollectiveMismatchError)]
    assert any(
        "rank 3 is in all-gather 1" in str(e) or "rank 3 in all-gather 1" in str(e) for e in told
    )


def test_who_looks_at_the_ring_leaves_there_what_is_for_later():
    """Rank 0 waits for rank 2 while rank 3, before it in the ring, is one collective ahead."""
    rings = connect_all(4, timeout_s=10.0)
    rings[0]._neighbours._ours = (6, b"reduce", 24, b"float64")
    rings[3]._neighbours._ours = (6, b"reduce", 24, b"float64")
    rings[3]._neighbours.send_at_once(rings[3]._neighbours._begin("gather", 8, np.dtype("int64")))
    rings[0]._neighbours._is_apart = True
    assert rings[0]._neighbours._is_previous_elsewhere() is None


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_process_is_named_in_time(killed):
    """Of three: one that gives, one that adds for it, and one that only doubles."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(3):
        here, there = context.Pipe()
        process = context.Process(target=_reduce_until_one_is_lost, args=(rank, 3, there))
        process.start()
        there.close()  # so that who has died is seen to have
        pipes.append(here)
        processes.append(process)
    try:
        for _ in range(2):  # the exchanges of `connect_ring`
            values = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(values)
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 3
        processes[killed].kill()
        for rank in set(range(3)) - {killed}:
            assert pipes[rank].poll(10)
            told = pipes[rank].recv()
            assert f"(Rank {rank} is speaking.)" in told
            if {rank, killed} != {0, 2}:  # who are no partners: told by the one between them
                assert f"Rank {killed} has ended" in told
    finally:
        for process in processes:
            process.kill()


def _reduce_until_one_is_lost(rank, num_workers, pipe):
    def exchange(kind, value):
        pipe.send(value)
        return pipe.recv()

    ring = connect_ring(rank, num_workers, "127.0.0.1", exchange, 20.0, small_bytes=1 << 14)
    pipe.send("ready")
    try:
        while True:
            ring.all_reduce(np.ones(10))
    except PeerLostError as error:
        pipe.send(str(error))
