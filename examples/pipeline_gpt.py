r"""Train a small GPT on the source of Python's standard library, its layers on several devices.

Two devices (all GPUs, or two logical CPU devices where there is none), in a few minutes:

    python examples/pipeline_gpt.py

Four stages, another schedule, activations computed again in the backward pass:

    python examples/pipeline_gpt.py --stages 4 --schedule zero_bubble --rematerialize full

One device, for comparison; the losses are the same:

    python examples/pipeline_gpt.py --stages 1

A look at it in seconds:

    python examples/pipeline_gpt.py --quick

It prints what is on which stage, the loss, how busy the devices were in one step, and Python as the
model writes it. The model is a decoder of characters (Radford et al. 2018, "Improving language
understanding by generative pre-training").
"""

import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_integer("stages", 2, "How many devices; 1 trains without a pipeline.")
flags.DEFINE_integer("microbatches", 8, "Parts of a batch.")
flags.DEFINE_string("schedule", "1f1b", "gpipe, 1f1b, interleaved_1f1b or zero_bubble.")
flags.DEFINE_string("rematerialize", "none", "none, except_last or full.")
flags.DEFINE_integer("steps", 300, "Batches to train on.")
flags.DEFINE_integer("batch_size", 32, "Rows of a batch.")
flags.DEFINE_bool("quick", False, "A smaller model, and 20 steps.")

CHARACTERS = 128  # ASCII
CONTEXT = 64  # characters that the model sees
PROMPT = "def "


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    keras.utils.set_random_seed(0)
    width, num_blocks = (32, 2) if FLAGS.quick else (96, 4)
    steps = 20 if FLAGS.quick else FLAGS.steps
    strategy = make_strategy()
    with strategy.scope():
        model = build_gpt(width, num_blocks)
        model.compile(
            optimizer=keras.optimizers.AdamW(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = windows(standard_library(), steps * FLAGS.batch_size)
    is_pipeline = FLAGS.stages > 1
    history = model.fit(
        x, y, batch_size=FLAGS.batch_size, shuffle=False, verbose=0 if FLAGS.quick else 1
    )
    if is_pipeline:
        print(strategy.summary(model))
        print(strategy.profile(model, (x[: FLAGS.batch_size], y[: FLAGS.batch_size])))
    print(f"loss {history.history['loss'][-1]:.4f}")
    print(PROMPT + generate(model, PROMPT, 40 if FLAGS.quick else 400))


def make_strategy() -> tf.distribute.Strategy:
    """A pipeline over `--stages` devices, or plain training on one."""
    if FLAGS.stages == 1:
        return tfparallel.OneDeviceStrategy()
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        logical = [tf.config.LogicalDeviceConfiguration()] * FLAGS.stages
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, logical)
    kind = "GPU" if gpus else "CPU"
    return tfparallel.PipelineStrategy(
        [f"{kind}:{i}" for i in range(FLAGS.stages)],
        FLAGS.microbatches,
        FLAGS.schedule,
        rematerialize=FLAGS.rematerialize,
    )


class Embed(layers.Layer):
    """Characters and their positions as vectors."""

    def __init__(self, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.characters = layers.Embedding(CHARACTERS, width)
        self.positions = layers.Embedding(CONTEXT, width)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        """`[rows, CONTEXT]` ints to `[rows, CONTEXT, width]`."""
        return self.characters(tokens) + self.positions(keras.ops.arange(CONTEXT))


class Block(layers.Layer):
    """Attention to what came before, then a perceptron, each beside a skip connection."""

    def __init__(self, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(4, width // 4, name="attention")
        self.widen = layers.Dense(4 * width, activation="gelu", name="widen")
        self.narrow = layers.Dense(width, name="narrow")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """`[rows, CONTEXT, width]` to the same."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.narrow(self.widen(self.norms[1](x)))


def build_gpt(width: int, num_blocks: int) -> keras.Model:
    """A decoder: `[rows, CONTEXT]` characters to scores `[rows, CONTEXT, CHARACTERS]`."""
    tokens = keras.Input((CONTEXT,), dtype="int32")
    x = Embed(width, name="embed")(tokens)
    for i in range(num_blocks):
        x = Block(width, name=f"block_{i}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(CHARACTERS, name="scores")(x), name="gpt")


def standard_library() -> np.ndarray:
    """The ASCII characters of the standard library's modules, as one array of ints."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    characters = np.frombuffer(text, np.uint8)
    return characters[characters < CHARACTERS]


def windows(text: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` random pieces of CONTEXT characters, and the same one character further."""
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT - 1, count)
    pieces = text[starts[:, None] + np.arange(CONTEXT + 1)].astype("int32")
    return pieces[:, :-1], pieces[:, 1:]


def generate(model: keras.Model, prompt: str, count: int) -> str:
    """`count` characters that follow `prompt`, drawn from the model's probabilities."""
    draw = np.random.default_rng(0)
    text = [ord(character) for character in prompt]
    for _ in range(count):
        seen = text[-CONTEXT:]
        tokens = np.zeros([1, CONTEXT], "int32")
        tokens[0, : len(seen)] = seen
        scores = model.predict_on_batch(tokens)[0, len(seen) - 1].astype("float64") / 0.8
        odds = np.exp(scores - scores.max())
        text.append(int(draw.choice(CHARACTERS, p=odds / odds.sum())))
    return "".join(map(chr, text[len(prompt) :]))


if __name__ == "__main__":
    app.run(main)
