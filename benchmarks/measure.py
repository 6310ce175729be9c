"""Whether `Measure` and `tfparallel doctor` name the true cause: each cause alone, injected.

    python benchmarks/measure.py --json found.json     # all causes, 20 healthy runs; again: goes on
    python benchmarks/measure.py --only map disk       # causes whose names hold one of these
    python benchmarks/measure.py --healthy 20 --only healthy
    python benchmarks/measure.py --cost                # what measuring costs of a step, alone

A training with a fault is right if the fault is named first and, where it is known what the fault
took, its category's share of the wall time differs by at most 3 points from that and what the epoch
before, without the fault, has in that category; `measure_causes.py` says of each fault how it is
known, or why not. Links need root, `ip` and `tc`, the slow disk a C compiler. The cost is that of
a step with and without `Measure`, by turns in one process (`measure_cost.py`), also with the noise
scale; weights are compared bit by bit.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import measure_causes  # noqa: E402
import measure_cost  # noqa: E402
import measure_machines  # noqa: E402
import network  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

POINTS = 0.03
TIMEOUT_S = 240
FAILED = "failed: "
PORTS = (29_751, 29_752)
Row = dict[str, Any]


def training(name: str, is_cured: bool = False) -> Row:
    """One training in processes of its own, with a fault or what helps against it."""
    with tempfile.TemporaryDirectory() as folder, _commands(name, folder, is_cured) as commands:
        processes = [
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for command, env in commands
        ]
        try:
            told = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for line in "".join(out for out, _ in told).splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{name}: no result. It said:\n{told[0][1][-2000:]}")


@contextlib.contextmanager
def _commands(
    name: str, folder: str, is_cured: bool
) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """What runs a training: one process, or two ranks, on hosts of their own if a link is slow."""
    own = [sys.executable, str(FOLDER / "measure_causes.py"), name, folder, *["cured"] * is_cured]
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    if name == "one thread" and not is_cured:
        env["TF_NUM_INTRAOP_THREADS"] = "1"
    if name == "disk":
        env["LD_PRELOAD"] = _slow_disk(folder)
    if name not in measure_causes.OF_RANKS:
        yield [(own, env)]
        return
    env["MEASURE_CPUS"] = "1"
    if "Mbit" not in name:
        yield [(own, env | _tf_config(["127.0.0.1"] * 2, i)) for i in range(2)]
        return
    with network.two_hosts(100, "cubic") as hosts:
        addresses = [host.address for host in hosts]
        yield [
            ([*host.prefix, *own], env | _tf_config(addresses, i)) for i, host in enumerate(hosts)
        ]


def _slow_disk(folder: str) -> str:
    """The library that waits before it reads, of this machine's compiler."""
    library = f"{folder}/slow_disk.so"
    source = str(FOLDER / "slow_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
    return library


def _tf_config(addresses: Iterable[str], index: int) -> dict[str, str]:
    workers = [f"{a}:{port}" for a, port in zip(addresses, PORTS, strict=True)]
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def judged(name: str) -> Row:
    """A training with a fault: whether it was named, and how far its share is off."""
    fault, found = measure_causes.FAULTS[name], training(name)
    is_named = found["cause"] in fault.expected
    row = {"name": name, "expected": fault.expected[0], "cause": found["cause"]}
    if not fault.category:
        return row | {"right": is_named, "unknown": fault.unknown}
    is_right = is_named and abs(found["off"]) <= POINTS
    return row | {"injected": found["injected"], "off": found["off"], "right": is_right}


def healthy(name: str) -> Row:
    """A training that nothing slows down."""
    found = training(name)
    is_right = found["cause"] == "none"
    row = {"name": f"healthy: {name}", "expected": "none", "cause": found["cause"]}
    return row | {"text": found["text"], "right": is_right}


def on_machine(name: str) -> Row:
    """A fault that the doctor finds."""
    fault = measure_machines.FAULTS[name]
    found = fault.examine()
    worst_first = sorted(found, key=lambda each: ("problem", "warning", "ok").index(each["status"]))
    named = [each["check"] for each in worst_first if each["status"] != "ok"]
    before = [each["check"] for each in measure_machines.sound() if each["status"] != "ok"]
    new = [check for check in named if check not in before]
    return {
        "name": f"doctor: {name}",
        "expected": fault.check,
        "cause": ", ".join(new) or "none",
        "right": bool(new) and new[0] == fault.check,
    }


def main() -> None:
    """Runs what is asked for, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs")
    parser.add_argument("--cost", action="store_true", help="the cost only")
    help_of_file = "where each result is written at once; what is in it already is not run again"
    parser.add_argument("--json", type=Path, help=help_of_file)
    args = parser.parse_args()
    if args.cost:
        measure_cost.open_cpus()
        for cost in measure_cost.measured():
            print(cost, flush=True)
        return
    rows = _found(args.json)
    for key, name, run in _all(args.healthy):
        if key in rows or (args.only and not any(each in name for each in args.only)):
            continue
        began_s = time.monotonic()
        rows[key] = _run(run, name) | {"took_s": time.monotonic() - began_s}
        print(_line(rows[key]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))
    Console().print(_table(rows.values()))


def _found(file: Path | None) -> dict[str, Row]:
    """What an earlier call has written, but for trainings that failed, which are run again."""
    if file is None or not file.exists():
        return {}
    rows: dict[str, Row] = json.loads(file.read_text())
    return {key: row for key, row in rows.items() if not row["cause"].startswith(FAILED)}


def _all(num_healthy: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """What tells a run from all others, its name, and the run."""
    for name in measure_causes.FAULTS:
        if "Mbit" in name and (lacks := network.missing()):
            print(f"{name}: left out, it {lacks}")
            continue
        if name == "disk" and shutil.which("cc") is None:
            print(f"{name}: left out, it needs a C compiler, cc")
            continue
        yield name, name, lambda name=name: judged(name)
    for name in measure_machines.FAULTS:
        key = f"doctor: {name}"
        yield key, key, lambda name=name: on_machine(name)
    names = list(measure_causes.HEALTHY)
    for i in range(num_healthy):
        name = names[i % len(names)]
        yield f"healthy {i}", f"healthy: {name}", lambda name=name: healthy(name)


def _run(run: Callable[[], Row], name: str) -> Row:
    try:
        return run()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"name": name, "expected": "", "cause": f"{FAILED}{error}", "right": False}


def _line(row: Row) -> str:
    words = f"; share not checked: {row['unknown']}" if "unknown" in row else ""
    if "off" in row:
        words = f", {row['injected']:.1%} injected, off by {row['off'] * 100:+.1f} points"
    return f"{'right' if row['right'] else 'WRONG'}  {row['name']}: {row['cause']}{words}"


def _table(rows: Iterable[Row]) -> Table:
    rows = list(rows)
    table = Table(title=f"{sum(row['right'] for row in rows)} of {len(rows)} right")
    for title in ("what", "expected", "named", "injected", "off (points)", ""):
        table.add_column(title)
    for row in rows:
        injected = f"{row['injected']:.1%}" if "off" in row else ""
        off = f"{row['off'] * 100:+.1f}" if "off" in row else ""
        mark = "" if row["right"] else "WRONG"
        table.add_row(row["name"], row["expected"], row["cause"][:60], injected, off, mark)
    return table


if __name__ == "__main__":
    if shutil.which("ip") is None:
        print("no `ip`: causes of links are left out")
    main()
