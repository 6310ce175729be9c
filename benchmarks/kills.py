"""Kills trainings again and again, and compares what they end with to the bit.

Each of four kinds of model and data under each of seven strategies is trained once undisturbed.
Then it is trained in lives: a life is killed several times, by SIGKILL or SIGTERM, in any of its
processes, after a batch that is drawn, or at a moment inside a save; each time the same command
starts it again, and in the end it is let through. All that it ends with (weights, slots, seeds,
History, what callbacks have drawn) is compared. Workers that update parameter servers
asynchronously never do the same twice: there the number of updates, of epochs and what callbacks
have counted is compared.

    python benchmarks/kills.py --kills 300 --json kills.json
    python benchmarks/kills.py --kills 4 --only gan/horovod cnn/mirrored

A process that has imported TensorFlow forks every training, so a kill costs what its steps cost.
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from tests.callbacks.results import assert_equal_results
from tests.callbacks.zygote import Zygote
from tests.multi_process.pool import cluster_environments, horovod_environments

WORKLOADS = ("cnn", "tf_data", "py_dataset", "gan")
STRATEGIES = (
    "one_device",
    "mirrored",
    "pipeline",
    "multi_worker",
    "horovod",
    "servers_sync",
    "servers_async",
)
KILLS_OF_A_LIFE = 8
LONGEST_BATCHES = 4  # of a process that is killed after a batch
SAVE_S = 0.05  # about what a save takes
SIGKILL, SIGTERM = 9, 15
EXIT_STATUS = 143


@dataclass
class Tally:
    """What was done to one training, and what came of it."""

    kills: collections.Counter = field(default_factory=collections.Counter)
    lives: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """How often a process was killed that did not end by itself before."""
        return sum(self.kills.values())


class Campaign:
    """Kills trainings.

    Args:
        folder: for backups and results.
        seed: draws what is killed when.
    """

    def __init__(self, folder: Path, seed: int):
        self._folder, self._draw = folder, random.Random(seed)
        self._zygote = Zygote("tests.callbacks.workloads")
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)

    def close(self) -> None:
        """Ends the process that forks."""
        self._zygote.close()

    def live(self, name: str, variant: int, num_kills: int) -> None:
        """One life of the training `name`, compared with one that nobody kills.

        Args:
            name: "workload/strategy".
            variant: draws its data.
            num_kills: how often it is killed; fewer where it ends before.
        """
        tally, folder = self.tallies[name], Path(tempfile.mkdtemp(dir=self._folder))
        statuses = self._run(name, variant, "", folder / "expected")
        if any(statuses):
            raise RuntimeError(f"{name}, undisturbed: {statuses}\n{self._zygote.log()[-6000:]}")
        for _ in range(num_kills):
            kind, how = self._moment(name, folder / "backups")
            statuses = self._run(name, variant, folder / "backups", folder / "received", **how)
            if not any(statuses):
                break
            tally.kills[kind] += 1
            if not set(statuses) & {-SIGKILL, EXIT_STATUS}:
                tally.different.append(f"life {variant}: statuses {statuses}")
        if any(statuses):
            statuses = self._run(name, variant, folder / "backups", folder / "received")
        tally.lives += 1
        problem = f"statuses {statuses}" if any(statuses) else self._difference(name, folder)
        if problem:
            tally.different.append(f"life {variant}: {problem}")
            print(f"{name}: {problem}\n{self._zygote.log()[-6000:]}", flush=True)

    def _moment(self, name: str, backups: Path) -> tuple[str, dict]:
        """What kills the next process, and when."""
        ranks, victim = _num_processes(name), self._draw.randrange(_num_processes(name))
        kind = self._draw.choice(["SIGKILL after a batch", "SIGTERM", "SIGKILL inside a save"])
        if kind == "SIGKILL inside a save":
            saves = (backups, self._draw.choice("123"))
            return kind, {"saves": saves, "kill_after_s": self._draw.uniform(0, SAVE_S)}
        number = SIGTERM if kind == "SIGTERM" else SIGKILL
        text = f"{number} after {self._draw.randint(1, LONGEST_BATCHES)}"
        return kind, {"signals": ["" if rank != victim else text for rank in range(ranks)]}

    def _run(
        self,
        name: str,
        variant: int,
        backups: Path | str,
        results: Path,
        signals: Sequence[str] = ("", ""),
        **moment: Any,
    ) -> list[int]:
        workload, strategy = name.split("/")
        calls = [
            (
                workload,
                strategy,
                variant,
                backups,
                f"{results}-{rank}.npz",
                signals[rank],
                variables,
            )
            for rank, variables in enumerate(_environments(strategy))
        ]
        return self._zygote.run_together("train", calls, **moment)

    def _difference(self, name: str, folder: Path) -> str:
        """What differs from the life that nobody disturbed, in words; "" if nothing does."""
        for rank in range(_num_processes(name)):
            expected, received = (folder / f"{x}-{rank}.npz" for x in ("expected", "received"))
            try:
                if name.endswith("_async"):
                    _assert_equal_counts(expected, received)
                else:
                    assert_equal_results(expected, received)
            except AssertionError as error:
                return f"rank {rank} differs: {str(error)[:1000]}"
        return "backups were left" if (folder / "backups").exists() else ""


def _num_processes(name: str) -> int:
    return 2 if name.endswith(("/multi_worker", "/horovod")) else 1


def _environments(strategy: str) -> list[str]:
    """The variables of each process, as JSON."""
    environments: list[dict[str, str]] = [{}]
    if strategy == "multi_worker":
        environments = cluster_environments(2)
    if strategy == "horovod":
        environments = horovod_environments(2)
    return [json.dumps(each) for each in environments]


def _assert_equal_counts(expected_path: Path, received_path: Path) -> None:
    """Updates, epochs, batches that callbacks were told of; sizes of all the rest."""
    expected, received = np.load(expected_path), np.load(received_path)
    shapes = [{name: each[name].shape for name in each} for each in (expected, received)]
    assert shapes[0] == shapes[1]
    integers = [n for n in expected if np.issubdtype(expected[n].dtype, np.integer)]
    assert any(name.startswith("optimizer") for name in integers)
    assert {n: expected[n].tolist() for n in integers} == {
        n: received[n].tolist() for n in integers
    }


def run(names: Sequence[str], kills: int, seed: int, folder: Path, minutes: float) -> Campaign:
    """Kills each of `names` in turn, until there were so many kills, or the time is over."""
    campaign, ends_s = Campaign(folder, seed), time.monotonic() + 60 * minutes
    variant = seed
    try:
        while sum(each.num_kills for each in campaign.tallies.values()) < kills:
            for name in names:
                if time.monotonic() < ends_s:
                    campaign.live(name, variant, KILLS_OF_A_LIFE)
                    tally = campaign.tallies[name]
                    print(f"{name}: {tally.num_kills} kills, {tally.lives} lives", flush=True)
            variant += 1
            if time.monotonic() >= ends_s:
                break
    finally:
        campaign.close()
    return campaign


def table(tallies: dict[str, Tally]) -> str:
    """A row for each training, in Markdown."""
    kinds = ["SIGKILL after a batch", "SIGKILL inside a save", "SIGTERM"]
    lines = [f"| training | {' | '.join(kinds)} | lives | different |", "|---" * 6 + "|"]
    for name, tally in tallies.items():
        counts = " | ".join(str(tally.kills[kind]) for kind in kinds)
        lines.append(f"| `{name}` | {counts} | {tally.lives} | {len(tally.different)} |")
    totals = " | ".join(str(sum(t.kills[kind] for t in tallies.values())) for kind in kinds)
    lives = sum(tally.lives for tally in tallies.values())
    different = sum(len(tally.different) for tally in tallies.values())
    return "\n".join([*lines, f"| **all** | {totals} | {lives} | {different} |"])


def all_names() -> list[str]:
    """Of all trainings."""
    return [f"{workload}/{strategy}" for workload in WORKLOADS for strategy in STRATEGIES]


def main() -> None:
    """Kills, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=all_names(), metavar="WORKLOAD/STRATEGY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=240.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = (arguments.kills, arguments.seed, Path(folder), arguments.minutes)
        tallies = dict(run(arguments.only, *options).tallies)
    print(table(tallies))
    if arguments.json:
        figures = {
            n: {"kills": dict(t.kills), "lives": t.lives, "different": t.different}
            for n, t in tallies.items()
        }
        arguments.json.write_text(json.dumps(figures, indent=1))
    sys.exit(any(tally.different for tally in tallies.values()))


if __name__ == "__main__":
    main()
