"""How the first step grows along an axis of data, beside pipelines and matrices in parts.

    python benchmarks/tracing_of_meshes.py
    python benchmarks/tracing_of_meshes.py --meshes pipeline=2,model=2 --data 1 2 4

For every mesh and size of its axis of data: the operations that the first step of `fit` makes, in
all graphs; those of them that are in functions of stages and in graphs of their gradients; and
seconds of processor time, until the last of them is made, and of the whole step less those of a
second one: what TensorFlow takes to prepare a graph for each device comes between. Four blocks of a
transformer, two microbatches; each measurement in a process of its own. Operations do not depend on
the machine.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tracing import noted_operations

MESHES = ("pipeline=2", "model=2", "pipeline=2,model=2", "shard=2,pipeline=2", "shard=2,model=2")
TOKENS, LENGTH, WIDTH, HEADS, BLOCKS = 32, 8, 16, 2, 4
ROWS_OF_REPLICA = 4
OF_STAGES = ("tfparallel_stage", "gradients")  # what graphs of theirs are called


def main() -> None:
    """Prints a line for each mesh and size of its axis of data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="axes beside that of data")
    parser.add_argument("--data", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--measure", help="sizes of axes, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(_sizes(options.measure))))
        return
    for mesh in options.meshes:
        for count in options.data:
            sizes = f"data={count},{mesh}"
            command = [sys.executable, __file__, "--measure", sizes]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            operations, in_stages, traced_s, step_s = json.loads(answer.splitlines()[-1])
            line = (
                f"{operations} operations, {in_stages} in stages, {traced_s:.1f} of {step_s:.1f} s"
            )
            print(f"{sizes:32} {line}", flush=True)


def _sizes(text: str) -> dict[str, int]:
    pairs = [each.split("=") for each in text.split(",")]
    return {name: int(size) for name, size in pairs}


def measure(sizes: dict[str, int]) -> list[float]:
    """Operations of a first step, those of stages, and processor seconds: to trace, and of all."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
    import numpy as np

    from tests.helpers import open_logical_cpus

    open_logical_cpus(math.prod(sizes.values()))
    strategy = strategy_on(sizes)
    with strategy.scope():
        model = transformer()
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    rows = ROWS_OF_REPLICA * sizes["data"] * sizes.get("shard", 1)
    x = np.zeros((rows, LENGTH), "int32")

    def step_s() -> float:
        started = time.process_time()
        model.fit(x, x, batch_size=rows, verbose=0)
        return time.process_time() - started

    started = time.process_time()
    with noted_operations() as operations:
        first_s = step_s()
    traced_s = max(at for _, at in operations) - started
    in_stages = [name for name, _ in operations if name.startswith(OF_STAGES)]
    return [len(operations), len(in_stages), traced_s, first_s - step_s()]


def strategy_on(sizes: dict[str, int]) -> object:
    """On a mesh of these axes."""
    import keras

    import tfparallel

    names, numbers = tuple(sizes), tuple(sizes.values())
    devices = [f"cpu:{i}" for i in range(math.prod(numbers))]
    mesh = keras.distribution.DeviceMesh(numbers, names, devices)
    options = {}
    if "pipeline" in sizes:
        options["pipeline"] = tfparallel.PipelineOptions(2)
    if "shard" in sizes:
        options["shard"] = tfparallel.Sharding(min_size=1)
    if "model" in sizes:
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*attention/(query|key|value)/kernel"] = (None, "model", None)
        layout_map[".*attention/(query|key|value)/bias"] = ("model", None)
        layout_map[".*attention/attention_output/kernel"] = ("model", None, None)
        layout_map[".*widen.*/kernel"] = (None, "model")
        layout_map[".*widen.*/bias"] = ("model",)
        layout_map[".*narrow.*/kernel"] = ("model", None)
        options["layout_map"] = layout_map
    return tfparallel.HybridStrategy(mesh, **options)


def transformer() -> object:
    """Blocks of attention and of two layers."""
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(tokens)
    for i in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block_{i}_attention")(y, y)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"widen_{i}")(layers.LayerNormalization()(x))
        x += layers.Dropout(0.1)(layers.Dense(WIDTH, name=f"narrow_{i}")(y))
    return keras.Model(tokens, layers.Dense(TOKENS, "softmax")(x))


if __name__ == "__main__":
    main()
