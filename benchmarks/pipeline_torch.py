"""One transformer under our pipeline and under torch.distributed.pipelining, in turns.

    python benchmarks/pipeline_torch.py --torch-python /root/benchvenv/bin/python
    python benchmarks/pipeline_torch.py --microbatches 8 --steps 20 --rounds 3

Two stages of decoder blocks, 1F1B, the same microbatches, plain SGD. torch runs two processes over
Gloo with one thread each; ours runs two logical CPU devices in one process, with the same two
threads. Prints median seconds of a step and their ratio; below 1 ours is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WIDTH, HEADS, CONTEXT, CHARACTERS, BLOCKS, ROWS = 128, 4, 64, 128, 4, 32
WARMUP = 3


def main() -> None:
    """Runs both contestants in turns, each in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", choices=("ours", "torch"), help="run only this one, here")
    options = parser.parse_args()
    if options.contestant == "ours":
        print(json.dumps(ours(options.microbatches, options.steps)))
        return
    if options.contestant == "torch":
        run_torch(options.microbatches, options.steps)
        return
    medians: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(options.rounds):
        for name, python in (("ours", sys.executable), ("torch", options.torch_python)):
            command = [python, __file__, *sys.argv[1:], "--contestant", name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(run.stderr[-3000:])
            medians[name].append(statistics.median(json.loads(run.stdout.splitlines()[-1])))
        print({name: f"{own[-1] * 1e3:.1f} ms" for name, own in medians.items()}, flush=True)
    ratios = [a / b for a, b in zip(medians["ours"], medians["torch"], strict=True)]
    print(f"ours / torch: {statistics.median(ratios):.2f}")


def data():
    """`[ROWS, CONTEXT]` characters and those that follow them."""
    import numpy as np

    text = np.random.default_rng(0).integers(0, CHARACTERS, (ROWS, CONTEXT + 1))
    return text[:, :-1], text[:, 1:]


def ours(microbatches: int, steps: int) -> list[float]:
    """Seconds of each step."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf
    from keras import layers

    from tfparallel import PipelineStrategy

    tf.config.threading.set_intra_op_parallelism_threads(2)
    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], microbatches)
    with strategy.scope():
        tokens = keras.Input((CONTEXT,), dtype="int32")
        with strategy.stage(0):
            x = layers.Embedding(CHARACTERS, WIDTH)(tokens)
        for i in range(BLOCKS):
            with strategy.stage(2 * i // BLOCKS):
                normed = layers.LayerNormalization()(x)
                attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(
                    normed, normed, use_causal_mask=True
                )
                x = layers.Add()([x, attended])
                wide = layers.Dense(4 * WIDTH, "relu")(layers.LayerNormalization()(x))
                x = layers.Add()([x, layers.Dense(WIDTH)(wide)])
        with strategy.stage(1):
            model = keras.Model(tokens, layers.Dense(CHARACTERS)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    x, y = (tf.constant(array, tf.int32) for array in data())
    return timed(lambda: model.train_on_batch(x, y), steps)


def run_torch(microbatches: int, steps: int) -> None:
    """Starts both ranks; the last one prints."""
    import torch.multiprocessing

    arguments = (microbatches, steps)
    torch.multiprocessing.spawn(torch_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]


def torch_rank(rank: int, microbatches: int, steps: int) -> None:
    """One stage."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29653")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    blocks = [Block() for _ in range(BLOCKS // 2)]
    ends = [[nn.Embedding(CHARACTERS, WIDTH), *blocks], [*blocks, nn.Linear(WIDTH, CHARACTERS)]]
    module = nn.Sequential(*ends[rank])

    def loss(scores, target):
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())

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
