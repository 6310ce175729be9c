"""Times meshes against their bounds, with stages and links that sleep; counts what devices hold.

    python benchmarks/hybrid.py
    python benchmarks/hybrid.py --unit-ms 80 --steps 5     # on a busy machine

What sleeps needs no core, so that any machine shows what strategies and schedules cost, and nothing
else. A forward pass of a stage takes one unit, a backward pass two; a link takes a part of a unit,
in both directions, and the stage that sends waits for it. A step is a whole one: loss, sums over
pipelines and update are in it.

1. Pipelines beside one another: the step beside the makespan of one pipeline, which is the bound.
2. A stage that takes twice as long as the others: with one device, and with two that take
   microbatches in turn.
3. What each device holds of weights and slots under meshes of four devices, beside the formula.
4. What a step sends along each axis of those, counted in its graph, beside the formula.
"""

import argparse
import collections
import math
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfparallel
from benchmarks import crossing
from tfparallel.pipeline.plans.schedules.registry import build_schedule
from tfparallel.pipeline.plans.simulation import simulate

WIDTH = 4
DEVICES = 8
WIDTH_OF_LAYER = 128
ROWS_OF_STEP = 64
MICROBATCHES = 2  # of each pipeline, where bytes are counted


class Sleeping(keras.layers.Layer):
    """`x @ w`, which takes a time forward and twice as long backward.

    Args:
        seconds: of a forward pass.
        sends: seconds to send what comes of it, forward and backward.
        devices: how many calls there are at a time, as many as devices have the stage.
    """

    def __init__(self, seconds: float, sends: tuple, devices: int = 1, **options):
        super().__init__(**options)
        self._seconds, self._sends = seconds, sends
        self._devices = threading.Semaphore(devices)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], WIDTH), initializer="identity")

    def call(self, x):
        there, back = self._sends

        @tf.custom_gradient
        def forward(x, kernel):
            def backward(gradient):
                of_x = self._asleep(gradient @ tf.transpose(kernel), self._seconds + back)
                # One after the other: nothing else keeps both from sleeping at once.
                of_kernel = tf.transpose(x) @ gradient + 0 * tf.reduce_sum(of_x)
                return of_x, self._asleep(of_kernel, self._seconds)

            return self._asleep(x @ kernel, self._seconds + there), backward

        return forward(x, tf.convert_to_tensor(self.kernel))

    def _asleep(self, x, seconds):
        def wait(value):
            with self._devices:
                time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)


