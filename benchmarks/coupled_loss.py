"""A contrastive loss over the rows of two processes, ours beside torch's all_gather idioms.

    python benchmarks/coupled_loss.py --torch-python /path/to/venv/bin/python
    python benchmarks/coupled_loss.py --rows 4096 --columns 256 --steps 30 --rounds 5

All train one linear layer by NT-Xent over the global batch, on CPUs, and average its gradients.

    ours            a compiled loss: gathered forward, nothing backward
    ours all_rows   the same in `compute_loss`, through `strategy.all_rows`
    torch           `torch.distributed.all_gather`, own rows put back; under DDP
    torch nn        `torch.distributed.nn.functional.all_gather`, which has a gradient; under DDP

Each runs two processes in a network namespace of its own (root is needed), whose loopback counts
bytes. Prints medians over rounds: milliseconds of a step, and kilobytes that a process sends in it,
those of a step on random data with a mean square error of the same layer taken off: what is left is
what the rows cost.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONTESTANTS = ("ours", "ours all_rows", "torch", "torch nn")
PORTS = 29601, 29602
WARMUP = 5

sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    """Runs the contestants in turns, each in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rows", type=int, default=2048, help="of the global batch")
    parser.add_argument("--columns", type=int, default=128, help="of an embedding")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", help="run only this one, here")
    parser.add_argument("--plain", action="store_true", help="with a mean square error")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.contestant:
        run_here(options)
        return
    results: dict = {name: ([], []) for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name in CONTESTANTS:
            plain, coupled = run(name, options, ["--plain"]), run(name, options, [])
            results[name][0].append(coupled["ms"])
            results[name][1].append(coupled["kilobytes"] - plain["kilobytes"])
            print(name, plain, coupled, flush=True)
    print(f"{options.rows} rows of {options.columns} columns, two processes")
    for name, (times_ms, kilobytes) in results.items():
        print(
            f"{name:14} {statistics.median(times_ms):7.1f} ms a step, "
            f"{statistics.median(kilobytes):8.0f} kB for the rows"
        )


def run(name: str, options: argparse.Namespace, extra: list[str]) -> dict:
    """One contestant in two processes of a network namespace; what rank 0 measures."""
    python = options.torch_python if name.startswith("torch") else sys.executable
    command = [python, __file__, "--contestant", name, *extra]
    for option in ("rows", "columns", "steps"):
        command += [f"--{option}", str(getattr(options, option))]
    ranks = '"$@" --rank 1 >/dev/null & "$@" --rank 0; code=$?; wait; exit $code'
    output = subprocess.run(
        ["unshare", "--net", "bash", "-c", f"ip link set lo up; {ranks}", "bash", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


def run_here(options: argparse.Namespace) -> None:
    """One process of one contestant; rank 0 prints what it measures."""
    make = torch_step if options.contestant.startswith("torch") else our_step
    step = make(options)
    for _ in range(WARMUP):
        step()
    before, times_s = bytes_sent(), []
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - start)
    sent = (bytes_sent() - before) / options.steps / 2  # the namespace counts both processes
    if options.rank == 0:
        result = {"ms": round(statistics.median(times_s) * 1e3, 2), "kilobytes": round(sent / 1e3)}
        print(json.dumps(result))


def bytes_sent() -> int:
    """Through this namespace's loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def our_step(options: argparse.Namespace):
    """A function that does one step of two workers."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in PORTS]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": options.rank}}
    )
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    import keras
    import tensorflow as tf
    from keras import ops

    from tfparallel import MultiWorkerMirroredStrategy

    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    strategy = MultiWorkerMirroredStrategy()

    def nt_xent(y_true, y_pred):
        views = ops.normalize(ops.concatenate(ops.split(y_pred, 2, axis=-1), axis=0), axis=-1)
        rows = ops.shape(views)[0]
        logits = ops.matmul(views, ops.transpose(views)) / 0.5 - 1e9 * ops.eye(rows)
        labels = ops.mod(ops.arange(rows) + rows // 2, rows)
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        )

    class WithAllRows(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return nt_xent(None, strategy.all_rows(y_pred))

    own_loss = options.contestant == "ours all_rows" and not options.plain
    columns = options.columns
    with strategy.scope():
        parts = [keras.Input((columns,)), keras.layers.Dense(2 * columns, use_bias=False)]
        model = (WithAllRows if own_loss else keras.Sequential)(parts)
        loss = None if own_loss else "mse" if options.plain else nt_xent
        model.compile(keras.optimizers.SGD(0.01), loss=loss)
    x = tf.random.stateless_normal([options.rows, columns], [1, 2])
    y = tf.zeros([options.rows, 1])
    train = tf.function(lambda: strategy.run(model.train_step, args=((x, y),)))
    model._symbolic_build(data_batch=(x, y, None))
    return lambda: train()["loss"].numpy()


def torch_step(options: argparse.Namespace):
    """The same of two ranks of Gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_gather as all_gather_with_gradient

    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{PORTS[0]}"
    dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=2)
    torch.manual_seed(1)
    columns, rows = options.columns, options.rows // 2
    layer = torch.nn.Linear(columns, 2 * columns, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(rows, columns)

    def gathered(own):
        if options.contestant == "torch nn":
            return torch.cat(all_gather_with_gradient(own))
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.contiguous())
        parts[options.rank] = own
        return torch.cat(parts)

    def nt_xent(embeddings):
        views = torch.nn.functional.normalize(torch.cat(embeddings.chunk(2, 1)), dim=-1)
        count = views.shape[0]
        logits = views @ views.T / 0.5 - 1e9 * torch.eye(count)
        labels = (torch.arange(count) + count // 2) % count
        return torch.nn.functional.cross_entropy(logits, labels)

    def step():
        optimizer.zero_grad()
        own = model(x)
        loss = own.square().mean() if options.plain else nt_xent(gathered(own))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
