"""What more microbatches add to the first step of a pipeline, which traces it, and to its graph.

    python benchmarks/pipeline_trace.py
    python benchmarks/pipeline_trace.py --microbatches 2 8 32 --rounds 3

MobileNetV2 on two stages, the same 32 images of 32 x 32 in every case; each line is a process of
its own, in turns. Layers are measured before the clock starts. Seconds are those of the
first training step, and of the fourth; operations are those of the step and of its functions.
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
    print("microbatches   first step, s   operations   fourth step, s")
    first = None
    for m, own in results.items():
        first_s, operations, later_s = (statistics.median(x) for x in zip(*own, strict=True))
        first = first or (first_s, operations)
        ratios = f"{first_s:10.1f} {first_s / first[0]:5.2f}"
        ratios += f"{operations:9.0f} {operations / first[1]:5.2f}"
        print(f"{m:12}{ratios}{later_s:14.2f}", flush=True)


def measure(num_microbatches: int) -> tuple[float, int, float]:
    """Seconds of the first step, operations, and seconds of the fourth step."""
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
    times_s = []
    for _ in range(4):
        started = time.perf_counter()
        model.train_on_batch(x, y)
        times_s.append(time.perf_counter() - started)
    with strategy.scope():  # once more, to look at the graph
        step = tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))
        graph = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph.as_graph_def()
    functions = sum(len(function.node_def) for function in graph.library.function)
    return times_s[0], len(graph.node) + functions, times_s[3]


if __name__ == "__main__":
    main()