def main() -> None:
    """Prints the three tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unit-ms", type=float, default=40.0, help="of a forward pass")
    parser.add_argument("--link", type=float, default=0.25, help="units that a link takes")
    parser.add_argument("--microbatches", type=int, default=8, help="of each pipeline")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zero_bubble"])
    parser.add_argument("--steps", type=int, default=3, help="of which the median counts")
    options = parser.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(4 * DEVICES)  # sleepers hold one
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * DEVICES,
    )
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(pipelines_beside_one_another(options))
    console.print(a_slow_stage(options))
    console.print(what_devices_hold())
    console.print(what_a_step_sends())


# ---- time ----------------------------------------------------------------------------------------


def pipelines_beside_one_another(options) -> Table:
    """Steps of one pipeline and of several, beside the bound."""
    unit_s = options.unit_ms / 1e3
    title = f"Step of pipelines, units of {options.unit_ms:g} ms; a link takes {options.link:g}"
    table = _table(title, "schedule", "mesh", "step", "bound", "ratio")
    for name in options.schedules:
        for sizes in ({"pipeline": 2}, {"data": 2, "pipeline": 2}, {"data": 2, "pipeline": 4}):
            stages = sizes["pipeline"]
            strategy = tfparallel.HybridStrategy(
                _mesh(sizes),
                pipeline=tfparallel.PipelineOptions(
                    options.microbatches, name, partition=[[f"s{i}"] for i in range(stages)]
                ),
            )
            layers = [(1.0, sizes.get("data", 1))] * stages
            rows = options.microbatches * sizes.get("data", 1)
            measured = step_s(strategy, layers, rows, unit_s, options) / unit_s
            bound = _makespan(name, stages, options.microbatches, options.link)
            mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            table.add_row(name, mesh, f"{measured:.1f}", f"{bound:.1f}", f"{measured / bound:.3f}")
    return table


def _makespan(name: str, stages: int, microbatches: int, link: float) -> float:
    forward = [1 + link * (i < stages - 1) for i in range(stages)]
    sent_back = [link * (i > 0) for i in range(stages)]
    return simulate(
        build_schedule(name, stages, microbatches),
        forward,
        [2 + each for each in sent_back],
        # The first stage has no input to differentiate: all its backward pass is its weight's.
        [0.0, *(1 + each for each in sent_back[1:])],
        [2.0, *[1.0] * (stages - 1)],
    ).makespan


def a_slow_stage(options) -> Table:
    """A stage that takes twice as long, with one device and with two."""
    unit_s, microbatches = options.unit_ms / 1e3, 4 * options.microbatches
    times = {}
    for devices in (["CPU:0", "CPU:1", "CPU:3"], ["CPU:0", ["CPU:1", "CPU:2"], "CPU:3"]):
        count = 1 if isinstance(devices[1], str) else 2
        strategy = tfparallel.PipelineStrategy(
            devices, microbatches, partition=[["s0"], ["s1"], ["s2"]]
        )
        layers = [(1.0, 1), (2.0, count), (1.0, 1)]
        times[count] = step_s(strategy, layers, microbatches, unit_s, options, 0.0) / unit_s
    title = f"Stages of 1, 2 and 1 units, {microbatches} microbatches"
    table = _table(title, "devices of the slow stage", "step", "throughput")
    for count, measured in times.items():
        table.add_row(str(count), f"{measured:.1f}", f"{times[1] / measured:.2f}")
    return table


def step_s(strategy, stages, rows: int, unit_s: float, options, link=None) -> float:
    """The median time of a step, once it is traced.

    Args:
        stages: of each the units of a forward pass, and its devices. The last sends nothing
            forward, and the first nothing backward.
        link: units that it takes; by default that of `options`.
    """
    link_s = (options.link if link is None else link) * unit_s
    with strategy.scope():
        x = y = keras.Input((WIDTH,))
        for i, (units, devices) in enumerate(stages):
            sends = link_s * (i < len(stages) - 1), link_s * (i > 0)
            y = Sleeping(units * unit_s, sends, devices, name=f"s{i}")(y)
        model = keras.Model(x, y)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = np.ones((rows, WIDTH), "float32")
    model.train_on_batch(data, data)
    times = []
    for _ in range(options.steps):
        started = time.perf_counter()
        model.train_on_batch(data, data)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# ---- memory and bytes --------------------------------------------------------------------------

PARTS = (  # each axis alone: of weights and slots on a device
    ("data", "all"),
    ("shard", "1 / 4"),
    ("pipeline", "1 / 4, its stage's"),
    ("model", "1 / 4, of what is laid out"),
)
PAIRS = (
    ("data", "shard"),
    ("data", "pipeline"),
    ("data", "model"),
    ("shard", "pipeline"),
    ("shard", "model"),
    ("pipeline", "model"),
)
STAGES = ("parameters", "gradients")  # of sharding: beside a pipeline or a model's axis


def meshes() -> list[tuple[dict[str, int], str]]:
    """Of four devices, and what is in parts along an axis of shards."""
    found = [({axis: 4}, "parameters") for axis, _ in PARTS]
    for pair in PAIRS:
        sizes = dict.fromkeys(pair, 2)
        stages = STAGES if "shard" in pair and "data" not in pair else STAGES[:1]
        found += [(sizes, what) for what in stages]
    return found


def _name(sizes: dict[str, int], what: str) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return mesh if what == "parameters" else f"{mesh}, {what}"


def what_devices_hold() -> Table:
    """Bytes of weights and of Adam's slots on each device, and the formula."""
    title = "Weights and slots of Adam on each of four devices, KiB"
    table = _table(title, "mesh", "all", "on the fullest device", "share", "formula")
    for sizes, what in meshes():
        held, whole = bytes_by_device(sizes, what)
        fullest = max(held.values())
        table.add_row(
            _name(sizes, what),
            f"{whole / 1024:.0f}",
            f"{fullest / 1024:.0f}",
            f"{fullest / whole:.3f}",
            f"{share_of_device(sizes, what):.3f}",
        )
    return table


def share_of_device(sizes: dict[str, int], what: str) -> float:
    """Of weights and Adam's two slots for each: all axes but data divide them.

    With "gradients" each device beside its piece has the whole of its weights.
    """
    of_stage = 1 / (sizes.get("pipeline", 1) * sizes.get("model", 1))
    pieces = of_stage / sizes.get("shard", 1)
    return pieces if what == "parameters" else (3 * pieces + of_stage) / 3


def what_a_step_sends() -> Table:
    """Bytes along each axis, and the formula."""
    title = f"What a step of {ROWS_OF_STEP} rows sends along each axis, KiB"
    table = _table(title, "mesh", "axis", "sent", "formula", "ratio")
    for sizes, what in meshes():
        sent = bytes_by_axis(sizes, what)
        for axis in sizes:
            formula = bytes_along(axis, sizes, what)
            table.add_row(
                _name(sizes, what),
                axis,
                f"{sent[axis] / 1024:.0f}",
                f"{formula / 1024:.0f}",
                f"{sent[axis] / formula:.2f}",
            )
    return table


