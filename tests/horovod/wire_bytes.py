"""A rank that counts what a network of its own carries in collectives, over the least there is.

Ranks meet in a folder before and after a count: Horovod's barrier would send, too.

    python -m tests.horovod.wire_bytes FOLDER
"""

import sys
import time
from pathlib import Path

import tensorflow as tf

import tfparallel
from tfparallel.communication.horovod_collectives import HorovodCollectives

NUMBERS, TIMES = 1 << 20, 3


def bytes_sent() -> int:
    """By the loopback interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (own,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(own[8])


def meet(name: str, rank: int, size: int) -> None:
    folder = Path(sys.argv[1])
    (folder / f"{name}_{rank}").touch()
    deadline = time.monotonic() + 60
    while not all((folder / f"{name}_{i}").exists() for i in range(size)):
        assert time.monotonic() < deadline, name
        time.sleep(0.001)


def counted(name: str, collectives: HorovodCollectives, tensor: tf.Tensor) -> float:
    """Bytes of a call, over those of all rows but a rank's own from each of the ranks."""
    size, rank = collectives.size, collectives.index
    call = tf.function(getattr(collectives, name), autograph=False)
    call(tensor)
    meet(f"{name} begins", rank, size)
    before = bytes_sent()
    meet(f"{name} goes on", rank, size)
    for _ in range(TIMES):
        call(tensor)
    meet(f"{name} ends", rank, size)
    sent = bytes_sent() - before
    meet(f"{name} is counted", rank, size)
    return sent / TIMES / (4 * NUMBERS * (size - 1))


if __name__ == "__main__":
    own = tfparallel.HorovodStrategy().extended._collectives
    rows = tf.ones([own.size, NUMBERS // own.size])
    for asked, given in (("all_gather", rows[:1]), ("reduce_scatter", rows), ("all_reduce", rows)):
        print("RATIO", asked, f"{counted(asked, own, given):.4f}", flush=True)
