"""Times all-reduces and gathers of 2 to 8 ranks by size: ours, the alpha-beta bound, and Gloo.

    python benchmarks/many_ranks.py --torch-python /path/to/venv/bin/python
    sudo python benchmarks/many_ranks.py --mbit 1000      # on two hosts
    python benchmarks/many_ranks.py --ranks 4 8 --sizes 4 64 1024 --rounds 3 --json out.json

Contestants stay up and take turns within every round; what is printed are medians over rounds of
the median call of the slowest rank, and ratios of the same rounds. "ring", "doubling", "halving"
and "hosts" (the ranks of a host first) are ours, told which way; "chosen" and "gather" are ours as
it comes, the gather of as many bytes in all. Ranks are processes on loopback, or with `--mbit` half
of them on each of two hosts, network namespaces with a link of so many megabits a second in each
direction (needs root, `ip`, `tc` and `taskset`).

The bound of one all-reduce of n bytes by N ranks, whatever the algorithm, is
`ceil(log2 N) * latency + 2 (N - 1) / N * n * byte_s` (Thakur et al., IJHPCA 2005), with hosts
instead of ranks in the second term where several ranks share a link. Latency and
byte_s are those of the first and the last rank alone, in this run: half the time of a small round
trip over a socket, and what a megabyte takes more. On one machine, all ranks share its processors
and its memory, which the bound does not know: where those limit, it cannot be reached.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import contestants  # noqa: E402
import network  # noqa: E402
from contestants import Contestant, Running  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

PROGRAM = "many_ranks_contestant.py"
OURS = ("ring", "doubling", "halving", "hosts", "chosen", "gather ring", "gather")
GLOO = {"reduce": "Gloo", "gather": "Gloo gather"}
LONGEST_DOUBLING_BYTES = 4 << 20  # beyond, it only takes time to see that it is slower


def measure(num_ranks: int, hosts: list[network.Host], options: argparse.Namespace) -> dict:
    """Seconds by way, size and round, what the link costs, and what our ring has chosen."""
    times: dict[str, dict[int, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(running("ours", sys.executable, num_ranks, hosts))
        gloo = None
        if options.torch_python:
            gloo = stack.enter_context(running("gloo", options.torch_python, num_ranks, hosts))
        for turn in range(options.rounds):
            for size in (kib << 10 for kib in options.sizes):
                ways = [(ours, way, way) for way in OURS if is_worth(way, size)]
                ways += [(gloo, way, name) for way, name in GLOO.items() if gloo]
                ways = [each for each in ways if each[-1] in options.only]
                first = turn % len(ways)
                for contestant, way, name in ways[first:] + ways[:first]:
                    seconds = timed(contestant, way, size)
                    times.setdefault(name, {}).setdefault(size, []).append(seconds)
        latency_s, byte_s = ours.ask("link")[-1]
        chosen = ours.ask("chosen")[0]
    return {
        "ranks": num_ranks,
        "links": len(hosts) or num_ranks,
        "times": times,
        "latency_s": latency_s,
        "byte_s": byte_s,
        "chosen_bytes": chosen,
    }


def is_worth(way: str, size: int) -> bool:
    """Whether a way is timed at a size."""
    return way != "doubling" or size <= LONGEST_DOUBLING_BYTES


def timed(contestant: Running, way: str, size: int) -> float:
    """The median over calls of the slowest rank's seconds."""
    times = 3 if size > 4 << 20 else 8 if size > 1 << 18 else 30
    ranks = contestant.ask("timed", way=way, size=size, times=times)
    return statistics.median(max(call) for call in zip(*ranks, strict=True))


@contextlib.contextmanager
def running(
    library: str, python: str, num_ranks: int, hosts: list[network.Host]
) -> Iterator[Running]:
    """The processes of one library, one for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        places = [hosts[rank * len(hosts) // num_ranks] for rank in range(num_ranks) if hosts]
        addresses = [each.address for each in places] or ["127.0.0.1"] * num_ranks
        arguments = {"library": library, "addresses": addresses, "folder": folder}
        contestant = Contestant(library, "", num_ranks, PROGRAM, arguments, python=python)
        common = {
            **contestants.base_environment(contestant),
            "TF_NUM_INTRAOP_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        environments = [
            {**common, "GLOO_SOCKET_IFNAME": places[rank].interface if places else "lo"}
            for rank in range(num_ranks)
        ]
        processes = Running(contestant, "", "", environments, [each.prefix for each in places])
        try:
            yield processes
        finally:
            processes.kill()


def bound_s(size: int, result: dict) -> float:
    """The least that an all-reduce takes."""
    messages, links = math.ceil(math.log2(result["ranks"])), result["links"]
    return messages * result["latency_s"] + 2 * (links - 1) / links * size * result["byte_s"]


def print_result(result: dict) -> None:
    """Prints milliseconds, the bound, and ratios of medians of the same rounds."""
    table = Table(
        title=f"{result['ranks']} ranks; chosen: up to {result['chosen_bytes'] >> 10} KB among "
        f"partners; {result['latency_s'] * 1e6:.0f} us, {1e-6 / result['byte_s']:.0f} MB/s; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    names = [name for name in (*OURS, *GLOO.values()) if name in result["times"]]
    for heading in ("size", "bound", *names, "chosen/Gloo", "gather/Gloo", "chosen/bound"):
        table.add_column(heading, justify="right")
    for size in result["times"]["chosen"]:
        table.add_row(
            f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB",
            f"{bound_s(size, result) * 1e3:.3g}",
            *(in_ms(result["times"][name].get(size)) for name in names),
            ratio(result["times"], size, "chosen", "Gloo"),
            ratio(result["times"], size, "gather", "Gloo gather"),
            f"{statistics.median(result['times']['chosen'][size]) / bound_s(size, result):.2f}",
        )
    Console(width=None if Console().is_terminal else 140).print(table)


def in_ms(seconds: list[float] | None) -> str:
    """The median."""
    return "-" if seconds is None else f"{statistics.median(seconds) * 1e3:.3g}"


def ratio(times: dict, size: int, numerator: str, denominator: str) -> str:
    """The median over rounds."""
    if denominator not in times:
        return "-"
    pairs = zip(times[numerator][size], times[denominator][size], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    sizes = [4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="in KB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=int, help="two hosts with such a link; 0: no limit")
    ways = [*OURS, *GLOO.values()]
    parser.add_argument("--only", nargs="+", default=ways, choices=ways, help="and chosen")
    parser.add_argument("--torch-python", help="interpreter that can import torch")
    parser.add_argument("--json", help="also write all numbers to this file")
    options = parser.parse_args()
    options.only = {*options.only, "chosen"}
    if not options.torch_python:
        print("Skipped: Gloo, which needs --torch-python.")
    lack = network.missing() if options.mbit is not None else None
    if lack is not None:
        print(f"Skipped: benchmarks/many_ranks.py --mbit {lack}.")
        return
    results = []
    for num_ranks in options.ranks:
        with contextlib.ExitStack() as stack:
            hosts = []
            if options.mbit is not None:
                hosts = stack.enter_context(network.two_hosts(options.mbit, "cubic"))
            results.append(measure(num_ranks, hosts, options))
            print_result(results[-1])
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
