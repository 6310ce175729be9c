"""What more microbatches add to the first step of a pipeline, which traces it, and to its graph.

    python benchmarks/pipeline_trace.py
    python benchmarks/pipeline_trace.py --microbatches 2 8 32 --rounds 3

MobileNetV2 on two stages, the same 32 images of 32 x 32 in every case; each line is a process of
its own, in turns. Layers are measured before the clock starts. Seconds are those of the
first training step, of processors in it, and of the fourth step; operations are those of the step
and of its functions.
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
    print("microbatches    first step, s     processor, s       operations   fourth step, s")
    first: list = []
    for m, own in results.items():
        *values, later_s = (statistics.median(x) for x in zip(*own, strict=True))
        first = first or values
        columns = [f"{x:10.1f} {x / x0:5.2f}" for x, x0 in zip(values, first, strict=True)]
        print(f"{m:12} {' '.join(columns)}{later_s:17.2f}", flush=True)


def measure(num_microbatches: int) -> tuple[float, float, int, float]:
    """Seconds of the first step, of processors in it, operations, and seconds of the fourth."""
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
    strategy.stages(model)
    x = np.random.default_rng(0).random((ROWS, 32, 32, 3), "float32")
    y = np.zeros(ROWS, "int32")
    times_s, processor_s = [], []
    for _ in range(4):
        started, started_processor = time.perf_counter(), time.process_time()
        model.train_on_batch(x, y)
        times_s.append(time.perf_counter() - started)
        processor_s.append(time.process_time() - started_processor)
    with strategy.scope():  # once more, to look at the graph
        step = tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))
        graph = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph.as_graph_def()
    functions = sum(len(function.node_def) for function in graph.library.function)
    return times_s[0], processor_s[0], len(graph.node) + functions, times_s[3]


if __name__ == "__main__":
    main()
