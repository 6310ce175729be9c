"""Kills a training at random times, as often as asked, and compares every run that got through.

python -m tests.callbacks.kill_many [--kills 200] [--training eager_arrays] [--seed 0]

Three kills of four come at a random time after one of the next saves has begun, so that most of
them fall inside it; the others at any time. A test of minutes, not for every day:
`test_exact_resume.py` has the short one.
"""

import argparse
import collections
import random
import tempfile
import time
from pathlib import Path

from tests.callbacks.results import assert_equal_results
from tests.callbacks.zygote import Zygote

SAVE_S = 0.03  # about what a save takes, and a little of what follows it
STEPS_S = 6.0  # what all steps take, on a busy machine


def kill_many(zygote: Zygote, folder: Path, kills: int, training: str, seed: int) -> str:
    """Kills so often, lets the last process end, compares; returns what was done in words."""
    draw, counts = random.Random(seed), collections.Counter()
    expected, received, backups = folder / "expected.npz", folder / "r.npz", folder / "backups"
    assert zygote.run(training, "", expected, 0) == 0, zygote.log()
    while counts["kills"] < kills:
        if draw.random() < 0.75:
            moment = {
                "kill_after_s": draw.uniform(0, SAVE_S),
                "saves": (backups, draw.choice("123")),
            }
        else:
            moment = {"kill_after_s": draw.uniform(0.2, STEPS_S)}
        status = zygote.run(training, backups, received, 0, **moment)
        assert status in (0, -9), zygote.log()
        if status == -9:
            counts["kills"] += 1
            counts["inside a save"] += any(backups.glob("writing-*"))
            counts["inside a deletion"] += any(backups.glob("deleting-*"))
        else:
            assert_equal_results(expected, received)
            received.unlink()
            counts["runs"] += 1
    assert zygote.run(training, backups, received, 0) == 0, zygote.log()
    assert_equal_results(expected, received)
    assert not backups.exists()
    return (
        f"{counts['kills']} kills, {counts['inside a save']} of them inside a save and "
        f"{counts['inside a deletion']} inside a deletion; {counts['runs'] + 1} runs got through, "
        "with the same bits as the one that nobody killed."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--training", default="eager_arrays")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    zygote, started = Zygote(), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    print(kill_many(zygote, folder, arguments.kills, arguments.training, arguments.seed))
    print(f"{time.monotonic() - started:.0f} s")
    zygote.close()


if __name__ == "__main__":
    main()
