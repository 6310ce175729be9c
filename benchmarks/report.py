"""What a benchmark run found, as a table and as verdicts."""

import statistics

import numpy as np
from contestants import ONE_DEVICE, ONE_PROCESS, TWO_PROCESSES, Contestant
from problems import COMPARED_STEPS, PROBLEMS, Problem
from rich.console import Console
from rich.table import Table

LOSS_TOLERANCE = 1e-3  # relative: rounding differs, and grows from step to step
# What the others of a group are divided by.
_YARDSTICKS = {
    ONE_PROCESS: "tfparallel Mirrored, fit",
    TWO_PROCESSES: "tfparallel MultiWorker, fit",
}
# (ours, theirs, largest ours / theirs, of which models): what the project promises.
_TARGETS = [
    ("tfparallel Mirrored, fit", "tf.distribute Mirrored, fit", 1.02, list(PROBLEMS)),
    ("tfparallel MultiWorker, fit", "tf.distribute MultiWorker, loop", 1.02, list(PROBLEMS)),
    ("tfparallel MultiWorker, loop", "tf.distribute MultiWorker, loop", 1.02, list(PROBLEMS)),
    ("tfparallel MultiWorker, fit", "torch DDP Gloo, loop", 1.0, ["mlp10m"]),
    ("tfparallel MultiWorker, loop", "torch DDP Gloo, loop", 1.0, ["mlp10m"]),
]


def losses_agree(problem: Problem, contestant: Contestant, losses: dict[str, list[float]]) -> bool:
    """Whether a contestant's losses are those of the others that compute the same."""
    comparable = [
        name for name in losses if name != ONE_DEVICE.name or not _has_batch_norm(problem)
    ]
    if contestant.name not in comparable:
        return True  # BatchNorm of a replica sees half of the rows
    return bool(
        np.allclose(losses[contestant.name], losses[comparable[0]], rtol=LOSS_TOLERANCE, atol=1e-5)
    )


def _has_batch_norm(problem: Problem) -> bool:
    return bool(problem.block_filters)


def print_run(run: dict) -> None:
    """Prints the machine, the table, the verdicts and the notes."""
    console = Console(width=None if Console().is_terminal else 120)
    machine = run["machine"]
    console.print(
        f"\n{machine['cpu']}, {machine['cores']} cores, load {machine['load_1_min']:.1f}, "
        f"Python {machine['python']}, Linux {machine['kernel']}; "
        f"{run['options']['rounds']} rounds, optimizer {run['options']['optimizer']}"
    )
    console.print(_table(run["results"]))
    for line in _verdicts(run["results"]) + run["notes"]:
        console.print(line, markup=False, highlight=False)


def _table(results: list[dict]) -> Table:
    table = Table(
        title="Median step, and times tfparallel's fit of the same group (below 1: faster than it)"
    )
    for heading in ("model", "contestant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median ms", "fastest", "CPU ms", "ratio", "loss 1", f"loss {COMPARED_STEPS}"):
        table.add_column(heading, justify="right")
    table.add_column("alike")
    previous = None
    for result in results:
        key = (result["model"], result["group"])
        if previous not in (None, key):
            table.add_section()
        previous = key
        ratio = ratio_of(results, result["model"], result["contestant"], _YARDSTICKS[key[1]])
        table.add_row(
            result["model"],
            result["contestant"],
            f"{statistics.median(result['step_s']) * 1e3:.2f}",
            f"{min(result['step_s']) * 1e3:.2f}",
            f"{statistics.median(result['cpu_s']) * 1e3:.2f}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{result['losses'][0]:.4f}",
            f"{result['losses'][-1]:.4f}",
            "yes" if result["trains_alike"] else "NO",
        )
    return table


def ratio_of(results: list[dict], model: str, numerator: str, denominator: str) -> float | None:
    """Median over rounds of one contestant's step time over another's; None if either is absent."""
    rounds = {r["contestant"]: r["step_s"] for r in results if r["model"] == model}
    if numerator not in rounds or denominator not in rounds:
        return None
    pairs = zip(rounds[numerator], rounds[denominator], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _verdicts(results: list[dict]) -> list[str]:
    lines = []
    for ours, theirs, limit, models in _TARGETS:
        for model in models:
            ratio = ratio_of(results, model, ours, theirs)
            if ratio is not None:
                verdict = "reached" if ratio <= limit else "MISSED"
                lines.append(
                    f"{verdict}: {model}: {ours} / {theirs} = {ratio:.2f} (target {limit:.2f})"
                )
    return lines
