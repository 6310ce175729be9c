"""Productive time over wall time of a job through all its restarts, and what was lost by name.

A ledger beside the backups holds a line for each run that starts, and one each second that tells
what the run has spent so far. Lines are appended whole, so a run that is killed loses what it did
since the last one, which counts as lost with it:

    run 0   start |waiting for workers|tracing| steps ........x killed
    down                                   |.......|
    run 1                                          start |restoring| repeated steps | steps .... end

Steps that a resumed run does again were in vain the first time.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FILE = "goodput.jsonl"
# What of a step moves the training on; waiting within it is part of doing it in parallel.
PRODUCTIVE = ("compute", "communication", "bubble", "imbalance")
LOST = (
    "start",
    "waiting for workers",
    "restoring",
    "tracing",
    "input",
    "host",
    "saving",
    "validation",
    "repeated steps",
    "down",
)


@dataclass(frozen=True)
class Goodput:
    """A job so far.

    Attributes:
        wall_s: from the first process's start to the last line of the ledger.
        productive_s: of it, in steps that count.
        lost_s: the rest, by name; with the productive time it sums to `wall_s`.
        runs: how many there were.
        steps: that the training has moved on.
    """

    wall_s: float
    productive_s: float
    lost_s: Mapping[str, float]
    runs: int
    steps: int

    @property
    def share(self) -> float:
        """Productive over wall time."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def __str__(self) -> str:
        largest = sorted(self.lost_s.items(), key=lambda item: -item[1])[:3]
        lost = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in largest if seconds > 0.05)
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return (
            f"goodput {self.share:.0%}: {self.productive_s:.1f} of {self.wall_s:.1f} s over {runs}"
            + (f"; lost: {lost}" if lost else "")
        )


class Ledger:
    """Where a run writes what it has spent.

    Args:
        folder: one for all runs of a job, that outlives them.
        started_at: when the process started, seconds since 1970.
        every_s: how often a line is written at most.
    """

    def __init__(self, folder: Path, started_at: float, every_s: float = 1.0):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._every_s, self._last_s = every_s, 0.0
        lines = read_ledger(folder)
        self._run = 1 + max((line["run"] for line in lines), default=-1)
        self._append({"kind": "start", "at": started_at})

    @property
    def is_due(self) -> bool:
        """Whether it is time for a line."""
        return time.monotonic() - self._last_s >= self._every_s

    def write(self, step: int, seconds: Mapping[str, float]) -> None:
        """What the run has spent so far.

        Args:
            step: of the training, over all runs.
            seconds: by category since the process started.
        """
        self._last_s = time.monotonic()
        self._append({"kind": "beat", "at": time.time(), "step": step, "seconds": dict(seconds)})

    def _append(self, line: Mapping[str, object]) -> None:
        text = json.dumps({"run": self._run, **line}, allow_nan=False).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, text)
        finally:
            os.close(file)


def process_started_at() -> float:
    """When this process started, seconds since 1970.

    The start is kept in seconds since the machine's start, exactly, but the time of that start in
    whole seconds (`btime` in proc(5)), so that psutil's sum is up to a second early.
    """
    started_at, booted_at = psutil.Process().create_time(), psutil.boot_time()
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return started_at
    return started_at - booted_at + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """All whole lines; a run that was killed while it wrote leaves half a one."""
    path = folder / FILE
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def goodput(lines: Sequence[Mapping[str, Any]]) -> Goodput:
    """What a ledger's lines add up to.

    Args:
        lines: of `read_ledger`, at least one.
    """
    runs: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        runs.setdefault(line["run"], []).append(line)
    lost = dict.fromkeys(LOST, 0.0)
    productive_s, last_at, reached = 0.0, None, 0
    before: list[tuple[int, float]] = []  # of the run before: step, productive seconds until it
    for own in runs.values():
        started_at, beats = own[0]["at"], [line for line in own if line["kind"] == "beat"]
        if last_at is not None:
            lost["down"] += max(0.0, started_at - last_at)
            started_at = max(started_at, last_at)
        last_at = own[-1]["at"]
        if not beats:
            lost["start"] += max(0.0, last_at - started_at)
            continue
        repeated_s = _after(before, beats[0]["step"])
        productive_s -= repeated_s
        lost["repeated steps"] += repeated_s
        spent = beats[-1]["seconds"]
        own_productive_s = sum(spent.get(name, 0.0) for name in PRODUCTIVE)
        productive_s += own_productive_s
        for name, seconds in spent.items():
            if name not in PRODUCTIVE:
                lost[name] = lost.get(name, 0.0) + seconds
        lost["start"] += max(0.0, last_at - started_at - sum(spent.values()))
        before = [(b["step"], sum(b["seconds"].get(n, 0.0) for n in PRODUCTIVE)) for b in beats]
        reached = before[-1][0]
    wall_s = (last_at or 0.0) - lines[0]["at"]
    return Goodput(wall_s, productive_s, lost, len(runs), reached)


def _after(beats: Sequence[tuple[int, float]], step: int) -> float:
    """Productive seconds that a run spent behind `step`, between two lines in proportion."""
    if not beats or beats[-1][0] <= step:
        return 0.0
    for (first, began_s), (second, ended_s) in zip(beats, beats[1:], strict=False):
        if first <= step < second:
            share = (step - first) / (second - first)
            return beats[-1][1] - (began_s + share * (ended_s - began_s))
    return beats[-1][1] - beats[0][1]
