"""Peak memory of a step of a deep MLP with wide activations, under pipelines and options.

    python benchmarks/pipeline_memory.py
    python benchmarks/pipeline_memory.py --microbatches 16 --rows 16384 --layers 8

Each line is a process of its own: what it held at most (`ru_maxrss`), less what it held before the
first step. All devices are CPUs of this machine, whose memory is the host's too: `offload` moves
activations from it to itself, and shows what moving costs.
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VARIANTS = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "gpipe, rematerialize=except_last": {"schedule": "gpipe", "rematerialize": "except_last"},
    "1f1b, rematerialize=full": {"schedule": "1f1b", "rematerialize": "full"},
    "1f1b, offload": {"schedule": "1f1b", "offload": True},
}
WIDTH = 64


def main() -> None:
    """Prints megabytes, and their ratio to the first line's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8, help="of each stage")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one in this process")
    options = parser.parse_args()
    if options.variant:
        print(peak_mb(options))
        return
    first = None
    for name in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr[-2000:])
        peak = float(run.stdout.split()[-1])
        first = first or peak
        print(f"{name:36} {peak:8.0f} MB  {peak / first:.2f}", flush=True)


def peak_mb(options: argparse.Namespace) -> float:
    """Megabytes that two steps add to what the process holds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np
    import tensorflow as tf

    from tfparallel import PipelineStrategy

    logical = [tf.config.LogicalDeviceConfiguration()] * options.stages
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = PipelineStrategy(
        [f"CPU:{i}" for i in range(options.stages)],
        options.microbatches,
        partition=[[f"*_of_{stage}"] for stage in range(options.stages)],
        **VARIANTS[options.variant],
    )
    with strategy.scope():
        dense = [
            keras.layers.Dense(WIDTH, "tanh", name=f"dense_{i}_of_{stage}")
            for stage in range(options.stages)
            for i in range(options.layers)
        ]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile(optimizer="sgd", loss="mse")
    rows = options.microbatches * options.rows
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32")
    small = options.microbatches
    model.train_on_batch(x[:small], x[:small])  # what tracing and starting take
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        model.train_on_batch(x, x)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    main()
