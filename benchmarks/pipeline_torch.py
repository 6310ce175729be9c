"""One transformer under our pipeline and under torch.distributed.pipelining, in turns.

    python benchmarks/pipeline_torch.py --torch-python /root/benchvenv/bin/python
    python benchmarks/pipeline_torch.py --microbatches 8 --steps 20 --rounds 3

Two stages of decoder blocks, written alike, 1F1B, the same microbatches, plain SGD. Both run two
processes with one thread each for the insides of operations, each bound to a CPU of its own (with
`--unbound`, to none): torch over Gloo, ours over TensorFlow's gRPC. "here" is ours with both stages
in one process, on two logical CPU devices; "alone" and "torch alone" are the same model in one
process of one thread, microbatch by microbatch without a pipeline. Prints median milliseconds of a
step, and medians over rounds of ratios to torch: below 1 ours is faster.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WIDTH, HEADS, CONTEXT, CHARACTERS, BLOCKS, ROWS = 128, 4, 64, 128, 4, 32
SIZE = WIDTH // HEADS
WARMUP = 3
CONTESTANTS = ("ours", "here", "torch", "alone", "torch alone")
REPOSITORY = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    """Runs both contestants in turns, each in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unbound", action="store_true", help="processes run on any CPU")
    parser.add_argument("--compare", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="run only this one, here")
    options = parser.parse_args()
    if options.contestant:
        run_here(options.contestant, options)
        return
    medians_ms: dict[str, list[float]] = {name: [] for name in options.compare}
    for _ in range(options.rounds):
        for name in options.compare:
            times_s = run(name, options)
            medians_ms[name].append(statistics.median(times_s) * 1e3)
        print({name: f"{own[-1]:.1f} ms" for name, own in medians_ms.items()}, flush=True)
    for name, other in (("ours", "torch"), ("here", "torch"), ("alone", "torch alone")):
        if name not in medians_ms or other not in medians_ms:
            continue
        ratios = [a / b for a, b in zip(medians_ms[name], medians_ms[other], strict=True)]
        print(f"{name} / {other}: {statistics.median(ratios):.2f}")


def run(name: str, options: argparse.Namespace) -> list[float]:
    """Seconds of each step of a contestant, in fresh processes."""
    python = options.torch_python if name.startswith("torch") else sys.executable
    script = [__file__, *sys.argv[1:], "--contestant", name]
    if name == "ours":
        bind = [] if options.unbound else ["--bind-cpus"]
        script = ["-m", "tfparallel", "launch", "--standalone", "--workers", "2", *bind, *script]
    threads = "2" if name == "here" else "1"
    done = subprocess.run(
        [python, *script],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": threads, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1].removeprefix("[worker 0] "))


def run_here(name: str, options: argparse.Namespace) -> None:
    """Runs one contestant in this process, which prints the seconds of its steps."""
    microbatches, steps = options.microbatches, options.steps
    if name == "torch":
        run_torch(microbatches, steps, options.unbound)
        return
    contestants = {"alone": alone, "torch alone": torch_alone}
    if name in contestants:
        times_s = contestants[name](microbatches, steps)
    else:
        times_s = ours(name == "here", microbatches, steps)
    print(json.dumps(times_s))


def data():
    """`[ROWS, CONTEXT]` characters and those that follow them."""
    import numpy as np

    text = np.random.default_rng(0).integers(0, CHARACTERS, (ROWS, CONTEXT + 1))
    return text[:, :-1], text[:, 1:]


def ours(is_here: bool, microbatches: int, steps: int) -> list[float]:
    """Seconds of each step.

    Args:
        is_here: whether both stages are in this process.
        microbatches, steps: how many.
    """
    import tensorflow as tf

    from tfparallel import PipelineStrategy

    if is_here:
        logical = [tf.config.LogicalDeviceConfiguration()] * 2
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, logical)
    strategy = PipelineStrategy(["CPU:0", "CPU:1"] if is_here else None, microbatches)
    with strategy.scope():
        model = keras_model(strategy.stage)
    x, y = (tf.constant(array, tf.int32) for array in data())
    return timed(lambda: model.train_on_batch(x, y), steps)


