r"""Train a small GPT whose weights and AdamW slots are in parts, a part on each device.

Four devices (all GPUs, or four logical CPU devices where there is none), in a few minutes:

    python examples/sharded_gpt.py

Whole weights on each device, slots in parts; and what data parallel training takes:

    python examples/sharded_gpt.py --shard optimizer
    python examples/sharded_gpt.py --shard none

Blocks as units, whose activations are computed again in the backward pass:

    python examples/sharded_gpt.py --units block_* --rematerialize

The same by a file, with what blocks are given on the host until then:

    python examples/sharded_gpt.py --config configs/sharded_gpt.yaml

Two processes of one device each, which share all weights and slots:

    tfparallel launch --standalone --workers 2 examples/sharded_gpt.py --devices 1
    tfparallel launch --standalone --workers 2 examples/sharded_gpt.py --devices 1 --shard none

A look at it in seconds:

    python examples/sharded_gpt.py --quick

It prints its memory picture: what a step takes of each device by formula (`strategy.summary`),
what each device stores, and what a step allocates above that; then the loss. Model and text are in
`small_gpt.py`.
"""

import os

# Of a CPU TensorFlow counts what is in use only in oneDNN's allocator, which not every CPU gets.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from small_gpt import compiled_gpt, open_cpus, training_data

import tfparallel
from tfparallel.launch.config import build_strategy, load_config

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "shard", "parameters", ["parameters", "gradients", "optimizer", "none"], "What is in parts."
)
flags.DEFINE_integer("devices", 4, "Of this process.")
flags.DEFINE_multi_string("units", ["*"], "Layers whose weights are gathered together.")
flags.DEFINE_bool("rematerialize", False, "Whether blocks are computed again.")
flags.DEFINE_string("config", None, "Take the strategy of this file, in place of the others.")


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    logging.set_verbosity(logging.WARNING)
    keras.utils.set_random_seed(0)
    strategy = make_strategy()
    with strategy.scope():
        model = compiled_gpt()
    x, y = training_data()
    batch = FLAGS.batch_size
    measure = tfparallel.callbacks.Measure(verbose=1)
    history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[measure])
    if FLAGS.shard != "none":
        print(strategy.summary(model, x[:batch]))
    stored = bytes_stored(model)
    print(f"stored by each device: {', '.join(f'{size / 1e6:.3f}' for size in stored)} MB")
    print(f"one device would store {whole_bytes(model) / 1e6:.3f} MB")
    print(f"above it in a step: {bytes_above(model, x[:batch], y[:batch]) / 1e6:.3f} MB")
    print(f"loss {history.history['loss'][-1]:.6f}")


def make_strategy() -> tf.distribute.Strategy:
    """`--config`, or `--shard`, over the devices of this process, or of all of a job."""
    open_cpus(FLAGS.devices)
    if FLAGS.config:
        return build_strategy(load_config(FLAGS.config).strategy)
    if FLAGS.shard == "none" and os.environ.get("TF_CONFIG"):
        return tfparallel.MultiWorkerMirroredStrategy()
    if FLAGS.shard == "none":
        return tfparallel.MirroredStrategy()
    units = "*" if FLAGS.units == ["*"] else FLAGS.units
    again = {"block_*"} if FLAGS.rematerialize else "none"
    memory = tfparallel.MemoryPolicy(rematerialize=again)
    return tfparallel.ShardedStrategy(shard=FLAGS.shard, units=units, min_size=64, memory=memory)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """Weights and slots."""
    return [*model.variables, *model.optimizer.variables]


def whole_bytes(model: keras.Model) -> int:
    """Of weights and slots."""
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in state_of(model))


def bytes_stored(model: keras.Model) -> list[int]:
    """Of weights and slots, by each device of this process."""
    copies = zip(*(v.value.values for v in state_of(model)), strict=True)
    return [sum(int(np.prod(c.shape)) * c.dtype.size for c in each) for each in copies]


def bytes_above(model: keras.Model, x: np.ndarray, y: np.ndarray) -> int:
    """The most that a step allocates on the first device above what was there before it.

    Logical CPUs are one memory, so that it is all devices' there.
    """
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    memory = tf.config.experimental
    memory.reset_memory_stats(f"{kind}:0")
    before = memory.get_memory_info(f"{kind}:0")["current"]
    model.train_on_batch(x, y)
    return memory.get_memory_info(f"{kind}:0")["peak"] - before


if __name__ == "__main__":
    app.run(main)
