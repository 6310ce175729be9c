"""One GPT block, or an MLP of 4096 units, in two parts: ours and torch's `parallelize_module`.

    python benchmarks/tensor_parallel.py --torch-path /tmp/torch
    python benchmarks/tensor_parallel.py --model mlp --rows 1 --what predict --rounds 5

"ranks", "ours" and "torch" are two processes of one thread, each bound to a CPU of its own: "ranks"
trace a part each and exchange by our ring, as torch's do over Gloo; "ours" is one process that
controls both, over TensorFlow's gRPC. "here" is ours on two logical devices of one process, "alone"
and "torch alone" are the same model on one device, of one thread, bound to one CPU (TensorFlow runs
the products of a backward pass side by side where it finds another). Contestants take turns, each
round in fresh processes. Prints median milliseconds of a call, and the median over rounds of each
ratio: below 1 the first one is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WIDTH, HEADS, CONTEXT, UNITS = 512, 8, 64, 4096
WARMUP = 3
CONTESTANTS = ("ranks", "ours", "here", "torch", "alone", "torch alone")
RATIOS = (
    ("ranks", "torch"),
    ("ranks", "ours"),
    ("ranks", "alone"),
    ("ours", "torch"),
    ("here", "torch"),
    ("here", "alone"),
    ("ours", "alone"),
)
REPOSITORY = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    """Runs the contestants in turns, each in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-path", default="", help="where torch is, if not installed")
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt")
    parser.add_argument("--what", choices=("train", "predict"), default="train")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compare", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="run only this one, here")
    options = parser.parse_args()
    if options.contestant:
        run_here(options.contestant, options)
        return
    medians_ms: dict[str, list[float]] = {name: [] for name in options.compare}
    for _ in range(options.rounds):
        for name in options.compare:
            medians_ms[name].append(statistics.median(run(name, options)) * 1e3)
        print({name: f"{own[-1]:.2f} ms" for name, own in medians_ms.items()}, flush=True)
    for name, other in RATIOS:
        if name in medians_ms and other in medians_ms:
            ratios = [a / b for a, b in zip(medians_ms[name], medians_ms[other], strict=True)]
            print(f"{name} / {other}: {statistics.median(ratios):.2f}")


def run(name: str, options: argparse.Namespace) -> list[float]:
    """Seconds of each call of a contestant, in fresh processes."""
    script = [__file__, *sys.argv[1:], "--contestant", name]
    if name in ("ranks", "ours"):
        bound = ["--standalone", "--workers", "2", "--bind-cpus"]
        script = ["-m", "tfparallel", "launch", *bound, *script]
    threads = "2" if name == "here" else "1"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), torch_path(name, options)]))
    done = subprocess.run(
        [sys.executable, *script],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": threads, "PYTHONPATH": path},
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    of_first = [line for line in done.stdout.splitlines() if not line.startswith("[worker 1]")]
    return json.loads(of_first[-1].removeprefix("[worker 0] "))


def torch_path(name: str, options: argparse.Namespace) -> str:
    """What torch's contestants need on their path."""
    return options.torch_path if name.startswith("torch") else ""


def run_here(name: str, options: argparse.Namespace) -> None:
    """Runs one contestant in this process, which prints the seconds of its calls."""
    if name == "torch":
        run_torch(options)
        return
    if name.endswith("alone"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    times_s = torch_alone(options) if name == "torch alone" else ours(name, options)
    print(json.dumps(times_s))


def data(options: argparse.Namespace):
    """What goes in, and the targets: as long as wide."""
    import numpy as np

    shape = (options.rows, CONTEXT, WIDTH) if options.model == "gpt" else (options.rows, UNITS)
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    return x[0], x[1]


def timed(step: Callable, steps: int) -> list[float]:
    """Seconds of each call."""
    for _ in range(WARMUP):
        step()
    times_s = []
    for _ in range(steps):
        before_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - before_s)
    return times_s


# ---- ours ----------------------------------------------------------------------------------------


def ours(name: str, options: argparse.Namespace) -> list[float]:
    """Seconds of each call, on two processes, two devices of this one, or one."""
    import contextlib

    import tensorflow as tf

    import tfparallel

    strategy = None
    if name == "here":
        logical = [tf.config.LogicalDeviceConfiguration()] * 2
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, logical)
        strategy = tfparallel.TensorParallelStrategy("auto")
    if name == "ours":
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tfparallel.TensorParallelStrategy("auto", cluster_resolver=resolver)
    if name == "ranks":
        strategy = tfparallel.TensorParallelStrategy("auto", transport="ring")
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras_model(options.model)
    x, y = map(tf.constant, data(options))
    if options.what == "predict":
        return timed(lambda: model.predict_on_batch(x), options.steps)
    return timed(lambda: model.train_on_batch(x, y), options.steps)


def keras_model(name: str):
    """The block, or the MLP."""
    import keras
    from keras import layers

    if name == "mlp":
        inputs = keras.Input((UNITS,))
        x = layers.Dense(UNITS, activation="relu")(inputs)
        outputs = layers.Dense(UNITS)(x)
    else:
        inputs = keras.Input((CONTEXT, WIDTH))
        x = layers.LayerNormalization()(inputs)
        attend = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = layers.Add()([inputs, attend(x, x, use_causal_mask=True)])
        y = layers.Dense(4 * WIDTH, "relu")(layers.LayerNormalization()(x))
        outputs = layers.Add()([x, layers.Dense(WIDTH)(y)])
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


# ---- torch ---------------------------------------------------------------------------------------


def run_torch(options: argparse.Namespace) -> None:
    """Starts both ranks; the first one prints."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(torch_rank, (options,), nprocs=2)  # type: ignore[no-untyped-call]


def torch_rank(rank: int, options: argparse.Namespace) -> None:
    """One part of each layer."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module = torch_module(options.model, HEADS // 2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if options.model == "gpt":
        plan |= {name: ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"result": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
    times_s = timed(torch_step(module, options), options.steps)
    if rank == 0:
        print(json.dumps(times_s), flush=True)
    dist.barrier()
    os._exit(0)  # Gloo's threads abort a process that ends before they do


def torch_alone(options: argparse.Namespace) -> list[float]:
    """Seconds of each call of one process."""
    import torch

    torch.set_num_threads(1)
    return timed(torch_step(torch_module(options.model, HEADS), options), options.steps)


def torch_step(module, options: argparse.Namespace) -> Callable:
    """A training step, or a forward pass."""
    import torch

    x, y = (torch.from_numpy(array.copy()) for array in data(options))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def train():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()

    def predict():
        with torch.no_grad():
            module(x)

    return predict if options.what == "predict" else train


def torch_module(name: str, heads: int):
    """As `keras_model`, with the heads that this process has."""
    import torch
    from torch import nn

    size = WIDTH // HEADS

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
            self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.value, self.result = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            y = self.norms[0](x)
            query, key, value = (
                layer(y).view(-1, CONTEXT, heads, size).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended = attended.transpose(1, 2).reshape(-1, CONTEXT, heads * size)
            x = x + self.result(attended)
            return x + self.down(torch.relu(self.up(self.norms[1](x))))

    torch.manual_seed(0)
    return Mlp() if name == "mlp" else Block()


if __name__ == "__main__":
    main()
