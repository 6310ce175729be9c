"""Times a pipeline's schedules against their bounds, with stages that sleep.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --stages 4 --microbatches 4 8 16 32 --unit-ms 20
    python benchmarks/pipeline.py --torch-python /root/benchvenv/bin/python

A stage that sleeps needs no core, so that any machine shows what the schedule and the executor
cost, and nothing else. A forward pass takes one unit, a backward pass two: one for the gradient of
its input, one for that of its weight. The ideal is the schedule's makespan if every device starts
its next pass as soon as it can.

With a Python that has torch, pipeline_torch.py runs afterwards: a transformer on two processes,
under ours and under torch.distributed.pipelining. Beside it: pipeline_memory.py (peak memory),
pipeline_architectures.py (real models, equal to one device).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.schedules.registry import build_schedule
from tfparallel.pipeline.plans.simulation import simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
WIDTH = 4


def main() -> None:
    """Prints measured and ideal makespans, interleaved over rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4, help="devices (default 4)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--unit-ms", type=float, default=20.0, help="of a forward pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch-python", help="a Python that has torch, to run that beside ours")
    options = parser.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(4 * options.stages)  # sleepers hold one
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * options.stages,
    )
    unit_s = options.unit_ms / 1e3
    schedules = [
        build_schedule(name, options.stages, m) for m in options.microbatches for name in SCHEDULES
    ]
    steps = [make_step(schedule, unit_s) for schedule in schedules]
    times_s: list[list[float]] = [[] for _ in steps]
    for _ in range(options.rounds):
        for step, times in zip(steps, times_s, strict=True):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
    table = Table(title=f"{options.stages} devices, medians of {options.rounds} rounds, in units")
    for heading in ("schedule", "microbatches", "measured", "ideal", "ratio", "utilisation"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for schedule, times in zip(schedules, times_s, strict=True):
        measured, ideal = statistics.median(times) / unit_s, simulate(schedule).makespan
        busy = 3 * schedule.num_microbatches * schedule.num_stages / schedule.num_devices
        table.add_row(
            schedule.name,
            str(schedule.num_microbatches),
            f"{measured:.1f}",
            f"{ideal:.0f}",
            f"{measured / ideal:.3f}",
            f"{busy / measured:.0%}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if options.torch_python:
        script = Path(__file__).with_name("pipeline_torch.py")
        arguments = ["--torch-python", options.torch_python, "--rounds", str(options.rounds)]
        subprocess.run([sys.executable, script, *arguments], check=True)


def make_step(schedule: Schedule, unit_s: float):
    """A traced step of `schedule` over stages that sleep; traced and warm."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    weights = []
    for stage in range(schedule.num_stages):
        with tf.device(names[schedule.device_of[stage]]):
            weights.append(tf.Variable(tf.eye(WIDTH)))

    @tf.function
    def step():
        executor = Executor(schedule, names)
        losses = []
        data = tf.ones([1, WIDTH])
        with tf.GradientTape() as tape:
            tape.watch(data)  # so that the first stage has as much to do as the others
            for microbatch in range(schedule.num_microbatches):
                x = tf.identity(data)
                for stage, weight in enumerate(weights):
                    (x,) = executor.call(stage, microbatch, "sleep", _sleeps(weight, unit_s), [x])
                losses.append(tf.reduce_sum(x))
        gradients = tape.gradient(losses, [*weights, data])
        executor.order(tf.compat.v1.get_default_graph())
        return gradients

    step()
    return step


def _sleeps(weight: tf.Variable, unit_s: float):
    @tf.custom_gradient
    def sleep(x, weight):
        def backward(gradient):
            of_x = _asleep(gradient @ tf.transpose(weight), unit_s)
            # One after the other: nothing else keeps both from sleeping at once.
            after = tf.transpose(x) @ gradient + 0 * tf.reduce_sum(of_x)
            return of_x, _asleep(after, unit_s)

        return _asleep(x @ weight, unit_s), backward

    return lambda x: [sleep(x, tf.identity(weight))]


def _asleep(x: tf.Tensor, seconds: float) -> tf.Tensor:
    def wait(value):
        time.sleep(seconds)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)


if __name__ == "__main__":
    main()
