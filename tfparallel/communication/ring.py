"""Ring all-reduce and all-gather of host memory over TCP, between the workers of one job.

Rank r sends to rank r + 1 only. Cut into as many chunks as there are workers, an array goes
round twice: once being summed, once being handed out. Each worker sends and receives
`2 (N - 1) / N` times the array's bytes, however many workers there are.

    step         0          1        ...   N - 2     |   N - 1     ...
    rank r    sends r    sends r-1   ...             |   sends r+1 ...
              adds r-1   adds r-2    ...  adds r+1   |   receives r ...

A chunk is sent on in segments while the rest of it is still coming in.

So many messages one after another take long, of however few bytes: what is small is summed among
partners, whole or in halves (`doubling.py`), up to sizes that follow from what messages and bytes
cost (`alpha_beta.py`).

TensorFlow's own collectives on CPUs do the same over gRPC, at a quarter of the speed
(docs/performance.md): every hop is serialised into messages and copied several times.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; Gibiansky, "Bringing HPC techniques to deep learning", 2017.
"""

import contextlib
import math
import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from tfparallel.communication.alpha_beta import measured_costs, most_small_bytes
from tfparallel.communication.doubling import all_reduce_exchanges, halving_exchanges
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.communication.neighbours import GREETING_BYTES, Neighbours
from tfparallel.communication.page_pool import PagePool

SEGMENT_BYTES = 1 << 19  # stays in a core's cache between receiving, adding and sending
# Up to here an array fits into the sockets' buffers: it is sent at once, no thread has to wake up.
_SENT_AT_ONCE_BYTES = 1 << 14
_NUM_ROWS = struct.Struct("<Q")
_ALIGNMENT = 64  # of TensorFlow's tensors, in bytes
_OWN_PAGES_BYTES = 1 << 18
_pages = PagePool()


