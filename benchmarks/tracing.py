"""How long the first step takes more than a later one: with and without synchronised BatchNorm.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --models MobileNetV2 --rows mirrored_2 horovod_2 --rounds 3

For every model and strategy (a row of `tests/conformance/strategies.py`, or `stock`, TensorFlow's
MirroredStrategy of two replicas) three numbers: the seconds of processor time that a process spends
from the first operation of a graph to the last, tracing; on all of the first step of `fit`, which
TensorFlow's optimiser is part of, less a second one of the same shapes; and the operations that it
makes, in thousands, which no other process slows down. In brackets, times those without a strategy.
Six images, each measurement in a process of its own, in turns; medians of the rounds. Of several
workers, rank 0's. A pipeline refuses synchronised BatchNorm; layers of `pipeline_2_placed` are
halved by their names, so that none need be measured.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

MODELS = ("MobileNetV2", "EfficientNetB0", "DenseNet121", "ResNet50", "ConvNeXtTiny")
NO_STRATEGY = "reference"
STOCK = "stock"  # TensorFlow's MirroredStrategy of two replicas, which does not synchronise here
PLAIN, SYNCHRONISED = "plain", "synchronised"
PLACED = "pipeline_2_placed"
SIDE, IMAGES = 32, 6  # the three microbatches of the pipelines have as many rows


def main() -> None:
    """Prints a line for each model and strategy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = ["mirrored_2", "central_storage", "multi_worker_2x1", "horovod_2"]
    rows += ["parameter_server_sync", "pipeline_2", PLACED]
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rows", nargs="+", default=rows)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", nargs=3, help="row, model and BatchNorm, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    print(f"{'model':16} {'strategy':22} {'none':>18} {PLAIN:>36} {SYNCHRONISED:>36}")
    for model in options.models:
        for row in options.rows:
            cells = [(NO_STRATEGY, PLAIN), (row, PLAIN)]
            cells += [] if "pipeline" in row or row == STOCK else [(row, SYNCHRONISED)]
            rounds = [[in_processes(r, model, n) for r, n in cells] for _ in range(options.rounds)]
            none, *found = (medians(taken) for taken in zip(*rounds, strict=True))
            columns = [compared(each, none) for each in found]
            first = f"{none[0]:.1f} {none[1]:.1f} s {none[2] / 1000:.1f}k"
            print(f"{model:16} {row:22} {first:>18}", *[f"{c:>36}" for c in columns], flush=True)


def medians(taken: Sequence[Sequence[float]]) -> list[float]:
    """Of each number, over the rounds."""
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def compared(own: Sequence[float], none: Sequence[float]) -> str:
    """Seconds and thousands of operations, and how many times those of `none` they are."""
    tracing_s, all_s, operations = own
    times = [f"({a / b:.2f})" for a, b in zip(own, none, strict=True)]
    seconds = f"{tracing_s:.1f} {times[0]} {all_s:.1f} s {times[1]}"
    return f"{seconds} {operations / 1000:.1f}k {times[2]}"


def in_processes(row_name: str, model: str, norm: str) -> list[float]:
    """`measure` in as many processes as the strategy has workers; rank 0's answer."""
    from tests.conformance.strategies import ROWS

    row = ROWS[NO_STRATEGY if row_name in (STOCK, PLACED) else row_name]
    command = [sys.executable, __file__, "--measure", row_name, model, norm]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | environment, text=True)
        for environment in row.environments(row.num_workers)
    ]
    answers = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        sys.exit(f"{' '.join(command)} failed.")
    return json.loads(answers[0].splitlines()[-1])


def measure(row_name: str, model_name: str, norm: str) -> list[float]:
    """Processor seconds of tracing and of a first step less a second; the operations it makes."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
    import numpy as np

    strategy = made(row_name, model_name)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(model_name, norm == SYNCHRONISED)
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = np.zeros((IMAGES, SIDE, SIDE, 3), "float32"), np.zeros(IMAGES, "int32")

    def step_s() -> float:
        started = time.process_time()
        model.fit(x, y, batch_size=IMAGES, verbose=0)
        return time.process_time() - started

    with noted_operations() as operations:
        first_s = step_s()
    (_, began_s), (_, ended_s) = operations[0], operations[-1]
    return [ended_s - began_s, first_s - step_s(), len(operations)]


def made(row_name: str, model_name: str) -> Any:
    """The strategy of a row, on devices that this opens."""
    import keras
    import tensorflow as tf

    import tfparallel
    from tests.conformance.strategies import ROWS
    from tests.helpers import open_logical_cpus

    if row_name == STOCK:
        open_logical_cpus(2)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if row_name == PLACED:
        open_logical_cpus(2)
        names = [each.name for each in build(model_name, False).operations[1:]]  # without the input
        keras.backend.clear_session()  # names of layers begin anew
        halves = [names[: len(names) // 2], names[len(names) // 2 :]]
        return tfparallel.PipelineStrategy(2, num_microbatches=3, partition=halves)
    open_logical_cpus(ROWS[row_name].devices_per_worker)
    return ROWS[row_name].make()


@contextlib.contextmanager
def noted_operations() -> Iterator[list[tuple[str, float]]]:
    """Gives what gets each operation's graph's name, and the processor time, within it."""
    from tensorflow.python.framework.func_graph import FuncGraph

    create, made = FuncGraph._create_op_internal, []

    def noting(graph: Any, *args: Any, **kwargs: Any) -> Any:
        operation = create(graph, *args, **kwargs)
        made.append((graph.name, time.process_time()))
        return operation

    FuncGraph._create_op_internal = noting
    try:
        yield made
    finally:
        FuncGraph._create_op_internal = create


def build(name: str, synchronized: bool) -> Any:
    """A model of `keras.applications`."""
    import keras

    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(SIDE, SIDE, 3), classes=3)

    def copy(layer: keras.layers.Layer) -> keras.layers.Layer:
        config = layer.get_config()
        if isinstance(layer, keras.layers.BatchNormalization):
            config["synchronized"] = synchronized
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=copy)


if __name__ == "__main__":
    main()
