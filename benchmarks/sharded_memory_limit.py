"""A model that one process cannot hold trains over four, under a limit of the system's.

    python benchmarks/sharded_memory_limit.py          # about 3 minutes on 2 cores
    python benchmarks/sharded_memory_limit.py --layers 16 --ranks 4 --share 0.6

Each process first trains a tiny model in its strategy, so that all that TensorFlow takes by itself
(threads' stacks, arenas, code) is there. It then limits its own data segment (`RLIMIT_DATA`: all
private memory that may be written) to what it has, and `--share` of the weights and Adam's slots of
the large model, and builds and trains that:

- one process without the limit trains: the reference;
- one process with it has to fail, and by memory;
- four processes, each with it, have to train to the same loss.

It ends with status 1 if any of the three is otherwise.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.multi_process.pool import cluster_environments

ROOT = Path(__file__).resolve().parents[1]
OUT_OF_MEMORY = ("OOM when allocating", "Resource exhausted", "RESOURCE_EXHAUSTED", "bad_alloc")
OUT_OF_MEMORY += ("MemoryError", "Cannot allocate memory", "Unable to allocate")
ROWS, STEPS = 8, 3
STACK_BYTES = 1 << 20


def main() -> int:
    """The three runs, or one process of one of them."""
    options = _parse()
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))  # of each thread
    if options.is_rank:
        print(json.dumps(run_rank(options)), flush=True)
        return 0
    print(
        f"{options.layers} x Dense({options.width}), Adam: weights and slots "
        f"{whole_bytes(options) / 1e6:.0f} MB; limit: what a process has before, and "
        f"{options.share:.2f} of that"
    )
    reference = _together(1, options, share=0.0)
    print(_line("one process, no limit", reference))
    alone = _together(1, options, share=options.share)
    print(_line("one process", alone))
    together = _together(options.ranks, options, share=options.share)
    print(_line(f"{options.ranks} processes", together))
    return int(not is_shown(reference, alone, together))


def is_shown(reference: list[dict], alone: list[dict], together: list[dict]) -> bool:
    """Whether only the one process under the limit has failed, by memory, and losses agree."""
    losses = [each.get("loss") for each in (*reference, *together)]
    if None in losses or alone[0].get("out_of_memory") is None:
        return False
    return max(losses) - min(losses) <= 1e-5 * abs(losses[0])


def whole_bytes(options: argparse.Namespace) -> int:
    """Of weights and both slots of each."""
    return 3 * 4 * options.layers * (options.width + 1) * options.width


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.6, help="0: no limit")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _together(ranks: int, options: argparse.Namespace, share: float) -> list[dict]:
    """What each process says, or why it failed."""
    command = [sys.executable, __file__, "--is-rank", "--share", str(share)]
    command += ["--layers", str(options.layers), "--width", str(options.width)]
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **own,
                "PYTHONPATH": str(ROOT),
                "KERAS_BACKEND": "tensorflow",
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "1",
                "MALLOC_ARENA_MAX": "2",  # else each thread reserves 64 MB, and the limit counts it
                "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # what is freed is the system's at once
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in cluster_environments(ranks)
    ]
    outputs = [process.communicate(timeout=900) for process in processes]
    return [_said(p, *each) for p, each in zip(processes, outputs, strict=True)]


def _said(process: subprocess.Popen, output: str, errors: str) -> dict:
    if process.returncode == 0:
        return json.loads(output.splitlines()[-1])
    found = [line for line in errors.splitlines() if any(word in line for word in OUT_OF_MEMORY)]
    if found:
        return {"out_of_memory": found[-1][-160:]}
    return {"failed": f"status {process.returncode}: {errors[-1500:]}"}


def _line(name: str, ranks: list[dict]) -> str:
    said = ranks[0]
    for each in ranks:
        said = each if "loss" not in each else said
    if "loss" not in said:
        return f"{name:22} did not train: {said.get('out_of_memory') or said['failed']}"
    most = max(each["above"] for each in ranks)
    limits = [each["limit"] for each in ranks if each["limit"]]
    limit = f"{min(limits) / 1e6:.0f} MB" if limits else "none"
    return (
        f"{name:22} loss {said['loss']:.7f}; above what a process had before "
        f"({max(each['before'] for each in ranks) / 1e6:.0f} MB): {most / 1e6:.0f} MB at the end; "
        f"limit {limit}"
    )


def run_rank(options: argparse.Namespace) -> dict:
    """Builds and trains, under the limit."""
    import keras

    import tfparallel

    strategy = tfparallel.ShardedStrategy()
    keras.utils.set_random_seed(0)
    _train(strategy, layers=2, width=32)
    before, limit = _data_bytes(), int(options.share * whole_bytes(options))
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    loss = _train(strategy, options.layers, options.width)
    return {"loss": loss, "before": before, "above": _data_bytes() - before, "limit": limit}


def _train(strategy, layers: int, width: int) -> float:
    import keras
    import numpy as np

    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers - 1)]
        model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(width)])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, width)).astype("float32") for _ in range(2))
    return [float(model.train_on_batch(x, y)) for _ in range(STEPS)][-1]


def _data_bytes() -> int:
    """What `RLIMIT_DATA` limits of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (own,) = (line.split()[1] for line in lines if line.startswith("VmData"))
    return 1024 * int(own)


if __name__ == "__main__":
    sys.exit(main())
