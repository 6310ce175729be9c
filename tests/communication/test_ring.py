"""The ring sums what all workers hold, and says who is gone."""

import contextlib
import re
import socket
import threading

import numpy as np
import pytest

from tests.communication.rings import AROUND, Board, connect_all, hosts_of, on_all
from tfparallel.communication import ring_opening
from tfparallel.communication.neighbours import CollectiveMismatchError, PeerLostError
from tfparallel.communication.ring import SEGMENT_BYTES, Ring
from tfparallel.communication.ring_of_hosts import RingOfHosts, equal_groups
from tfparallel.communication.ring_opening import connect_ring

HOSTS = {"2x2": hosts_of(2, 2), "3x2": hosts_of(3, 2), "2x3": sorted(hosts_of(2, 3))}


@pytest.fixture(params=[2, 3, 5, *HOSTS])
def rings(request):
    hosts = HOSTS.get(request.param, [])
    rings = connect_all(len(hosts) or request.param, small_bytes=AROUND, hosts=hosts)
    yield rings
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2), (7,), (300_001,)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64"])
def test_every_worker_gets_the_sum(rings, shape, dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 9, shape).astype(dtype) for _ in rings]
    kept = [array.copy() for array in arrays]
    for total in on_all(len(rings), lambda rank: rings[rank].all_reduce(arrays[rank])):
        np.testing.assert_array_equal(total, np.sum(kept, axis=0, dtype=dtype))
        assert total.shape == shape and total.dtype == dtype
    for array, before in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_every_worker_gets_the_same_bits(rings):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=1001).astype("float32") for _ in rings]
    first, *others = on_all(len(rings), lambda rank: rings[rank].all_reduce(arrays[rank]))
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_every_worker_gets_the_rows_of_all(rings, shape):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(rows, *shape)) for rows in [0, 3, 1, 200_000, 2, 1][: len(rings)]]
    for gathered in on_all(len(rings), lambda rank: rings[rank].all_gather(arrays[rank])):
        np.testing.assert_array_equal(gathered, np.concatenate(arrays))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2), (7,), (300_001,)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64"])
def test_every_worker_gets_its_row_of_the_sum(rings, shape, dtype):
    rng, num_workers = np.random.default_rng(0), len(rings)
    arrays = [rng.integers(-9, 9, (num_workers, *shape)).astype(dtype) for _ in rings]
    kept = [array.copy() for array in arrays]
    totals = on_all(num_workers, lambda rank: rings[rank].reduce_scatter(arrays[rank]))
    for rank, total in enumerate(totals):
        np.testing.assert_array_equal(total, np.sum(kept, axis=0, dtype=dtype)[rank])
        assert total.shape == shape and total.dtype == dtype
    for array, before in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_every_worker_gets_each_array_of_all(rings):
    rng, num_workers = np.random.default_rng(0), len(rings)
    dtypes, lengths = ["float32", "float64", "float16"], [1, 300_001, 7]
    parts = [
        [rng.normal(size=n).astype(dtype) for n, dtype in zip(lengths, dtypes, strict=True)]
        for _ in rings
    ]
    results = on_all(num_workers, lambda rank: rings[rank].all_gather_each(parts[rank]))
    for own in results:
        for k, whole in enumerate(own):
            np.testing.assert_array_equal(whole, np.concatenate([each[k] for each in parts]))
            assert whole.dtype == dtypes[k]


