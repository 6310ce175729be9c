"""A rank that all-reduces or gathers by our ring or by torch's Gloo, as told by `many_ranks.py`.

It imports torch, or our ring, and nothing of the other.
"""

import functools
import json
import socket
import statistics
import time
from pathlib import Path

import numpy as np
import protocol

LINK_BYTES = 1 << 20


class Rank:
    """What `many_ranks.py` asks of a process; ranks meet at files of a folder.

    Args:
        rank, num_workers: its place.
        addresses: of all ranks.
        folder: where ranks meet.
        library: "ours" or "gloo".
    """

    def __init__(self, *, rank, num_workers, addresses, folder, library, **_):
        self._rank, self._num_workers, self._folder = rank, num_workers, folder
        self._addresses = addresses
        self._open_ours() if library == "ours" else self._open_gloo()

    def timed(self, way: str, size: int, times: int) -> list[float]:
        """Seconds of each of `times` collectives of `size` bytes, after two to warm up.

        Raises:
            ArithmeticError: if a result is wrong.
        """
        array = np.full(size // 4, self._rank + 1, "float32")
        collective = self._ways[way]
        expected = self._num_workers * (self._num_workers + 1) // 2
        if way.startswith("gather"):
            array, expected = array[: max(1, array.size // self._num_workers)], self._num_workers
        last = float(np.asarray(collective(array)).ravel()[-1])
        if last != expected:
            raise ArithmeticError(f"Expected {expected} by {way}. Received: {last}.")
        return protocol.timed_steps(lambda: collective(array), times, 1)["wall_s"]

    def chosen(self) -> int:
        """Up to how many bytes our ring sums among partners, by its own measurement."""
        return self._chosen

    def link(self) -> list[float]:
        """Latency in seconds, and seconds a byte, between the first and the last rank."""
        with socket.create_server((self._addresses[self._rank], 0)) as server:
            host, port = self._exchange("link", server.getsockname())[0]
            if 0 < self._rank < self._num_workers - 1:
                return []
            accepts = self._rank == 0
            connection = server.accept()[0] if accepts else socket.create_connection((host, port))
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small_s = statistics.median(self._round_trip_s(connection, 4) for _ in range(50))
            large_s = statistics.median(
                self._round_trip_s(connection, LINK_BYTES) for _ in range(5)
            )
        return [small_s / 2, (large_s - small_s) / LINK_BYTES]

    def _round_trip_s(self, connection: socket.socket, size: int) -> float:
        """Of so many bytes there, and one back."""
        began = time.perf_counter()
        if self._rank:
            connection.sendall(bytes(size))
            connection.recv(1)
        else:
            left = size
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(b"x")
        return time.perf_counter() - began

    def _open_ours(self) -> None:
        from tfparallel.communication.ring import Ring
        from tfparallel.communication.ring_opening import connect_ring

        place = self._rank, self._num_workers, self._addresses[self._rank]
        ring = connect_ring(*place, self._exchange, 120.0, hosts_first=True)
        self._chosen = ring.small_bytes

        def told(collective, small_bytes, halved_bytes):
            def call(array):
                ring.small_bytes, ring.halved_bytes = small_bytes, halved_bytes
                return collective(array)

            return call

        def gather(array):
            return ring.all_gather_each([array])[0]

        chosen = ring.small_bytes, ring.halved_bytes
        self._ways = {
            "ring": told(functools.partial(Ring.all_reduce, ring), -1, -1),
            "hosts": told(ring.all_reduce, -1, -1),
            "doubling": told(ring.all_reduce, 1 << 40, -1),
            "halving": told(functools.partial(Ring.all_reduce, ring), -1, 1 << 40),
            "chosen": told(ring.all_reduce, *chosen),
            "gather ring": told(gather, -1, -1),
            "gather": told(gather, *chosen),
        }

    def _open_gloo(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = f"file://{self._folder}/gloo"
        dist.init_process_group(
            "gloo", init_method=store, rank=self._rank, world_size=self._num_workers
        )

        def reduce(array):
            tensor = torch.from_numpy(array.copy())
            dist.all_reduce(tensor)
            return tensor.numpy()

        def gather(array):
            whole = torch.empty(self._num_workers * array.size)
            dist.all_gather_into_tensor(whole, torch.from_numpy(array))
            return whole.numpy()

        self._ways = {"reduce": reduce, "gather": gather}

    def _exchange(self, kind: str, value: object) -> list:
        """`Agreement.exchange` by files."""
        name = kind.replace(" ", "_")
        paths = [Path(self._folder, f"{name}.{rank}") for rank in range(self._num_workers)]
        draft = paths[self._rank].with_name(f"draft.{self._rank}")
        draft.write_text(json.dumps(value))
        draft.rename(paths[self._rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]


if __name__ == "__main__":
    protocol.serve(Rank)