def alone(microbatches: int, steps: int) -> list[float]:
    """Seconds of each step of plain Keras that accumulates gradients."""
    import tensorflow as tf

    model = keras_model(gradient_accumulation_steps=microbatches)
    parts = list(zip(*(tf.split(tf.constant(a, tf.int32), microbatches) for a in data())))
    return timed(lambda: [model.train_on_batch(*part) for part in parts], steps)


def keras_model(stage=lambda _: contextlib.nullcontext(), **optimizer_options):
    """The transformer, its layers constructed within `stage(0)` or `stage(1)`."""
    import keras
    from keras import layers, ops

    causal = [[0.0 if j <= i else -1e9 for j in range(CONTEXT)] for i in range(CONTEXT)]

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
            self.inputs, self.result = layers.Dense(3 * WIDTH), layers.Dense(WIDTH)
            self.widen, self.narrow = layers.Dense(4 * WIDTH, "relu"), layers.Dense(WIDTH)

        def call(self, x):
            heads = ops.reshape(self.inputs(self.norms[0](x)), (-1, CONTEXT, 3, HEADS, SIZE))
            query, key, value = ops.unstack(ops.transpose(heads, (2, 0, 3, 1, 4)), 3)
            scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * SIZE**-0.5
            attended = ops.matmul(ops.softmax(scores + ops.convert_to_tensor(causal)), value)
            attended = ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (-1, CONTEXT, WIDTH))
            x = x + self.result(attended)
            return x + self.narrow(self.widen(self.norms[1](x)))

    tokens = keras.Input((CONTEXT,), dtype="int32")
    with stage(0):
        x = layers.Embedding(CHARACTERS, WIDTH)(tokens)
    for i in range(BLOCKS):
        with stage(2 * i // BLOCKS):
            x = Block()(x)
    with stage(1):
        model = keras.Model(tokens, layers.Dense(CHARACTERS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.01, **optimizer_options), loss=loss)
    return model


def run_torch(microbatches: int, steps: int, unbound: bool) -> None:
    """Starts both ranks; the last one prints."""
    import torch.multiprocessing

    arguments = (microbatches, steps, unbound)
    torch.multiprocessing.spawn(torch_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]


def torch_rank(rank: int, microbatches: int, steps: int, unbound: bool) -> None:
    """One stage."""
    if not unbound:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29653")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module, loss = torch_stages()[rank], torch_loss
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = (torch.from_numpy(array.copy()) for array in data())

    def step():
        optimizer.zero_grad()
        losses: list = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            float(sum(losses))
        optimizer.step()

    times_s = timed(step, steps)
    if rank == 1:
        print(json.dumps(times_s), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def torch_stages() -> list:
    """Both halves of the transformer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
            self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            heads = self.inputs(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
            return x + self.narrow(torch.relu(self.widen(self.norms[1](x))))

    blocks = [Block() for _ in range(BLOCKS)]
    return [
        nn.Sequential(nn.Embedding(CHARACTERS, WIDTH), *blocks[: BLOCKS // 2]),
        nn.Sequential(*blocks[BLOCKS // 2 :], nn.Linear(WIDTH, CHARACTERS)),
    ]


def torch_loss(scores, target):
    """Of a microbatch."""
    from torch import nn

    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def torch_alone(microbatches: int, steps: int) -> list[float]:
    """Seconds of each step without a pipeline."""
    import torch

    torch.set_num_threads(1)
    module = torch.nn.Sequential(*torch_stages())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    parts = list(zip(*(torch.from_numpy(a.copy()).chunk(microbatches) for a in data())))

    def step():
        optimizer.zero_grad()
        for x, y in parts:
            (torch_loss(module(x), y) / microbatches).backward()
        optimizer.step()

    return timed(step, steps)


def timed(step, steps: int) -> list[float]:
    """Seconds of each of the last `steps` calls."""
    times_s = []
    for _ in range(WARMUP + steps):
        started = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - started)
    return times_s[WARMUP:]


if __name__ == "__main__":
    main()
