"""Train one CNN on MNIST under every strategy, and compare each with one device.

    make demo                 (or: python examples/demo.py)

Each strategy trains examples/mnist.py in processes of its own: on two logical CPU devices, or in
two workers that `tfparallel launch` or `horovodrun` starts. All start from the same weights, see
the same global batches, of which the last is uneven, and should end with the same weights.

Ends with a table and demo.png. Exits with 1 if a run fails, or if any weight differs from one
device's by more than 1e-4. It hides GPUs; on one, such a comparison needs TF32 to be off, which
rounds float32 to 11 bits (docs/exactness.md).
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).parent
EPOCHS = 3
TIMEOUT_S = 240
MAX_WEIGHT_DIFFERENCE = 1e-4

# The same for every run: 4,005 rows are 62 global batches of 64 and a last one of 37, which two
# replicas split into 19 and 18.
SETTINGS = {
    "data.global_batch_size": 64,
    "data.train_examples": 4005,
    "training.epochs": EPOCHS,
    "training.seed": 0,
}

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # the same devices on every machine
    "KERAS_BACKEND": "tensorflow",
    "NVIDIA_TF32_OVERRIDE": "0",  # were GPUs shown: TF32 rounds float32 to 11 bits
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTEROP_THREADS": "8",  # collectives in one process wait in these threads
}

FLAGS = flags.FLAGS
flags.DEFINE_string("picture", "demo.png", "Where to draw the loss curves.")


@dataclass(frozen=True)
class Run:
    """One row of the demo: `strategy` names a file in configs/."""

    strategy: str
    devices: str
    num_workers: int = 1
    num_ps: int = 0
    starter: str = "tfparallel"  # of several workers: "tfparallel" launch, or "horovodrun"
    skipped: str | None = None  # why it does not run here


# A new strategy is one new row. The first is what the others are compared with.
RUNS = (
    Run("one_device", "1 CPU"),
    Run("mirrored", "2 CPUs"),
    Run("central_storage", "2 CPUs"),
    Run("sharded", "2 CPUs"),
    Run("tensor_parallel", "2 CPUs"),
    Run("pipeline", "2 CPUs"),
    Run("hybrid", "4 CPUs"),
    Run("multi_worker_mirrored", "2 workers", num_workers=2),
    Run("parameter_server_sync", "2 workers, 1 ps", num_workers=2, num_ps=1),
    Run(
        "horovod",
        "2 ranks",
        num_workers=2,
        starter="horovodrun",
        skipped=None if importlib.util.find_spec("horovod") else "no Horovod here",
    ),
    Run("tpu", "TPU", skipped="no TPU here"),  # .venv has the TensorFlow for CPUs
)


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    losses: np.ndarray
    weights: list[np.ndarray]
    test_accuracy: float
    samples_per_s: float

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read what `mnist.py --report` wrote."""
        with np.load(path) as report:
            weights = [report[f"weight_{i}"] for i in range(int(report["num_weights"]))]
            return cls(
                report["losses"],
                weights,
                float(report["test_accuracy"]),
                float(report["samples_per_s"]),
            )


class RunFailedError(RuntimeError):
    """A run that ended without a result; the message holds its log."""


def main(_):
    """Run all rows, one after the other, then show how they compare."""
    console = Console()
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    runs = [run for run in RUNS if not run.skipped]
    with tempfile.TemporaryDirectory() as folder, _progress(console) as progress:
        tasks = {
            run: progress.add_task(run.strategy, total=EPOCHS, start=False, doing="waiting")
            for run in runs
        }
        for run, task in tasks.items():
            progress.start_task(task)

            def show_epoch(epoch: int, task=task):
                doing = f"epoch {epoch} of {EPOCHS}" if epoch else "starting"
                progress.update(task, completed=max(epoch - 1, 0), doing=doing)

            try:
                results[run.strategy] = train(run, Path(folder), show_epoch)
                progress.update(task, completed=EPOCHS, doing="done")
            except RunFailedError as error:
                failures[run.strategy] = str(error)
                progress.update(task, doing="[red]failed")
            progress.stop_task(task)

    for strategy, log in failures.items():
        console.rule(f"[red]{strategy} failed; its log")
        console.print(log, markup=False, highlight=False)
    differences = weight_differences(results)
    console.print(comparison_table(results, differences, failures))
    if results:
        draw(results, Path(FLAGS.picture))
        console.print(f"Loss curves: {FLAGS.picture}")
    too_far = [
        s for s, difference in differences.items() if not difference <= MAX_WEIGHT_DIFFERENCE
    ]
    if too_far:
        console.print(f"[red]Weights differ by more than {MAX_WEIGHT_DIFFERENCE}: {too_far}")
    sys.exit(1 if failures or too_far else 0)