class Ring:
    """One worker's place in the ring, which it opens by `ring_opening.connect_ring`.

    Args:
        neighbours: this worker's connections to the next and the previous one, and to partners.
        small_bytes: up to so many are summed among partners; the same on all workers.
        halved_bytes: up to so many are summed in halves among partners, likewise.

    Attributes:
        across: of this worker and those of the same rank in other rings, if each ring has a part of
            the sum only: the chunk that `all_reduce` has summed here is summed there, too, before
            it is handed out.
    """

    def __init__(self, neighbours: Neighbours, small_bytes: int = -1, halved_bytes: int = -1):
        self._neighbours, self.halved_bytes = neighbours, halved_bytes
        self._rank, self._num_workers = neighbours.rank, neighbours.num_workers
        self.small_bytes = small_bytes
        self.across: Ring | None = None
        self._exchanges = all_reduce_exchanges(self._rank, self._num_workers)
        self._scratch = bytearray(SEGMENT_BYTES)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends all connections."""
        self._neighbours.close()

    def journal(
        self, journal: LinkJournal | None = None
    ) -> contextlib.AbstractContextManager[LinkJournal]:
        """As of `Neighbours`."""
        return self._neighbours.journal(journal)

    @property
    def num_workers(self) -> int:
        """How many workers the ring goes through."""
        return self._num_workers

    @property
    def bytes_sent(self) -> int:
        """What this worker has given to its connection since the ring was opened."""
        return self._neighbours.bytes_sent

    @property
    def times(self) -> LinkTimes:
        """What collectives have taken since the ring was opened."""
        return self._neighbours.times

    def measure(self) -> None:
        """Measures the links for a moment, and sets `small_bytes` by it; all workers call it.

        Raises:
            as `all_reduce`.
        """
        now_s = self._neighbours.machine.now_s
        costs = measured_costs(self._sum_among_partners, self._num_workers, now_s)
        self.small_bytes = most_small_bytes(costs, self._num_workers)

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """The sum of all workers' arrays; every worker receives the same bits.

        Every worker calls it, in the same order, with one shape and dtype.

        Raises:
            PeerLostError: if a neighbour ends, or says nothing for `timeout_s`. The ring is closed.
            CollectiveMismatchError: if the previous worker, or a partner, is in another collective.
                Likewise.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        if flat.nbytes <= self.small_bytes:
            return self._sum_among_partners(flat).reshape(array.shape)
        if flat.nbytes <= self.halved_bytes:
            return self._sum_in_halves(flat).reshape(array.shape)
        total = aligned_empty(flat.shape, flat.dtype)
        with self._lock, self._neighbours.closed_on_error():
            send = self._neighbours.put
            if flat.nbytes <= _SENT_AT_ONCE_BYTES:
                send = self._neighbours.send_at_once
            self._neighbours.greet("reduce", flat.nbytes, flat.dtype)
            for segment in self._segments(flat, self._rank):
                send(flat[segment])
            for step in range(self._num_workers - 1):
                for segment in self._segments(flat, self._rank - step - 1):
                    received = self._scratch_for(flat[segment])
                    self._neighbours.receive(received)
                    np.add(flat[segment], received, out=total[segment])
                    if self.across is None or step < self._num_workers - 2:
                        send(total[segment])
            if self.across is not None:
                own = list(self._segments(flat, self._rank + 1))  # the chunk that is summed here
                chunk = slice(own[0].start, own[-1].stop) if own else slice(0)
                total[chunk] = self.across.all_reduce(total[chunk])
                for segment in own:
                    send(total[segment])
            for step in range(self._num_workers - 1):
                for segment in self._segments(flat, self._rank - step):
                    self._neighbours.receive(total[segment])
                    if step < self._num_workers - 2:
                        send(total[segment])
            self._neighbours.flush()  # whoever reads `total` may also overwrite it
        return total.reshape(array.shape)

    def _sum_among_partners(self, flat: np.ndarray, kind: str = "reduce") -> np.ndarray:
        message, total = _message(flat)
        received, addend = _message(flat)
        total[:] = flat
        with self._lock, self._neighbours.closed_on_error():
            greeting = self._neighbours.greet_partners(kind, flat.nbytes, flat.dtype)
            message[:GREETING_BYTES] = greeting
            for i, (partner, sends, receives, adds) in enumerate(self._exchanges):
                self._neighbours.exchange(
                    partner,
                    message if sends else None,
                    received if receives else None,
                    is_first=not i,
                )
                if adds:
                    self._add(partner, addend, total)
                elif receives:
                    total[:] = addend
        return total

    def _sum_in_halves(self, flat: np.ndarray) -> np.ndarray:
        total = aligned_empty(flat.shape, flat.dtype)
        total[:] = flat
        with self._lock, self._neighbours.closed_on_error():
            greeting = self._neighbours.greet_partners("reduce", flat.nbytes, flat.dtype)
            exchanges = halving_exchanges(self._rank, self._num_workers, flat.size)
            for i, (partner, sent, received, adds) in enumerate(exchanges):
                message = answer = None
                if sent is not None:
                    message, part = _message(total[sent])
                    message[:GREETING_BYTES], part[:] = greeting, total[sent]
                if received is not None:
                    answer, incoming = _message(total[received])
                self._neighbours.exchange(partner, message, answer, is_first=not i)
                if adds:
                    self._add(partner, incoming, total[received])
                elif received is not None:
                    total[received] = incoming
        return total

    def _add(self, partner: int, theirs: np.ndarray, own: np.ndarray) -> None:
        """The lower rank's first: also of two NaNs all get the same one."""
        np.add(*((theirs, own) if partner < self._rank else (own, theirs)), out=own)

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """This worker's row of the sum of all workers' arrays, `[num_workers, ...]`.

        The first half of `all_reduce`, of half its bytes; the sum goes on around the ring until it
        is where it belongs. Every worker calls it, in the same order, with one shape and dtype.

        Raises:
            ValueError: if `array` does not have a row for each worker.
            as `all_reduce`.
        """
        self._check_rows(array)
        rows = np.ascontiguousarray(array).reshape(self._num_workers, -1)
        length = SEGMENT_BYTES // rows.itemsize
        segments = [slice(i, i + length) for i in range(0, rows.shape[1], length)]
        total = aligned_empty(rows[0].shape, rows.dtype)
        with self._lock, self._neighbours.closed_on_error():
            self._neighbours.greet("scatter", rows.nbytes, rows.dtype)
            for segment in segments:
                self._neighbours.put(rows[self._rank - 1, segment])
            for step in range(self._num_workers - 1):
                own = rows[(self._rank - step - 2) % self._num_workers]
                partial = (
                    total
                    if step == self._num_workers - 2
                    else aligned_empty(total.shape, total.dtype)
                )
                for segment in segments:
                    received = self._scratch_for(own[segment])
                    self._neighbours.receive(received)
                    np.add(own[segment], received, out=partial[segment])
                    if partial is not total:
                        self._neighbours.put(partial[segment])
            self._neighbours.flush()
        return (rows[0] if self._num_workers == 1 else total).reshape(array.shape[1:])

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The rows of all workers' arrays, in the order of ranks.

        Every worker calls it, in the same order, with `[rows, ...]` of one dtype; only the number
        of rows may differ. `all_gather(x[np.newaxis])` of equal shapes is `[num_workers, ...]`.
        Each worker sends what it has and passes on what it receives, `N - 1` times.

        Raises:
            as `all_reduce`.
        """
        array = np.ascontiguousarray(array)
        row_bytes = array.itemsize * math.prod(array.shape[1:])
        parts = {self._rank: array}
        with self._lock, self._neighbours.closed_on_error():
            self._neighbours.greet("gather", row_bytes, array.dtype)
            for step in range(self._num_workers - 1):
                outgoing = parts[(self._rank - step) % self._num_workers]
                self._neighbours.put(np.frombuffer(_NUM_ROWS.pack(len(outgoing)), np.uint8))
                self._neighbours.put(outgoing.reshape(-1))
                num_rows = np.empty(_NUM_ROWS.size, np.uint8)
                self._neighbours.receive(num_rows)
                shape = (*_NUM_ROWS.unpack(num_rows.tobytes()), *array.shape[1:])
                incoming = np.empty(shape, array.dtype)
                self._neighbours.receive(incoming.reshape(-1))
                parts[(self._rank - step - 1) % self._num_workers] = incoming
            self._neighbours.flush()
        return np.concatenate([parts[rank] for rank in range(self._num_workers)])

    def all_gather_each(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each array `[length]` all workers', by rank: `[num_workers * length]`.

        One collective for all of them. What comes is received where it belongs, so that nothing is
        allocated but the results, which TensorFlow takes as they are. Small ones are summed among
        partners, as bytes, of which each worker's are zero but its own: log2 N messages instead of
        N. Every worker calls it, in the same order, with the same lengths and dtypes.

        Raises:
            as `all_reduce`.
        """
        if self._is_gathered_among_partners(arrays):
            return self._gather_among_partners(arrays)
        results = [aligned_empty((self._num_workers, x.size), x.dtype) for x in arrays]
        for result, array in zip(results, arrays, strict=True):
            result[self._rank] = array.reshape(-1)
        size_bytes = sum(array.nbytes for array in arrays)
        with self._lock, self._neighbours.closed_on_error():
            self._neighbours.greet("gathers", size_bytes, np.dtype(np.uint8))
            for step in range(self._num_workers - 1):
                for result in results:
                    self._neighbours.put(result[(self._rank - step) % self._num_workers])
                for result in results:
                    self._neighbours.receive(result[(self._rank - step - 1) % self._num_workers])
            self._neighbours.flush()
        return [result.reshape(-1) for result in results]

    def _check_rows(self, array: np.ndarray) -> None:
        if not array.shape or array.shape[0] != self._num_workers:
            raise ValueError(
                f"reduce_scatter needs a row for each of {self._num_workers} workers. Received: "
                f"shape {array.shape}. (Rank {self._neighbours.names[self._rank]} is speaking.)"
            )

    def _is_gathered_among_partners(self, arrays: Sequence[np.ndarray]) -> bool:
        """Half of what is small in a sum: around the ring a gather takes half as many messages."""
        return 2 * self._num_workers * sum(array.nbytes for array in arrays) <= self.small_bytes

    def _gather_among_partners(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        own = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        ends = np.cumsum([0, *(each.size for each in own)])
        rows = np.zeros((self._num_workers, ends[-1]), np.uint8)
        rows[self._rank] = np.concatenate([np.empty(0, np.uint8), *own])
        rows = self._sum_among_partners(rows.reshape(-1), "gathers").reshape(rows.shape)
        results = [aligned_empty((self._num_workers * x.size,), x.dtype) for x in arrays]
        for result, begin, end in zip(results, ends, ends[1:], strict=False):
            result.view(np.uint8).reshape(self._num_workers, end - begin)[:] = rows[:, begin:end]
        return results

    def _segments(self, flat: np.ndarray, chunk: int) -> Iterator[slice]:
        """The pieces of chunk number `chunk`, modulo the number of workers."""
        chunk %= self._num_workers
        begin = flat.size * chunk // self._num_workers
        end = flat.size * (chunk + 1) // self._num_workers
        length = SEGMENT_BYTES // flat.itemsize
        for start in range(begin, end, length):
            yield slice(start, min(start + length, end))

    def _scratch_for(self, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self._scratch, like.dtype, like.size)


def _message(like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Room for a greeting and an array of this shape and type: all in bytes, and the array."""
    memory = aligned_empty((_ALIGNMENT + like.nbytes,), np.dtype(np.uint8))
    return memory[_ALIGNMENT - GREETING_BYTES :], memory[_ALIGNMENT:].view(like.dtype)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """As `np.empty`, at an address at which TensorFlow takes an array without a copy.

    Large ones are in pages of a pool, which has them back when nobody holds the array any more,
    TensorFlow neither.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes >= _OWN_PAGES_BYTES:
        memory = _pages.empty(size_bytes)
    else:
        memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size_bytes].view(dtype).reshape(shape)
