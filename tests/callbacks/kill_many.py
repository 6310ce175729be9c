"""Kills a training at random times, as often as asked, and compares every run that got through.

python -m tests.callbacks.kill_many [--kills 200] [--training plain_arrays]

A test of minutes, not for every day: `test_exact_resume.py` has the short one.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from tests.callbacks.test_exact_resume import assert_equal_results
from tests.callbacks.zygote import Zygote


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--training", default="plain_arrays")
    arguments = parser.parse_args()
    zygote, draw = Zygote(), random.Random()
    folder = Path(tempfile.mkdtemp())
    expected, received, backups = folder / "expected.npz", folder / "r.npz", folder / "backups"
    started = time.monotonic()
    assert zygote.run(arguments.training, "", expected, 0) == 0
    longest_s = 2 * (time.monotonic() - started)
    kills = kills_inside_a_save = runs = 0
    while kills < arguments.kills:
        delay = draw.uniform(0.2 * longest_s, longest_s)
        if zygote.run(arguments.training, backups, received, 0, kill_after_s=delay) == -9:
            kills += 1
            kills_inside_a_save += any(backups.glob("writing-*"))
        else:
            assert_equal_results(expected, received)
            received.unlink()
            runs += 1
    assert zygote.run(arguments.training, backups, received, 0) == 0, zygote.log()
    assert_equal_results(expected, received)
    print(
        f"{kills} kills, {kills_inside_a_save} of them inside a save; {runs + 1} runs got through"
    )
    print("and all ended with the same bits as the one that nobody killed.")
    zygote.close()


if __name__ == "__main__":
    main()
