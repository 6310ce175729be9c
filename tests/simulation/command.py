"""The command line of the simulator."""

import argparse
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Sequence

from tests.simulation.schedules import SCENARIOS, Failure, failure_of, shortest, told


def parser() -> argparse.ArgumentParser:
    """What `python -m tests.simulation` takes."""
    options = argparse.ArgumentParser(
        description="Runs the package's protocols in worlds that fail."
    )
    options.add_argument(
        "--scenario", nargs="*", choices=sorted(SCENARIOS), default=sorted(SCENARIOS)
    )
    options.add_argument("--schedules", type=int, help="how many (default: until told to stop)")
    options.add_argument("--minutes", type=float, default=float("inf"))
    options.add_argument("--seed", type=int, default=0, help="of the first schedule")
    options.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--replay", type=int, help="tell one schedule of a scenario, by its seed")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs schedules; 1 if one of them failed."""
    options = parser().parse_args(arguments)
    if options.replay is not None:
        return _replay(options.scenario[0], options.replay)
    started_s, done = time.monotonic(), 0
    with multiprocessing.Pool(options.processes) as pool:
        for failure in pool.imap_unordered(_run, _schedules(options), chunksize=20):
            done += 1
            if failure is not None:
                pool.terminate()
                _tell(failure)
                return 1
            if done % 1000 == 0:
                _count(done, started_s)
            if time.monotonic() - started_s > 60 * options.minutes:
                break
        pool.terminate()
        pool.join()
    _count(done, started_s)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{(used.ru_utime + used.ru_stime) / done * 1000:.1f} ms of a processor each")
    return 0


def _schedules(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    seeds = itertools.count(options.seed)
    pairs = ((scenario, seed) for seed in seeds for scenario in options.scenario)
    return itertools.islice(pairs, options.schedules)


def _run(schedule: tuple[str, int]) -> Failure | None:
    return failure_of(*schedule)


def _count(done: int, started_s: float) -> None:
    passed_s = time.monotonic() - started_s
    print(
        f"{done} schedules in {passed_s:.0f} s, {done / passed_s * 3600:,.0f} an hour", flush=True
    )


def _tell(failure: Failure) -> None:
    short = shortest(failure)
    print(f"{failure.scenario}, seed {failure.seed}: {failure.what}")
    print(
        f"again: python -m tests.simulation --scenario {failure.scenario} --replay {failure.seed}"
    )
    print(f"the shortest that was found ({len(failure.numbers)} draws, now {len(short.numbers)}):")
    print("\n".join(told(short)))


def _replay(scenario: str, seed: int) -> int:
    failure = failure_of(scenario, seed)
    if failure is None:
        print(f"{scenario}, seed {seed}: nothing is wrong")
        return 0
    _tell(failure)
    return 1
