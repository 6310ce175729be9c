"""The program of a rank on one of several hosts: collectives of its own numbers, saved to a file.

python -m tests.communication.hosts_worker RANK FOLDER ADDRESS...
"""

import sys
import time
from pathlib import Path

import numpy as np

from tfparallel.communication.ring_opening import connect_ring

SIZES = (1, 1000, 300_001)  # among partners, and around the ring


def numbers(rank: int, size: int) -> np.ndarray:
    """What a rank has: whole numbers, whose sums are exact."""
    return np.random.default_rng([rank, size]).integers(-9, 9, size).astype("float32")


def exchange_by_files(rank: int, num_workers: int, folder: Path):
    """`Agreement.exchange`, once for each kind."""

    def exchange(kind: str, value: object) -> list:
        own = folder / f"{kind.replace(' ', '_')}.{rank}"
        own.with_suffix(f".{rank}.part").write_text(repr(value))
        own.with_suffix(f".{rank}.part").rename(own)
        files = [own.with_suffix(f".{other}") for other in range(num_workers)]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: not all ranks wrote {own.stem}")
            time.sleep(0.01)
        return [eval(file.read_text()) for file in files]

    return exchange


def main() -> None:
    """Runs the rank."""
    rank, folder, addresses = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    exchange = exchange_by_files(rank, len(addresses), folder)
    ring = connect_ring(rank, len(addresses), addresses[rank], exchange, 60.0, hosts_first=True)
    results = {}
    for size in SIZES:
        own = numbers(rank, size)
        results[f"sum {size}"] = ring.all_reduce(own)
        results[f"each {size}"] = ring.all_gather_each([own])[0]
        results[f"rows {size}"] = ring.all_gather(own[: size - size * rank // 10])
        rows = np.stack([own + i for i in range(len(addresses))])
        results[f"scattered {size}"] = ring.reduce_scatter(rows)
    np.savez(folder / f"result.{rank}.npz", **results)
    ring.close()


if __name__ == "__main__":
    main()
