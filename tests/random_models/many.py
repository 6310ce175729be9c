"""Trains many random models one after another, a line in a log for each; goes on where it ended.

    nice -n 19 python -m tests.random_models.many models.log --seeds 1004 1024 --count 5

A line is the kind of trial, seed and number of a model, whether it trains as on one device, and the
seconds it took. What a model that does not prints, and the `Trial` that repeats it, are in
`models.log.failures`. One that ended with its process has a line "started" alone: the next run says
KILLED of it and tries it again; of one killed twice it only says so.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import argparse
import itertools
import time
import traceback
from pathlib import Path

import hypothesis

from tests.helpers import open_logical_cpus
from tests.random_models import draw
from tests.random_models.pools import Pools
from tests.random_models.spec import Trial
from tests.random_models.training import assert_trains_as_on_one_device

KINDS = ("local", "pipeline", "sharded", "hybrid", "worker")
STARTED, KILLED = "started", "KILLED"
TRIES = 2  # of a model whose process ends: not for ever one that ends it each time


def main() -> None:
    """Trains what the log has not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), help="first, and one more")
    parser.add_argument("--count", type=int, default=5, help="of models for each kind and seed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    open_logical_cpus(4)
    done = ended(options.log)
    pools = Pools()
    try:
        for seed, kind in itertools.product(range(*options.seeds), options.kinds):
            for number, trial in enumerate(drawn(kind, seed, options.count)):
                name = (kind, str(seed), str(number))
                if name not in done:
                    tell(options.log, name, STARTED)
                    tell(options.log, name, outcome(trial, pools, name, options.log))
    finally:
        pools.close()


def ended(log: Path) -> set[tuple[str, ...]]:
    """The names of models that have nothing left to do; says KILLED of those without an end."""
    lines = log.read_text().splitlines() if log.exists() else []
    told: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        *name, what = line.split(maxsplit=3)
        told.setdefault(tuple(name), []).append(what)
    for name, said in told.items():
        if said[-1] == STARTED:
            tell(log, name, KILLED)
            said.append(KILLED)
    return {
        name for name, said in told.items() if said[-1] != KILLED or said.count(KILLED) == TRIES
    }


def drawn(kind: str, seed: int, count: int) -> list[Trial]:
    """`count` trials, the same ones for a seed, without the simplest one, which comes first."""
    found: list[Trial] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count + 1,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(getattr(draw, f"{kind}_trials")())
    def collect(trial: Trial) -> None:
        found.append(trial)

    collect()
    return found[1:]


def outcome(trial: Trial, pools: Pools, name: tuple, log: Path) -> str:
    """How training went; of a failure, all that is known goes into a file beside the log."""
    started = time.monotonic()
    try:
        assert_trains_as_on_one_device(trial, pools)
        found = "same"
    except Exception as error:
        found = f"FAILED {type(error).__name__}"
        with Path(f"{log}.failures").open("a") as file:
            print(*name, repr(trial), traceback.format_exc(), sep="\n", file=file, flush=True)
    return f"{found} {time.monotonic() - started:.1f} s {trial.distribution}"


def tell(log: Path, name: tuple[str, ...], what: str) -> None:
    """Adds a line."""
    with log.open("a") as file:
        print(*name, what, file=file, flush=True)


if __name__ == "__main__":
    main()
