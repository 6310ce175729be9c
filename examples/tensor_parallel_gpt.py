r"""Train a small GPT whose matrices are in parts: two devices compute each layer together.

Two devices (all GPUs, or two logical CPU devices where there is none), in a few minutes:

    python examples/tensor_parallel_gpt.py

Two groups of two devices, the rows of a batch divided by two:

    python examples/tensor_parallel_gpt.py --replicas 2

A look at it in seconds:

    python examples/tensor_parallel_gpt.py --quick

The losses are those of one device, `--parts 1`. It prints how each weight is cut and what each
layer sends, the loss, and how long one batch of one row takes. Model and text are in
`small_gpt.py`; nothing in it says what is in parts: `layout="auto"` finds that.
"""

import time

import keras
import tensorflow as tf
from absl import app, flags
from small_gpt import compiled_gpt, open_cpus, training_data

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_integer("parts", 2, "Devices that compute one layer.")
flags.DEFINE_integer("replicas", 1, "Groups of so many devices.")


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    keras.utils.set_random_seed(0)
    strategy = make_strategy()
    with strategy.scope():
        model = compiled_gpt()
    x, y = training_data()
    history = model.fit(
        x,
        y,
        batch_size=FLAGS.batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[tfparallel.callbacks.Measure(verbose=1)],
    )
    print(strategy.summary(model))
    print(f"loss {history.history['loss'][-1]:.6f}")
    print(f"one row: {1000 * seconds_of_one_row(model, x[:1]):.1f} ms")


def make_strategy() -> tf.distribute.Strategy:
    """`--replicas` groups of `--parts` devices."""
    shape = (FLAGS.replicas, FLAGS.parts)
    kind = open_cpus(shape[0] * shape[1]).lower()
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
