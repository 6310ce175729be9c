"""All-reduces of a thousand ranks: the ring's own code, on links and clocks that are played.

    python benchmarks/thousand_ranks.py
    python benchmarks/thousand_ranks.py --ranks 64 1024 --ranks-of-host 1 8 --sizes 4 1024

For every number of ranks and size: milliseconds that an all-reduce takes around the ring, by
recursive doubling, in halves, with the ranks of a host first and rings of hosts, and as
`connect_ring` would have it; the alpha-beta bound of N ranks on H hosts,
`ceil(log2 N) * latency + 2 (H - 1) / H * size * byte_s`; and how many times that the chosen way
takes. Sums are checked. Nothing is measured, so figures do not depend on the machine:
`tests/communication/simulated_links.py` says what is played.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.communication.simulated_links import Links, World, ring_of, ring_of_one_kind
from tfparallel.communication.alpha_beta import LinkCosts
from tfparallel.communication.ring import Ring
from tfparallel.communication.ring_opening import NOTHING

ALL = 1 << 40  # bytes
WAYS = {
    "ring": partial(ring_of_one_kind, small_bytes=NOTHING, halved_bytes=NOTHING),
    "doubling": partial(ring_of_one_kind, small_bytes=ALL, halved_bytes=NOTHING),
    "halving": partial(ring_of_one_kind, small_bytes=NOTHING, halved_bytes=ALL),
    "hosts": partial(ring_of, around=True),
    "chosen": ring_of,
}
WITHIN = LinkCosts(10e-6, 1 / 4e9)  # of sockets between processes of one host


def main() -> None:
    """Prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 128, 1000])
    parser.add_argument("--ranks-of-host", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 64, 1024], help="in KB")
    parser.add_argument("--gbit", type=float, default=10.0, help="of a host's link")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message to a host")
    options = parser.parse_args()
    across = LinkCosts(options.latency_us * 1e-6, 8e-9 / options.gbit)
    for num_ranks in options.ranks:
        for ranks_of_host in options.ranks_of_host:
            links = Links(across, WITHIN, ranks_of_host)
            title = f"{num_ranks} ranks, {ranks_of_host} a host; ms"
            table = Table(title=title)
            for heading in ("KB", *WAYS, "bound", "chosen/bound", "messages"):
                table.add_column(heading, justify="right")
            for size in options.sizes:
                row = [played(num_ranks, links, size << 10, make) for make in WAYS.values()]
                bound_s = least_s(num_ranks, links, size << 10)
                chosen_s, messages = row[-1]
                table.add_row(
                    str(size),
                    *(f"{seconds * 1e3:.3g}" for seconds, _ in row),
                    f"{bound_s * 1e3:.3g}",
                    f"{chosen_s / bound_s:.2f}",
                    str(messages),
                )
            Console(width=None if Console().is_terminal else 120).print(table)


def played(
    num_ranks: int, links: Links, size_bytes: int, make: Callable[[World, int], Ring]
) -> tuple[float, int]:
    """Seconds of one all-reduce, and messages of a rank in the mean."""
    world = World(num_ranks, links)

    def of_rank(rank: int) -> bool:
        own = np.full(size_bytes, rank % 7, np.uint8)
        total = make(world, rank).all_reduce(own)
        return bool((total == sum(each % 7 for each in range(num_ranks)) % 256).all())

    are_right, seconds = world.run(of_rank)
    if not all(are_right):
        sys.exit(f"A sum of {num_ranks} ranks is wrong.")
    return seconds, world.num_messages // num_ranks


def least_s(num_ranks: int, links: Links, size_bytes: int) -> float:
    """What an all-reduce takes at least."""
    num_hosts = math.ceil(num_ranks / links.ranks_of_host)
    messages = math.ceil(math.log2(num_hosts)) * links.across.latency_s
    messages += math.ceil(math.log2(links.ranks_of_host)) * links.within.latency_s
    return messages + 2 * (num_hosts - 1) / num_hosts * size_bytes * links.across.byte_s


if __name__ == "__main__":
    main()
