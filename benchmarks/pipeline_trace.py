"""What more microbatches add to the first step of a pipeline, and to its graph.

    python benchmarks/pipeline_trace.py
    python benchmarks/pipeline_trace.py --microbatches 2 8 32 --rounds 3

MobileNetV2 on two stages, the same 32 images of 32 x 32 in every case; each line is a process of
its own, in turns. Layers are measured before the clock starts. Seconds are those that Python takes
to trace a training step, and that TensorFlow takes to prepare its graph: what the first call takes
longer than a later one, which runs and stands for itself (smaller microbatches take longer).
Operations are those of the step and of its functions.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS = 32


def main() -> None:
    """Prints medians over rounds, and their ratios to the first line's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", type=int, help="with so many, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    results: dict[int, list] = {m: [] for m in options.microbatches}
    for _ in range(options.rounds):
        for m, own in results.items():
            command = [sys.executable, __file__, "--measure", str(m)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(run.stderr[-2000:])
            own.append(json.loads(run.stdout.splitlines()[-1]))
    print("microbatches       tracing, s     preparing, s       operations   a later step, s")
    first: list = []
    for m, own in results.items():
        *values, later_s = (statistics.median(x) for x in zip(*own, strict=True))
        first = first or values
        columns = [f"{x:10.1f} {x / x0:5.2f}" for x, x0 in zip(values, first, strict=True)]
        print(f"{m:12} {' '.join(columns)}{later_s:17.2f}", flush=True)


def measure(num_microbatches: int) -> tuple[float, float, int, float]:
    """Seconds of tracing and of preparing, operations, and seconds of a later step."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np
    import tensorflow as tf

    from tfparallel import PipelineStrategy

    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches)
    with strategy.scope():
        model = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=10)
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    strategy.stages(model)
    x = np.random.default_rng(0).random((ROWS, 32, 32, 3), "float32")
    batch = tf.constant(x), tf.zeros(ROWS, tf.int32)
    model.test_on_batch(*batch)  # builds losses and metrics, as `fit` does before it traces
    step = tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))

    def seconds(function: Callable) -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    with strategy.scope():
        tracing_s = seconds(lambda: step.get_concrete_function(*batch))
        first_s = seconds(lambda: step(*batch))
        later_s = statistics.median(seconds(lambda: step(*batch)) for _ in range(4))
        graph = step.get_concrete_function(*batch).graph.as_graph_def()
    functions = sum(len(function.node_def) for function in graph.library.function)
    return tracing_s, first_s - later_s, len(graph.node) + functions, later_s


if __name__ == "__main__":
    main()
