"""A column and a row over two processes: one controller's graph, or two ranks that sum by a ring.

    python benchmarks/tensor_exchange.py --rounds 5

"graph" is what `TensorParallelStrategy(cluster_resolver=...)` does: the first process's graph has
the second one's device in it, and TensorFlow sends the input there and a product back (gRPC).
"ring" is what ranks would do: each has the input, computes its half, and our ring adds the halves.
"nothing" is a half of the products on one process. All are one `tf.function` of the same matrices,
on two processes of one thread each. Prints milliseconds of a call: the least, and the median.
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
CONTESTANTS = ("graph", "ring", "nothing")
SIZES = ((1, 1024), (64, 512), (32, 4096))  # rows, width of the input and of what is in between

sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    """Runs the contestants in turns, each in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="run only this one, here")
    options = parser.parse_args()
    if options.contestant:
        print(json.dumps([timed(options.contestant, *size, options.steps) for size in SIZES]))
        return
    found: dict[str, list] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name in CONTESTANTS:
            found[name].append(run(name, options))
    for i, (rows, width) in enumerate(SIZES):
        for name in CONTESTANTS:
            times_s = [each for of_round in found[name] for each in of_round[i]]
            least_ms, median_ms = min(times_s) * 1e3, statistics.median(times_s) * 1e3
            print(f"{rows} x {width}, {name}: {least_ms:.2f} ms, median {median_ms:.2f}")


def run(name: str, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of each call, of each size."""
    launched = [sys.executable, "-m", "tfparallel", "launch", "--standalone", "--workers", "2"]
    script = [__file__, "--steps", str(options.steps), "--contestant", name]
    environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*launched, *script], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    of_first = [x for x in done.stdout.splitlines() if x.startswith("[worker 0] [[")]
    return json.loads(of_first[-1].removeprefix("[worker 0] "))


_strategies: dict = {}


def timed(name: str, rows: int, width: int, steps: int) -> list[float]:
    """Seconds of each call."""
    import numpy as np
    import tensorflow as tf

    call = function(name, width)
    x = tf.constant(np.random.default_rng(0).normal(size=(rows, width)).astype("float32"))
    for _ in range(5):
        call(x)
    times_s = []
    for _ in range(steps):
        before_s = time.perf_counter()
        call(x).numpy()
        times_s.append(time.perf_counter() - before_s)
    return times_s


def function(name: str, width: int):
    """What computes `relu(x a) b` with `a` by columns and `b` by rows."""
    import tensorflow as tf

    import tfparallel

    strategy = _strategy(tfparallel.MultiWorkerMirroredStrategy) if name == "ring" else None
    if name == "graph":
        devices = list(_strategy(tfparallel.TensorParallelStrategy).extended.parameter_devices)
    else:
        devices = [tf.config.list_logical_devices("CPU")[0].name]
    matrices = []
    for device in devices:
        with tf.device(device):
            half = tf.random.normal((width, width // 2)), tf.random.normal((width // 2, width))
            matrices.append([tf.Variable(each) for each in half])

    def product(x, device, a, b):
        with tf.device(device):
            return tf.nn.relu(x @ a) @ b

    @tf.function
    def call(x):
        terms = [product(x, d, *own) for d, own in zip(devices, matrices, strict=True)]
        if strategy is not None:
            context = tf.distribute.get_replica_context
            (term,) = terms
            return strategy.run(lambda: context().all_reduce("SUM", tf.identity(term)))
        with tf.device(devices[0]):
            return tf.add_n(terms)

    return call


def _strategy(kind):
    """One of a kind, which connects processes."""
    import tensorflow as tf

    if kind not in _strategies:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        arguments = ("auto",) if kind.__name__ == "TensorParallelStrategy" else ()
        _strategies[kind] = kind(*arguments, cluster_resolver=resolver)
    return _strategies[kind]


if __name__ == "__main__":
    main()
