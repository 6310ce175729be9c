r"""Train a small GPT whose matrices are in parts: two devices compute each layer together.

Two devices (all GPUs, or two logical CPU devices where there is none), in a few minutes:

    python examples/tensor_parallel_gpt.py

Two groups of two devices, the rows of a batch divided by two:

    python examples/tensor_parallel_gpt.py --replicas 2

A look at it in seconds:

    python examples/tensor_parallel_gpt.py --quick

The losses are those of one device, `--parts 1`. It prints how each weight is cut and what each
layer sends, the loss, and how long one batch of one row takes. Model and text are those of
`pipeline_gpt.py`; nothing in it says what is in parts: `layout="auto"` finds that.
"""

import time

import keras
import pipeline_gpt as gpt
import tensorflow as tf
from absl import app, flags

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_integer("parts", 2, "Devices that compute one layer.")
flags.DEFINE_integer("replicas", 1, "Groups of so many devices.")


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    keras.utils.set_random_seed(0)
    width, num_blocks = (32, 2) if FLAGS.quick else (96, 4)
    steps = 20 if FLAGS.quick else FLAGS.steps
    strategy = make_strategy()
    with strategy.scope():
        model = gpt.build_gpt(width, num_blocks)
        model.compile(
            optimizer=keras.optimizers.AdamW(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = gpt.windows(gpt.standard_library(), steps * FLAGS.batch_size)
    history = model.fit(x, y, batch_size=FLAGS.batch_size, shuffle=False, verbose=0)
    print(strategy.summary(model))
    print(f"loss {history.history['loss'][-1]:.6f}")
    print(f"one row: {1000 * seconds_of_one_row(model, x[:1]):.1f} ms")


def make_strategy() -> tf.distribute.Strategy:
    """`--replicas` groups of `--parts` devices."""
    shape = (FLAGS.replicas, FLAGS.parts)
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        logical = [tf.config.LogicalDeviceConfiguration()] * (shape[0] * shape[1])
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, logical)
    kind = "gpu" if gpus else "cpu"
    devices = [f"{kind}:{i}" for i in range(shape[0] * shape[1])]
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
    return tfparallel.TensorParallelStrategy("auto", device_mesh=mesh)


def seconds_of_one_row(model: keras.Model, row: tf.Tensor) -> float:
    """The shortest of a few calls of `predict_on_batch`."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        model.predict_on_batch(row)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    app.run(main)
