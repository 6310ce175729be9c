"""What a step waits for a link: one that sleeps, between units whose computing sleeps.

    python benchmarks/sharded_link.py                    # seconds

Each gather takes `--link-s`, each forward or backward pass of a unit `--compute-s`, asleep, so that
a busy machine changes little. In `predict` all gathers but the first may hide behind computing.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "32")  # each sleeper has one

import numpy as np
import pytest

from tests.helpers import open_logical_cpus
from tests.sharded.watched_link import WIDTH, chain


def main() -> None:
    """Prints a line for each `prefetch`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--link-s", type=float, default=0.2)
    parser.add_argument("--compute-s", type=float, default=0.2)
    options = parser.parse_args()
    open_logical_cpus(2)
    computing = options.units * options.compute_s
    print(f"{options.units} units, gather {options.link_s} s, compute {options.compute_s} s")
    print(f"computing alone {computing:.2f} s; one after the other "
          f"{computing + options.units * options.link_s:.2f} s")  # fmt: skip
    for prefetch in (0, 1, 2):
        print(f"prefetch={prefetch}: predict {predict_s(options, prefetch):.2f} s")


def predict_s(options: argparse.Namespace, prefetch: int) -> float:
    """The median of three predictions after the first."""
    rows = np.zeros((4, WIDTH), "float32")
    with pytest.MonkeyPatch.context() as patch:
        model = chain(
            options.units,
            lambda replica, unit: time.sleep(options.link_s),
            lambda replica, unit: time.sleep(options.compute_s),
            patch,
            prefetch=prefetch,
        )
        model.predict_on_batch(rows)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model.predict_on_batch(rows)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