@pytest.mark.parametrize(
    "num_workers", [4, 6, *(pytest.param(n, marks=pytest.mark.long) for n in (7, 8, 9))]
)
def test_arrays_of_several_segments_go_around_any_number_of_workers(num_workers):
    """A chunk is one segment and a part of another; chunks differ in length."""
    rings = connect_all(num_workers, small_bytes=AROUND)
    size = num_workers * (SEGMENT_BYTES // 4 + 1000) + 1
    rng = np.random.default_rng(num_workers)
    arrays = [rng.integers(-9, 9, size).astype("float32") for _ in rings]
    for total in on_all(num_workers, lambda rank: rings[rank].all_reduce(arrays[rank])):
        np.testing.assert_array_equal(total, np.sum(arrays, axis=0))
    rows = [array[:-1].reshape(num_workers, -1) for array in arrays]
    totals = on_all(num_workers, lambda rank: rings[rank].reduce_scatter(rows[rank]))
    np.testing.assert_array_equal(totals, np.sum(rows, axis=0))
    parts = [array[: 200_000 + rank] for rank, array in enumerate(arrays)]
    for whole in on_all(num_workers, lambda rank: rings[rank].all_gather(parts[rank])):
        np.testing.assert_array_equal(whole, np.concatenate(parts))
    equal = [array[:200_001] for array in arrays]
    for (whole,) in on_all(num_workers, lambda rank: rings[rank].all_gather_each([equal[rank]])):
        np.testing.assert_array_equal(whole, np.concatenate(equal))
    for ring in rings:
        ring.close()


def test_tensorflow_takes_what_was_gathered_without_a_copy():
    ring = connect_all(1)[0]
    for length in (10, 1 << 20):
        (whole,) = ring.all_gather_each([np.ones(length, "float32")])
        assert whole.ctypes.data % 64 == 0


def test_a_reduce_scatter_sends_half_the_bytes_of_an_all_reduce(rings):
    num_workers, sent = len(rings), []
    array = np.ones((num_workers, 50_000), "float32")
    for name in ("all_reduce", "reduce_scatter"):
        before = [ring.bytes_sent for ring in rings]
        on_all(num_workers, lambda rank, name=name: getattr(rings[rank], name)(array))
        sent.append([ring.bytes_sent - b for ring, b in zip(rings, before, strict=True)])
    greeting = 32 * (2 if isinstance(rings[0], RingOfHosts) else 1)
    for reduced, scattered in zip(*sent, strict=True):
        assert scattered - greeting == array[1:].nbytes
        assert reduced - greeting == 2 * (scattered - greeting)


def test_of_a_sum_only_what_a_host_has_summed_leaves_it():
    """Two hosts of three ranks: what crosses is one array, and 5/3 of it in a ring of all."""
    rings = connect_all(6, small_bytes=AROUND, hosts=HOSTS["2x3"])
    array = np.ones(60_000, "float32")
    before = [[ring._across.bytes_sent, ring.bytes_sent] for ring in rings]
    on_all(6, lambda rank: rings[rank].all_reduce(array))
    after = [[ring._across.bytes_sent, ring.bytes_sent] for ring in rings]
    crossed, sent = np.sum(np.subtract(after, before)[:3], 0)  # of the first host
    assert crossed == 3 * 32 + array.nbytes
    assert sent == 6 * 32 + 3 * 2 * (6 - 1) / 6 * array.nbytes  # as in a ring of all
    with rings[0].journal() as journal:
        on_all(6, lambda rank: rings[rank].all_reduce(array))
    assert {kind for kind, _, _ in journal.spans} == {"send", "receive"}
    assert rings[0].times.spent_s > 0


def test_hosts_of_unequal_numbers_have_one_ring():
    assert equal_groups(["a", "b", "b", "a"]) == [[0, 3], [1, 2]]
    for hosts in (["a", "b", "b"], ["a", "a"], ["a", "b"]):
        assert equal_groups(hosts) == []
    rings = connect_all(3, hosts=hosts_of(2, 2)[:3])
    assert not any(isinstance(ring, RingOfHosts) for ring in rings)


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "all_gather_each"])
@pytest.mark.parametrize("size", [6, 60_000])
def test_a_worker_of_a_host_that_ends_ends_all(call, size):
    rings = connect_all(6, hosts=HOSTS["2x3"])
    rings[4].close()
    array = np.ones((6, size), "float32")
    argument = [array] if call == "all_gather_each" else array
    errors = on_all(6, lambda rank: getattr(rings[rank], call)(argument))
    assert all(isinstance(error, OSError) for error in errors), errors
    named = [str(error) for error in errors[3:4] + errors[5:]]
    assert any("Rank 4 (/job:worker/task:3) has ended" in text for text in named), named