def bytes_by_axis(sizes: dict[str, int], what: str) -> dict[str, int]:
    """What crosses each axis in a step, of rows of the batch apart ("rows")."""
    strategy, model = model_on(sizes, what)
    x = tf.ones((ROWS_OF_STEP, WIDTH_OF_LAYER))
    model.train_on_batch(x, x)
    step = tf.function(lambda batch: strategy.run(model.train_step, ((batch, batch),)))
    replicas = strategy.extended._num_replicas_in_sync
    graph = step.get_concrete_function(x).graph
    links = crossing.bytes_by_link(graph, ROWS_OF_STEP // replicas, "CPU:0")
    sent: dict[str, int] = collections.Counter()
    for (source, target, is_rows), size in links.items():
        sent["rows" if is_rows else axis_between(source, target, sizes)] += size
    return sent


def axis_between(source: str, target: str, sizes: dict[str, int]) -> str:
    """The innermost axis along which two devices are apart."""
    places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    here, there = (np.argwhere(places == int(name.split(":")[1]))[0] for name in (source, target))
    return [axis for axis, a, b in zip(sizes, here, there) if a != b][-1]


def bytes_along(axis: str, sizes: dict[str, int], what: str) -> int:
    """What an axis has to send in a step of four layers, all devices together.

    Sums go to one device and back to the others, which is as much as a ring sends.
    """
    others = sizes[axis] - 1
    weights = 4 * WIDTH_OF_LAYER**2 * 4
    outputs = ROWS_OF_STEP * WIDTH_OF_LAYER * 4  # of one layer
    if axis == "data":
        return 2 * others * weights  # sums of gradients, once for each copy
    if axis == "shard":  # weights gathered, and gradients scattered, in each copy
        is_in_stages = "pipeline" in sizes and what == "parameters"
        gathers = MICROBATCHES if is_in_stages else 1  # in stages for each microbatch
        return (gathers + 1) * others * weights * sizes.get("data", 1)
    if axis == "pipeline":
        return 2 * others * outputs  # forward, and gradients back
    # Two pairs of a column and a row: a sum, a gradient, and for the second the input and the sum
    # of the input's gradient; the input of the first is rows of the batch where that is cut, but to
    # a stage its first device passes it on.
    is_cut = len(sizes) > 1 and "pipeline" not in sizes
    return (6 if is_cut else 7) * others * outputs


def model_on(sizes: dict[str, int], what: str = "parameters") -> tuple:
    """A mesh's strategy, and a compiled model of four equal layers under it."""
    mesh, options = _mesh(sizes), {}
    if "model" in sizes:
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*layer_[02]/kernel"] = (None, "model")
        layout_map[".*layer_[13]/kernel"] = ("model", None)
        options["layout_map"] = layout_map
    if "shard" in sizes:
        options["shard"] = tfparallel.Sharding(what)
    if "pipeline" in sizes:
        count = sizes["pipeline"]
        names = [f"layer_{i}" for i in range(4)]
        partition = [names[i * 4 // count : (i + 1) * 4 // count] for i in range(count)]
        options["pipeline"] = tfparallel.PipelineOptions(MICROBATCHES, partition=partition)
    strategy = tfparallel.HybridStrategy(mesh, **options)
    with strategy.scope():
        x = y = keras.Input((WIDTH_OF_LAYER,))
        for i in range(4):
            y = keras.layers.Dense(WIDTH_OF_LAYER, use_bias=False, name=f"layer_{i}")(y)
        model = keras.Model(x, y)
        model.compile("adam", "mse")
    return strategy, model


def bytes_by_device(sizes: dict[str, int], what: str = "parameters") -> tuple[dict[str, int], int]:
    """What each device holds of a model of four equal layers, and what one device would."""
    _, model = model_on(sizes, what)
    data = np.ones((8, WIDTH_OF_LAYER), "float32")
    model.train_on_batch(data, data)
    held: dict[str, int] = collections.Counter()
    slots = [v for v in model.optimizer.variables if len(v.shape) > 0]
    for variable in [*model.trainable_weights, *slots]:
        for stored in stored_in(variable):
            held[stored.device] += stored.shape.num_elements() * stored.dtype.size
        for device, size in getattr(variable.value, "bytes_kept", dict)().items():
            held[device] += size
    whole = sum(int(np.prod(v.shape)) * 4 for v in [*model.trainable_weights, *slots])
    return held, whole


def stored_in(variable) -> list:
    """The variables of TensorFlow that hold a variable of Keras, each once."""
    behind = variable.value
    parts = getattr(behind, "parts", None)
    copies = tf.nest.flatten(list(parts)) if parts else list(behind.values)
    return list({id(copy): copy for copy in copies}.values())


# ---- what both share -----------------------------------------------------------------------------


def _mesh(sizes: dict[str, int]) -> keras.distribution.DeviceMesh:
    count = int(np.prod(list(sizes.values())))
    devices = [f"cpu:{i}" for i in range(count)]
    return keras.distribution.DeviceMesh(tuple(sizes.values()), tuple(sizes), devices)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    return table


if __name__ == "__main__":
    main()
