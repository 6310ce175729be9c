"""Times data-parallel training: tfparallel against TensorFlow's own strategies and torch DDP.

    python benchmarks/data_parallel.py                     # everything, about 15 minutes on 2 cores
    python benchmarks/data_parallel.py --quick --models mlp
    python benchmarks/data_parallel.py --torch-python /path/to/venv/bin/python --json out.json

torch is an extra of this benchmark only: `pip install torch==2.13.0` (CPU) in any environment.

Machines are noisy, and shared. So contestants take turns (A B C A B C ...) within one run, each in
processes of its own that stay up and sleep between turns. What is compared is the median over
rounds of a contestant's step time divided by tfparallel's in the same round.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import contestants  # noqa: E402
import report  # noqa: E402
from contestants import Contestant, Running, running  # noqa: E402
from problems import COMPARED_STEPS, PROBLEMS, Problem  # noqa: E402

WARMUP_STEPS = 3  # of every turn: caches hold another contestant's data


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; the exit status is 1 if contestants did not train alike."""
    options = _parse(arguments)
    chosen, notes = _choose(options)
    if all(contestant.program == contestants.TORCH for contestant in chosen):
        raise SystemExit(f"--only {options.only}: none is left that gives others its weights.")
    results = []
    for name in options.models:
        results += run_problem(PROBLEMS[name], chosen, options, _log)
    run = {
        "machine": machine(),
        "options": {"rounds": options.rounds, "optimizer": options.optimizer},
        "results": results,
        "notes": notes,
    }
    report.print_run(run)
    if options.json:
        Path(options.json).write_text(json.dumps(run, indent=1) + "\n")
    return 0 if all(result["trains_alike"] for result in results) else 1


def run_problem(
    problem: Problem, chosen: list[Contestant], options, log: Callable[[str], None]
) -> list[dict]:
    """Starts all contestants on one problem, compares their losses, then times them in turns.

    Returns:
        One dictionary per contestant: losses, and by round the median seconds of a step and the
        processor seconds of a step in all of its processes.
    """
    with contextlib.ExitStack() as stack:
        started: list[Running] = []
        for contestant in chosen:
            log(f"{problem.name}: starting {contestant.name}")
            started.append(
                stack.enter_context(running(contestant, problem.name, options.optimizer))
            )
        losses = _train_from_same_weights(started)
        step_s: dict[str, list[float]] = {each.contestant.name: [] for each in started}
        cpu_s: dict[str, list[float]] = {each.contestant.name: [] for each in started}
        for i in range(options.rounds):
            log(f"{problem.name}: round {i + 1} of {options.rounds}")
            first = i % len(started)  # no one always follows the same neighbour's cache misses
            for each in started[first:] + started[:first]:
                steps = options.steps or problem.steps
                by_rank = each.ask("timed_steps", steps=steps, warmup=WARMUP_STEPS)
                step_s[each.contestant.name].append(statistics.median(by_rank[0]["wall_s"]))
                cpu_s[each.contestant.name].append(sum(rank["cpu_s"] for rank in by_rank))
    return [
        {
            "model": problem.name,
            "contestant": contestant.name,
            "group": contestant.group,
            "losses": losses[contestant.name],
            "trains_alike": report.losses_agree(problem, contestant, losses),
            "step_s": step_s[contestant.name],
            "cpu_s": cpu_s[contestant.name],
        }
        for contestant in chosen
    ]


def _train_from_same_weights(started: list[Running]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/weights.npz"
        started[0].ask("save_weights", path=path)  # any of TensorFlow's will do
        losses = {}
        for each in started:
            each.ask("load_weights", path=path)
            losses[each.contestant.name] = each.ask("losses", steps=COMPARED_STEPS)[0]
    return losses


def machine() -> dict:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _choose(options) -> tuple[list[Contestant], list[str]]:
    """The contestants, and a line about each that does not take part."""
    chosen = [contestants.ONE_DEVICE, *contestants.ours(), *contestants.stock()]
    for package in options.against:
        chosen += contestants.ours(Path(package).resolve(), f" ({package})")
    notes = [
        "fit under tf.distribute.MultiWorkerMirroredStrategy crashes on Keras 3: its loop is timed."
    ]
    problem = _why_torch_cannot_run(options.torch_python)
    if problem:
        notes.append(f"torch DDP is left out: {problem}")
    else:
        chosen.append(contestants.torch_ddp(options.torch_python))
    chosen = [c for c in chosen if any(text in c.name for text in options.only)]
    return sorted(chosen, key=lambda c: c.num_processes), notes


def _why_torch_cannot_run(python: str) -> str | None:
    check = "import torch.distributed as d; raise SystemExit(not d.is_gloo_available())"
    try:
        done = subprocess.run([python, "-c", check], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["torch has no Gloo"])[-1]
    return f"{python}: {last}. Name an interpreter that has it by --torch-python."


def _parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    add("--rounds", type=int, default=9, help="turns of each contestant (default 9)")
    add("--steps", type=int, help="timed steps of a turn (default: 12 to 60, by model)")
    add("--quick", action="store_true", help="2 rounds of 5 steps: does it run at all")
    add("--optimizer", choices=["sgd", "adam"], default="sgd", help="sgd has momentum 0.9")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="contestants whose name has one")
    add("--torch-python", default=sys.executable, metavar="PATH", help="interpreter with torch")
    add("--json", metavar="FILE", help="also write all figures to FILE")
    add(
        "--against",
        action="append",
        default=[],
        metavar="FOLDER",
        help="another folder with a `tfparallel` in it, timed beside this one; can be repeated",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 2, 5
    return options


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