def test_workers_of_hosts_in_different_collectives_are_told_so():
    rings = connect_all(4, hosts=HOSTS["2x2"])
    arrays = [np.ones(50_000 + (rank == 3), "float32") for rank in range(4)]
    errors = on_all(4, lambda rank: rings[rank].all_reduce(arrays[rank]))
    assert any(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert all(isinstance(error, (CollectiveMismatchError, OSError)) for error in errors), errors


def test_a_reduce_scatter_wants_a_row_for_each_worker():
    rings = connect_all(2)
    errors = on_all(2, lambda rank: rings[rank].reduce_scatter(np.ones((3, 4))))
    assert all("a row for each of 2 workers. Received: shape (3, 4)" in str(e) for e in errors)


def test_a_reduction_and_a_gathering_do_not_meet():
    rings = connect_all(2)
    errors = on_all(
        2, lambda r: (rings[r].all_gather if r else rings[r].all_reduce)(np.ones(1, "float32"))
    )
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert "rank 1 is in all-gather 1 of rows of 4 bytes" in str(errors[0])


def test_many_collectives_follow_one_another(rings):
    def reduce_many(rank):
        return [int(rings[rank].all_reduce(np.array([rank + i]))[0]) for i in range(50)]

    num_workers = len(rings)
    ranks = num_workers * (num_workers - 1) // 2
    assert (
        on_all(num_workers, reduce_many)
        == [[ranks + i * num_workers for i in range(50)]] * num_workers
    )


def test_a_worker_that_ends_is_named_by_its_neighbours():
    rings = connect_all(2)
    rings[1].close()
    expected = r"Rank 1 \(/job:worker/task:0\) has ended.*Rank 0 is speaking"  # rank 0 is a chief
    with pytest.raises(PeerLostError, match=expected):
        rings[0].all_reduce(np.ones(3))


def test_a_ring_of_some_workers_names_their_ranks_among_all():
    rings = connect_all(2, timeout_s=0.2, names=(3, 5))
    with pytest.raises(PeerLostError, match="Rank 5.* silent for 0.2 s.*Rank 3 is speaking"):
        rings[0].all_reduce(np.ones(3))
    rings = connect_all(2, names=(3, 5))
    errors = on_all(2, lambda rank: rings[rank].all_reduce(np.ones(3 + rank)))
    message = r"rank (3|5) is in .*, rank (3|5) in .*Rank (3|5) is speaking"
    assert all(re.search(message, str(error)) for error in errors), errors


def test_a_worker_that_ends_ends_all():
    rings = connect_all(4)
    rings[2].close()
    errors = on_all(4, lambda rank: rings[rank].all_reduce(np.ones(1_000_000)))
    assert all(isinstance(error, OSError) for error in errors), errors


def test_a_silent_worker_is_named_in_time():
    rings = connect_all(2, timeout_s=0.2)
    with pytest.raises(PeerLostError, match="Rank 1.* silent for 0.2 s.*Rank 0 is speaking"):
        rings[0].all_reduce(np.ones(3))


@pytest.mark.parametrize("other", [np.ones(4, "float32"), np.ones(3, "int32")])
def test_workers_in_different_collectives_are_told_so(other):
    rings = connect_all(2)
    arrays = [np.ones(3, "float32"), other]
    errors = on_all(2, lambda rank: rings[rank].all_reduce(arrays[rank]))
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert "rank 1 is in all-reduce 1 of" in str(errors[0])
    assert "bytes of float32" in str(errors[0])


def before_each_connection(monkeypatch, does):
    """`does(host, port)` before a worker connects to another."""
    connect = ring_opening._connect

    def connect_later(rank, address, guest, deadline):
        does(address[0], address[1])
        return connect(rank, address, guest, deadline)

    monkeypatch.setattr(ring_opening, "_connect", connect_later)


def test_a_stranger_is_turned_away(monkeypatch):
    """Something on the network connects first, and does not know the token."""
    strangers = []

    def send_what_it_does_not_know(host, port):
        strangers.append(socket.create_connection((host, port)))
        strangers[-1].sendall(b"x" * 100)

    before_each_connection(monkeypatch, send_what_it_does_not_know)
    rings = connect_all(2)
    totals = on_all(2, lambda rank: rings[rank].all_reduce(np.ones(3)))
    np.testing.assert_array_equal(totals, 2 * np.ones((2, 3)))
    assert len(strangers) == 3  # before two in the ring, and a partner


def test_silent_strangers_hold_up_nobody(monkeypatch):
    """More of them than are let in at once, and one that says half of what it should."""
    strangers = []

    def come_silently(host, port):
        for _ in range(140):
            strangers.append(socket.create_connection((host, port)))
        strangers[-1].sendall(b"\0" * 30)

    before_each_connection(monkeypatch, come_silently)
    rings = connect_all(2, answer_s=9.0)
    assert all(isinstance(ring, Ring) for ring in rings), rings
    for stranger in strangers:
        stranger.close()


class Eavesdropper:
    """Passes on what workers say to one another, and keeps it."""

    def __init__(self):
        self.heard, self.reached = bytearray(), []

    def between(self, exchange):
        """An exchange of addresses, after which workers reach this one in place of the others."""

        def exchange_false_addresses(kind, value):
            values = exchange(kind, value)
            if kind != "open a ring":
                return values
            return [[*self._in_front_of(host, port), token] for host, port, token in values]

        return exchange_false_addresses

    def _in_front_of(self, host, port):
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._pass_on, args=(listener, host, port), daemon=True).start()
        return listener.getsockname()

    def _pass_on(self, listener, host, port):
        while True:
            guest, _ = listener.accept()
            true = socket.create_connection((host, port))
            self.reached.append((host, port))
            for ends in ((guest, true), (true, guest)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while more := source.recv(1 << 16):
                self.heard += more
                target.sendall(more)


def test_the_token_does_not_cross_the_network():
    board, eavesdropper, tokens = Board(2), Eavesdropper(), []

    def connect(rank):
        exchange = eavesdropper.between(board.of(rank))

        def exchange_and_keep(kind, value):
            tokens.extend([value[2]] if kind == "open a ring" else [])
            return exchange(kind, value)

        return connect_ring(rank, 2, "127.0.0.1", exchange_and_keep, 10.0, small_bytes=AROUND)

    rings = on_all(2, connect)
    totals = on_all(2, lambda rank: rings[rank].all_reduce(np.ones(3)))
    np.testing.assert_array_equal(totals, 2 * np.ones((2, 3)))
    assert len(tokens) == 2 and len(eavesdropper.heard) > 4 * (32 + 68 + 36) / 2
    for token in tokens:
        assert token.encode() not in eavesdropper.heard
        assert bytes.fromhex(token) not in eavesdropper.heard


def test_a_stranger_in_place_of_a_worker_is_not_believed():
    """It listens at the worker's address, asks, and sends back what it has heard."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def deceive():
            for _ in range(3):
                guest, _ = stranger.accept()
                guest.sendall(b"c" * 32)
                said = guest.recv(1000)
                guest.sendall(bytes(4) + said[36:68])

        threading.Thread(target=deceive, daemon=True).start()
        board = Board(2)

        def connect(rank):
            def exchange(kind, value):
                values = board.of(rank)(kind, value)
                if kind != "open a ring":
                    return values
                return [[*stranger.getsockname(), token] for _, _, token in values]

            return connect_ring(rank, 2, "127.0.0.1", exchange, answer_s=5.0)

        errors = on_all(2, connect)
    assert all("does not know the job's token" in str(error) for error in errors), errors


def test_workers_with_other_secrets_do_not_meet(monkeypatch):
    keys = iter(range(100))
    key_of = ring_opening.key_of
    monkeypatch.setattr(
        ring_opening, "key_of", lambda token: key_of(token, {"TFPARALLEL_SECRET": str(next(keys))})
    )
    errors = connect_all(2, answer_s=5.0)
    assert all("has another TFPARALLEL_SECRET" in str(error) for error in errors), errors


def test_a_rank_that_never_comes_is_missed_in_time(monkeypatch):
    monkeypatch.setattr(ring_opening, "_connect", lambda *_: socket.socket())
    errors = connect_all(2, answer_s=0.3)
    assert all("no rank that knows the token" in str(error) for error in errors), errors
    assert "of ['the previous one', 1]" in str(errors[0])


def test_a_host_that_cannot_be_reached_is_named_by_all():
    errors = connect_all(2, host="127.255.255.255", answer_s=0.3)
    assert all(isinstance(error, ConnectionError) for error in errors), errors
    assert "rank 0 at 127.255.255.255" in str(errors[1])