def train(run: Run, folder: Path, show_epoch: Callable[[int], None]) -> Result:
    """Train under one strategy, in fresh processes.

    Args:
        run: the row.
        folder: for the log and the result.
        show_epoch: called with the number of the epoch that runs, 0 before the first.

    Raises:
        RunFailedError: if it exits with an error, takes too long or leaves no result.
    """
    log_path, report = folder / f"{run.strategy}.log", folder / f"{run.strategy}.npz"
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("TF_CONFIG", None)
    deadline = time.monotonic() + TIMEOUT_S
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command(run, report), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while process.poll() is None and time.monotonic() < deadline:
            show_epoch(_last_epoch(log_path))
            time.sleep(0.2)
        timed_out = process.poll() is None
    finally:
        stop(process)
    if timed_out or process.returncode != 0 or not report.exists():
        why = f"still running after {TIMEOUT_S} s" if timed_out else f"exit {process.returncode}"
        raise RunFailedError(f"{log_path.read_text(errors='replace')}\n({why})")
    return Result.read(report)


def command(run: Run, report: Path) -> list[str]:
    """Return the command line a user would type for this row."""
    script = [str(EXAMPLES / "mnist.py"), f"--strategy={run.strategy}", f"--report={report}"]
    script += [f"--set={key}={value}" for key, value in SETTINGS.items()]
    if run.num_workers == 1:
        return [sys.executable, *script]
    if run.starter == "horovodrun":
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        return [horovodrun, "-np", str(run.num_workers), sys.executable, *script]
    launch = ["-m", "tfparallel", "launch", "--standalone", "--workers", str(run.num_workers)]
    launch += ["--ps", str(run.num_ps)] if run.num_ps else []
    return [sys.executable, *launch, *script]


def stop(process: subprocess.Popen) -> None:
    """End a process that may still run; a launcher takes its workers with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def weight_differences(results: dict[str, Result]) -> dict[str, float]:
    """Return each strategy's largest difference to the weights of one device; NaN counts."""
    reference = results.get(RUNS[0].strategy)
    if reference is None:
        return {}
    pairs = {s: zip(r.weights, reference.weights, strict=True) for s, r in results.items()}
    # numpy's max, since Python's may drop a NaN.
    return {s: float(np.max([np.abs(a - b).max() for a, b in pair])) for s, pair in pairs.items()}


def comparison_table(
    results: dict[str, Result], differences: dict[str, float], failures: dict[str, str]
) -> Table:
    """Lay out one row a strategy."""
    table = Table(
        title=f"MNIST, 4,005 digits, {EPOCHS} epochs, global batch 64",
        caption="Difference: the largest of a weight to one device's. Samples/s: of the fastest\n"
        "epoch. All devices share this machine's cores: more train no faster here.",
    )
    table.add_column("strategy", no_wrap=True)
    table.add_column("devices")
    table.add_column("accuracy", justify="right")
    table.add_column("difference", justify="right")
    table.add_column("samples/s", justify="right")
    for run in RUNS:
        name = run.strategy
        if name in failures:
            table.add_row(name, run.devices, "[red]failed", "-", "-")
        elif name not in results:
            table.add_row(name, run.skipped, "-", "-", "-", style="dim")
        else:
            result, difference = results[name], differences.get(name)
            table.add_row(
                name,
                run.devices,
                f"{result.test_accuracy:.4f}",
                "-" if difference is None or run is RUNS[0] else _colored(difference),
                f"{result.samples_per_s:,.0f}",
            )
    return table


def draw(results: dict[str, Result], path: Path) -> None:
    """Draw the losses, and below them how far each is from one device's."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    reference = results.get(RUNS[0].strategy)
    # Curves lie on each other: the later ones are thinner, so that all can be seen.
    for index, (name, result) in enumerate(results.items()):
        style = {"color": f"C{index}", "linewidth": 2 + 3 * (len(results) - 1 - index)}
        steps = np.arange(1, len(result.losses) + 1)
        top.plot(steps, result.losses, label=name, solid_capstyle="butt", **style)
        if reference is not None and result is not reference:
            distance = np.abs(result.losses - reference.losses)
            bottom.plot(steps, np.maximum(distance, 1e-8), **style)
    top.set_ylabel("training loss\n(mean since the epoch began)")
    top.set_title("The same training under every strategy")
    top.legend(title="strategy")
    bottom.set_yscale("log")
    bottom.set_ylim(5e-9, max(1e-3, bottom.get_ylim()[1]))
    bottom.set_ylabel("difference to the loss of\none device (0 at 1e-8)")
    bottom.set_xlabel("step")
    bottom.set_xlim(left=1)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[doing]:<12}"),
        TimeElapsedColumn(),
        console=console,
    )


def _last_epoch(log_path: Path) -> int:
    """The last N of Keras' lines `Epoch N/3`; 0 before the first."""
    return max((int(n) for n in re.findall(rb"Epoch (\d+)/", log_path.read_bytes())), default=0)


def _colored(difference: float) -> str:
    color = "green" if difference <= MAX_WEIGHT_DIFFERENCE else "red"
    return f"[{color}]{difference:.1e}"


if __name__ == "__main__":
    app.run(main)
